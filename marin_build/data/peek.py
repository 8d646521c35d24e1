"""A look into token sets: rows of ids as the text that they stand for, every special id told from text that spells one.

Only what a row needs is opened: the ledger, the tokenizer, and the shards that the row lies in; from an object store
no more than these is brought here.

Shapes: T tokens of a row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from marin_build.artifact.record import Record, entry_target, read_record
from marin_build.artifact.store import Store
from marin_build.data.foreign_cache import CacheFile, recorded_ledger, shard_of
from marin_build.data.mixture import Mixture
from marin_build.data.shards import LEDGER, Shard, read_ledger
from marin_build.data.vocabulary import TOKENIZER, Tokens, read_tokens
from marin_build.errors import DamageError, RequestError
from marin_build.recipe.mixture_schedule import schedule_of
from marin_build.recipe.schema import CheckpointRecipe
from marin_build.recipe.target import Target, parse_target

HEAD, TAIL = 200, 50
"""Tokens that are shown of a long row: from its beginning and before its end."""


Part = tuple[np.ndarray, np.ndarray | None, int]
"""Ids [T] of one document, which of them are trained on [T] (None: all), and the document's number."""


@dataclass(frozen=True)
class Piece:
    """A run of tokens of one sort, one special token, or a note between them."""

    ids: tuple[int, ...] = ()
    texts: tuple[bytes, ...] = ()
    """The bytes of text of each id; of a special one, its name."""
    special: bool = False
    """An id of its own and no text, whatever its name: a document that spells the name has other ids."""
    trained: bool | None = None
    """Whether the tokens are trained on; None: the set does not say, and all are."""
    omitted: int = 0
    """Tokens that are left out here."""
    document: int | None = None
    """Here begins the document of this number."""

    @property
    def text(self) -> str:
        """The text of all its tokens; bytes that are no character are spelled out."""
        return _text(b"".join(self.texts))

    @property
    def tokens(self) -> list[str]:
        """The text of each of its tokens."""
        return list(map(_text, self.texts))


@dataclass(frozen=True)
class Row:
    """A document of a token set, or a row of a training batch."""

    facts: Mapping[str, Any]
    """Where it is from."""
    tokens: int
    pieces: tuple[Piece, ...]
    trained: int | None = None
    """How many of its tokens are trained on; None: all."""


