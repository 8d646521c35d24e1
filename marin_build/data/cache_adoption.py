"""Looks through a token cache that others made before it is adopted: every id, and the edges of every document.

What no look can prove, such as that the ids are of this tokenizer and of that text, is not asserted: it is listed, and
stands in the record.

Shapes: N documents and T ids of a record batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import pyarrow

from marin_build.artifact.context import Adopted, BuildResult
from marin_build.artifact.strict_json import parse_object
from marin_build.data.foreign_cache import ATTENTION_MASK, INPUT_IDS, CacheFile
from marin_build.data.ledger import STATE
from marin_build.data.progress import Progress
from marin_build.data.shards import LEDGER, LOSS_MASK
from marin_build.data.vocabulary import LoadedTokenizer
from marin_build.foreign import shortened
from marin_build.recipe.schema import TokenizedRecipe
from marin_build.recipe.sources import Chat

MAX_BATCHES = 500_000
"""Each becomes a shard, of which a reader keeps three arrays in memory: about a kilobyte."""
ACCEPTED = f"""
  accepted are: a token set of marin_build, with its {LEDGER}; a folder that `save_to_disk` of `datasets` wrote;
  Arrow streams or files, *.arrow, in the order of their names; both with a column {INPUT_IDS} of lists of integers
  anything else: adopt its text as raw/…, and build the token set from that"""


def check_cache(adopted: Adopted, tokenizer: LoadedTokenizer) -> BuildResult:
    """A cache of others that the recipe could have made; its ledger and what is not proven are the details.

    Raises:
        RequestError: it is none, or ids, documents or columns contradict the recipe.
        DamageError: a file cannot be read.
    """
    recipe = adopted.recipe
    assert isinstance(recipe, TokenizedRecipe)
    if isinstance(recipe.format, Chat):
        raise adopted.refused(f"format.type chat needs a loss mask and a {LEDGER}; a cache of others has neither")
    names = _files_in_order(adopted)
    sizes = {name: (adopted.folder / name).stat().st_size for name in names}
    with Progress(logging.getLogger("marin_build"), "looking at ids", sum(sizes.values())) as progress:
        look = _Look(adopted, recipe, tokenizer, progress)
        shards = [{"file": name, "bytes": sizes[name], **look.counts(name, sizes[name])} for name in names]
    look.finish()
    totals = {key: sum(sum(shard[key]) for shard in shards) for key in ("documents", "tokens")}
    if not totals["tokens"]:
        raise adopted.refused("it holds no ids")
    ledger = {"totals": totals, "tokenizer": tokenizer.facts(recipe.tokenizer), "shards": shards}
    details = {"unproven": _unproven(recipe, look), "ledger": ledger}
    return BuildResult(metrics={**totals, "shards": len(shards)}, details=details)


def _unproven(recipe: TokenizedRecipe, look: _Look) -> list[str]:
    claims = [
        f"that the ids are of {recipe.tokenizer}: seen is that each is below {look.vocabulary_size}",
        "that the text is what source, format, split, token_budget and max_bad_documents of its recipe say",
        "that a row is a whole document" + (", but for its first and last id" if look.edges else ""),
    ]
    if look.others:
        claims.append(f"that all tokens are to be trained on: not read are {shortened(', '.join(look.others), 200)}")
    return claims


# ---- which files -----------------------------------------------------------------------------------------------------


def _files_in_order(adopted: Adopted) -> list[str]:
    names = sorted(name for name in adopted.files if name.endswith(".arrow"))
    if "dataset_dict.json" in adopted.files:
        raise adopted.refused(f"it holds several data sets; adopt one of them, such as {adopted.place}/train")
    if STATE in adopted.files:
        return _of_state(adopted, names)
    if not names:
        raise adopted.refused(f"{_seen(adopted.files)}{ACCEPTED}")
    return names


def _seen(files: Sequence[str]) -> str:
    lasts = {name.rpartition("/")[2] for name in files}
    if lasts & {"shard_ledger.json", ".zarray", "zarr.json"}:
        return "it is a zarr store, as Levanter keeps its caches"
    return f"it has no Arrow files; seen: {shortened(', '.join(sorted(lasts)), 200)}"


def _of_state(adopted: Adopted, names: Sequence[str]) -> list[str]:
    """The files that `state.json` lists, in its order."""
    try:
        state = parse_object((adopted.folder / STATE).read_bytes())
        listed = [entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise adopted.refused(f"its {STATE} is not as `datasets` writes it: {shortened(str(error), 200)}") from None
    if state.get("_indices_data_files"):
        raise adopted.refused("its rows are in the order of another file; write it anew with `flatten_indices`")
    if missing := [name for name in listed if name not in names] or (["any file"] if not listed else []):
        raise adopted.refused(f"its {STATE} names {shortened(str(missing[0]), 200)!r}, which is not there")
    if len(set(listed)) < len(listed):
        raise adopted.refused(f"its {STATE} names a file twice")
    return listed


# ---- what is in them -------------------------------------------------------------------------------------------------


class _Look:
    """A pass over all record batches, against what the recipe says of them."""

    def __init__(
        self, adopted: Adopted, recipe: TokenizedRecipe, tokenizer: LoadedTokenizer, progress: Progress
    ) -> None:
        self._adopted, self._progress = adopted, progress
        self.vocabulary_size = tokenizer.vocab_size
        self.edges = {"bos": tokenizer.bos_id} if recipe.add_bos else {}
        self.edges |= {"eos": tokenizer.eos_id} if recipe.add_eos else {}
        for role, number in self.edges.items():
            if number is None:
                raise adopted.refused(f"add_{role} of its recipe is true, and {recipe.tokenizer} has no {role} token")
        special = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
        self._never = {role: number for role, number in special.items() if role not in self.edges}
        self._with, self._documents, self._batches = dict.fromkeys(self._never, 0), 0, 0
        self.others: list[str] = []
        """Columns that are not read."""

    def counts(self, name: str, size: int) -> dict[str, list[int]]:
        """Documents and tokens of each record batch of a file."""
        file, rows, done = CacheFile(self._adopted.folder / name), 0, 0
        documents, tokens = list[int](), list[int]()
        if LOSS_MASK in file.other_columns:
            raise self._adopted.refused(f"{name} has a column {LOSS_MASK}, which is read in sets with a {LEDGER} alone")
        self.others = sorted({*self.others, *file.other_columns})
        self._batches += len(file.batches)
        if self._batches > MAX_BATCHES:
            raise self._adopted.refused(f"it has more than {MAX_BATCHES:,} record batches; write it with larger ones")
        for number in range(len(file.batches)):
            ids, offsets = file.lists(number)
            self._check(file, name, number, ids, offsets, rows)
            documents.append(len(offsets) - 1)
            tokens.append(len(ids))
            self._progress.add(ids.nbytes, len(ids))
            rows, done = rows + documents[-1], done + ids.nbytes
        self._progress.add(size - done)
        return {"documents": documents, "tokens": tokens}

    def _check(
        self, file: CacheFile, name: str, number: int, ids: np.ndarray, offsets: np.ndarray, before: int
    ) -> None:
        def refuse(at: int, problem: str) -> NoReturn:
            raise self._adopted.refused(f"row {before + at:,} of {name} {problem}")

        try:
            file.batches[number].validate(full=True)  # that offsets only rise, and end where the values do
        except pyarrow.ArrowException as error:
            raise file.problem(f"is damaged in record batch {number}: {shortened(str(error), 200)}") from None
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.vocabulary_size):
            place = int(np.argmax((ids < 0) | (ids >= self.vocabulary_size)))
            row = int(offsets.searchsorted(place, side="right")) - 1
            refuse(row, f"has the id {int(ids[place])}; ids of its tokenizer are 0 to {self.vocabulary_size - 1}")
        ends = {"bos": _edge_ids(ids, offsets, offsets[:-1]), "eos": _edge_ids(ids, offsets, offsets[1:] - 1)}
        for role, wanted in self.edges.items():
            if len(wrong := np.flatnonzero(ends[role] != wanted)):
                verb = {"bos": "begin", "eos": "end"}[role]
                refuse(int(wrong[0]), f"does not {verb} with id {wanted}, and add_{role} of its recipe is true")
        for role, special in self._never.items():
            self._with[role] += int((ends[role] == special).sum()) if special is not None else 0
        self._documents += len(offsets) - 1
        self._check_attention(file, number, refuse)

    def _check_attention(self, file: CacheFile, number: int, refuse: Any) -> None:
        if ATTENTION_MASK in file.other_columns:
            mask, offsets = file.lists(number, ATTENTION_MASK)
            if not mask.all():
                row = int(offsets.searchsorted(int(np.argmin(mask != 0)), side="right")) - 1
                refuse(row, f"has padding ({ATTENTION_MASK} 0), which would be trained on; write it without padding")

    def finish(self) -> None:
        for role, seen in self._with.items():
            if seen == self._documents > 0:
                verb = {"bos": "begins", "eos": "ends"}[role]
                raise self._adopted.refused(
                    f"each of its rows {verb} with id {self._never[role]}, and add_{role} of its recipe is false"
                )


def _edge_ids(ids: np.ndarray, offsets: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The id [N] at a place of each document; -1 of those that are empty."""
    found = np.full(len(places), -1, np.int64)
    filled = np.diff(offsets) > 0
    found[filled] = ids[places[filled]]
    return found