class PeekedSet:
    """A finished token set of which only what is looked at is opened.

    Raises:
        RequestError: it is not finished.
        DamageError: it is not what its record and its ledger say.
    """

    def __init__(self, store: Store, target: Target) -> None:
        self._store, self._record = store, finished(store, target)
        self.target = target
        self.ledger = recorded_ledger(self._record.to_dict()) or read_ledger(self._bring(LEDGER).parent)
        shards = self.ledger["shards"]
        self._first_documents = [0, *accumulate(shard["documents"] for shard in shards)]
        self._first_tokens = [0, *accumulate(shard["tokens"] for shard in shards)]
        self._shards: dict[int, Shard] = {}
        self._files: dict[Path, CacheFile] = {}

    @property
    def documents(self) -> int:
        return self._first_documents[-1]

    @property
    def tokens(self) -> int:
        return self._first_tokens[-1]

    def first_document(self, shard: str) -> int:
        """The first document of a shard, given by its number or its file."""
        files = [entry["file"] for entry in self.ledger["shards"]]
        names = list(dict.fromkeys(files))
        if shard not in names and not (shard.isascii() and shard.isdecimal() and int(shard) < len(names)):
            some = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
            raise RequestError(f"{self.target} has no shard {shard!r}: it has 0 to {len(names) - 1}: {some}")
        return self._first_documents[files.index(shard if shard in names else names[int(shard)])]

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray | None, Mapping[str, Any]]:
        """Ids [T] of a document, which of them are trained on [T] (None: all), and where it is."""
        index = bisect_right(self._first_documents, number) - 1
        inside = number - self._first_documents[index]
        shard = self._shard(index)
        start, end = shard.offsets[inside : inside + 2].tolist()
        name = self.ledger["shards"][index]["file"]
        facts = {"document": number, "shard": name, "document_of_shard": number - self.first_document(name)}
        return shard.ids[start:end], _trained(shard, start, end), facts

    def parts(self, start: int, end: int) -> Iterator[Part]:
        """The tokens [start, end) of the whole set, cut where documents begin, each with its document's number."""
        for index in range(len(self._first_tokens) - 1):
            first, after = max(start, self._first_tokens[index]), min(end, self._first_tokens[index + 1])
            if first >= after:
                continue
            shard, base = self._shard(index), self._first_tokens[index]
            offsets = shard.offsets.astype(np.int64) + base
            inside = [first, *offsets[(offsets > first) & (offsets < after)].tolist(), after]
            for begin, stop in pairwise(dict.fromkeys(inside)):
                document = self._first_documents[index] + int(np.searchsorted(offsets, begin, side="right")) - 1
                yield shard.ids[begin - base : stop - base], _trained(shard, begin - base, stop - base), document

    def _shard(self, index: int) -> Shard:
        if index not in self._shards:
            entry = self.ledger["shards"][index]
            self._shards[index] = shard_of(self._bring(entry["file"]), entry, self._files)
        return self._shards[index]

    def _bring(self, name: str) -> Path:
        return bring(self._store, self._record, name)

    def vocabulary(self) -> Tokens:
        """What its ids mean.

        Raises:
            RequestError: its tokenizer is not here any more, or is another one now.
        """
        target = next((entry_target(e) for e in self._record.dependencies if e["name"].startswith("tokenizers/")), None)
        record = read_record(self._store, target) if target else None
        if target is None or record is None:
            raise RequestError(f"the tokenizer of {self.target}, {target}, is not here, so its ids cannot be read")
        try:
            tokens = read_tokens(bring(self._store, record, TOKENIZER))
        except (OSError, ValueError) as error:
            raise DamageError(f"{target} is damaged: its {TOKENIZER} cannot be read: {error}") from None
        if tokens.digest != self.ledger["tokenizer"].get("xxh3_128"):
            raise RequestError(f"{target} is another tokenizer now than the one that {self.target} was made with")
        return tokens


def finished(store: Store, target: Target) -> Record:
    """The record of a target.

    Raises:
        RequestError: it has none.
    """
    if record := read_record(store, target):
        return record
    raise RequestError(f"{target} is not finished, so there is nothing to look into\n  snakemake {target}")


def bring(store: Store, record: Record, name: str) -> Path:
    """One file of an artifact, here."""
    entries = tuple(entry for entry in record.files if entry["path"] == name)
    if not entries:
        raise DamageError(f"{record.target} is damaged: it has no {name}\n  marin-build verify {record.target}")
    return store.fetch(replace(record, files=entries)) / name


def _trained(shard: Shard, start: int, end: int) -> np.ndarray | None:
    return None if shard.loss_mask is None else shard.loss_mask[start:end] != 0


# ---- rows ------------------------------------------------------------------------------------------------------------


def documents(
    store: Store, target: Target, *, first: int | None, shard: str | None, rows: int, full: bool
) -> tuple[list[Row], Mapping[str, Any]]:
    """`rows` documents of a token set, and what the set is: from document `first` on, or from the first of a shard.

    Raises:
        RequestError: not finished, no such document or shard, or the tokenizer is gone.
    """
    found = PeekedSet(store, target)
    number = found.first_document(shard) if shard is not None else first or 0
    if first is not None and shard is not None:
        number += first
    if number >= found.documents:
        raise RequestError(f"{target} has no document {number:,}: it has 0 to {found.documents - 1:,}")
    vocabulary, read = found.vocabulary(), []
    for document in range(number, min(number + rows, found.documents)):
        ids, trained, facts = found.document(document)
        counted = None if trained is None else int(trained.sum())
        read.append(Row(facts, len(ids), tuple(_shortened(vocabulary, ids, trained, full)), counted))
    shards = len({entry["file"] for entry in found.ledger["shards"]})
    return read, {"documents": found.documents, "tokens": found.tokens, "shards": shards}


def training_rows(
    store: Store, target: Target, recipe: CheckpointRecipe, *, step: int, first: int, rows: int, full: bool
) -> tuple[list[Row], Mapping[str, Any]]:
    """Rows of the batch of a step of a training, as it reads or would read them.

    Raises:
        RequestError: no such step or row, or a token set that is not finished.
    """
    schedule = schedule_of(recipe)
    if step >= recipe.steps or first >= recipe.global_batch_size:
        raise RequestError(
            f"{target} has no row {first:,} of step {step:,}: steps are 0 to {recipe.steps - 1:,}, "
            f"rows of each 0 to {recipe.global_batch_size - 1:,}"
        )
    sets = {name: PeekedSet(store, parse_target(recipe.data.train[name].target)) for name in schedule.names}
    length = recipe.data.sequence_length
    mixture = Mixture.make(schedule, {name: opened.tokens for name, opened in sets.items()}, length)
    count = min(rows, recipe.global_batch_size - first)
    order, windows = mixture.plan(step * recipe.global_batch_size + first, count)
    vocabularies: dict[str, Tokens] = {}
    read = []
    for row, (number, window) in enumerate(zip(order.tolist(), windows.tolist(), strict=True), first):
        name = schedule.names[number]
        opened, start = sets[name], window * length
        digest = str(opened.ledger["tokenizer"].get("xxh3_128"))
        if digest not in vocabularies:
            vocabularies[digest] = opened.vocabulary()
        facts = {"step": step, "row": row, "component": name, "set": str(opened.target), "window": window}
        read.append(_training_row(facts, opened.parts(start, start + length + 1), vocabularies[digest], full))
    return read, {"step": step, "rows": recipe.global_batch_size, "sequence_length": length}


def _training_row(facts: Mapping[str, Any], parts: Iterator[Part], vocabulary: Tokens, full: bool) -> Row:
    pieces: list[Piece] = []
    tokens, counted = 0, None
    for ids, trained, document in parts:
        pieces += [Piece(document=document), *_shortened(vocabulary, ids, trained, full)]
        tokens += len(ids)
        counted = counted if trained is None else (counted or 0) + int(trained.sum())
    return Row(facts, tokens, tuple(pieces), counted)


def _shortened(vocabulary: Tokens, ids: np.ndarray, trained: np.ndarray | None, full: bool) -> Iterator[Piece]:
    """The pieces of ids [T]; of many only the first and the last."""
    omitted = len(ids) - HEAD - TAIL
    if full or omitted < TAIL:
        yield from pieces_of(vocabulary, ids, trained)
        return
    yield from pieces_of(vocabulary, ids[:HEAD], None if trained is None else trained[:HEAD])
    yield Piece(omitted=omitted)
    yield from pieces_of(vocabulary, ids[-TAIL:], None if trained is None else trained[-TAIL:])


def pieces_of(vocabulary: Tokens, ids: np.ndarray, trained: np.ndarray | None) -> Iterator[Piece]:
    """Runs of text, cut where special tokens stand and where the training begins or ends."""
    numbers = ids.tolist()
    special = [number not in vocabulary.texts for number in numbers]
    mask = [None] * len(numbers) if trained is None else trained.tolist()
    edges = [at for at in range(1, len(numbers)) if special[at] or special[at - 1] or mask[at] != mask[at - 1]]
    for first, end in pairwise([0, *edges, len(numbers)] if numbers else []):
        run = numbers[first:end]
        if special[first]:
            name = vocabulary.specials.get(run[0], f"unknown id {run[0]}")
            yield Piece(tuple(run), (name.encode("utf-8", "backslashreplace"),), special=True, trained=mask[first])
        else:
            texts = tuple(vocabulary.texts[number] for number in run)
            yield Piece(tuple(run), texts, trained=mask[first])


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="backslashreplace")
