"""Donors: finished artifacts that hold shards which would come out the same here.

They are the parts of a token set, made side by side, and other versions of it: another budget, or another choice of
files. A shard is known by its stamp, which covers all that decides its bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from marin_build.artifact.context import BuildContext
from marin_build.artifact.record import Record
from marin_build.artifact.strict_json import parse_object
from marin_build.data.ledger import Policy, checked_sidecar, names_of, stamp
from marin_build.data.shards import LEDGER
from marin_build.data.sources import SourceFile
from marin_build.data.workshop import Taken, buckets, number_of
from marin_build.errors import MarinError
from marin_build.recipe.fingerprint import identity_body
from marin_build.recipe.schema import TokenizedRecipe
from marin_build.recipe.target import Target

SHARE = "share.json"
"""What a part has made: its sidecars, and the surveys of the files whose first bucket it had."""

Ranges = list[list[Any]]
"""[start, end, xxh3_128] of the source bytes of each shard of a file."""
ALIKE = ("format", "add_bos", "add_eos", "shard_bytes")


class Donors:
    """Finds shards of other artifacts and takes them over, for a build of the token set `of` or of a part of it."""

    def __init__(self, context: BuildContext, policy: Policy, recipe: TokenizedRecipe, of: Target) -> None:
        self._context, self._policy, self._recipe, self._of = context, policy, recipe, of
        self._shards: dict[str, dict[int, list[tuple[Record, dict[str, Any]]]]] = {}
        """By source file and number: who has such a shard, and its sidecar."""
        self._surveys: dict[tuple[str, str], Ranges] = {}
        """By name and digest of a file: proven by the part that had its first bucket."""
        for record in self._usable():
            self._note(record)

    def take(self, file: SourceFile, bucket: int | None = None) -> tuple[Taken, bool]:
        """Take over what there is of a file, or of one bucket of it; and whether nothing of it is left to do."""
        taken, makers = {}, set()
        for number, (record, sidecar) in self._offered(file, bucket):
            self._context.check_lease()
            names = names_of(sidecar)
            if self._context.take(record, names) == set(names):
                taken[number] = sidecar
                makers.add(record.kind)
        if bucket is not None:
            return taken, bucket in taken and bucket > 0  # whoever has the first bucket surveys the file
        chain = _chain(taken, self._policy)
        is_proven = "parts" not in makers or buckets(file, self._policy) == 1 or self._is_surveyed(file, chain)
        return taken, bool(chain) and is_proven

    def _offered(self, file: SourceFile, bucket: int | None) -> Iterator[tuple[int, tuple[Record, dict[str, Any]]]]:
        for number, offers in self._shards.get(file.name, {}).items():
            wanted = stamp(self._policy, file, number) if bucket in (None, number) else None
            yield from ((number, offer) for offer in offers if offer[1]["stamp"] == wanted)

    def _is_surveyed(self, file: SourceFile, chain: Sequence[dict[str, Any]]) -> bool:
        """Whether parts that worked on ranges of a file saw the bytes that the survey of the whole file saw."""
        seen = [[s["source"]["start"], s["source"]["end"], s["source"]["xxh3_128"]] for s in chain]
        return self._surveys.get((file.name, file.digest)) == seen

    # ---- who has what ----

    def _usable(self) -> Iterator[Record]:
        """Parts of this set; and of the finished sets those of the same tokenizer and policy. When a set is made from
        nothing because somebody forced it, only parts that were forced with it.
        """
        forced = self._context.forced
        for record in self._context.others("parts"):
            if record.recipe.get("of") == str(self._of) and forced in (None, record.provenance.get("forced")):
                yield record
        if forced is None:
            yield from (record for record in self._context.others("tokenized") if self._is_alike(record))

    def _is_alike(self, record: Record) -> bool:
        tokenizer = self._context.dependencies[self._recipe.tokenizer].record["digest"]
        mine = identity_body(self._recipe)
        same = all(record.recipe.get(key) == mine.get(key) for key in ALIKE)
        return same and any(entry["digest"] == tokenizer for entry in record.dependencies)

    def _note(self, record: Record) -> None:
        """Learn what an artifact holds; one that cannot be read has nothing to give."""
        try:
            listed = parse_object(self._context.read(record, SHARE if record.kind == "parts" else LEDGER))
            sidecars = [checked_sidecar(entry) for entry in listed["shards"]]
            surveys = [(entry["file"], entry["xxh3_128"], entry["ranges"]) for entry in listed.get("surveys", ())]
        except (MarinError, ValueError, KeyError, TypeError) as error:
            self._context.logger.warning("%s has no shards to give: %s", record.target, error)
            return
        for sidecar in sidecars:
            offers = self._shards.setdefault(sidecar["source"]["file"], {}).setdefault(sidecar["number"], [])
            offers.append((record, sidecar))
        for name, digest, ranges in surveys:
            self._surveys[name, digest] = ranges


def _chain(taken: Taken, policy: Policy) -> list[dict[str, Any]]:
    """The shards of a whole file in their order; nothing where one is missing."""
    chain: list[dict[str, Any]] = []
    number = 0
    while not (chain and chain[-1]["last"]):
        if number not in taken or taken[number]["source"]["start"] != (chain[-1]["source"]["end"] if chain else 0):
            return []
        chain.append(taken[number])
        number = number_of(chain[-1]["source"]["end"], policy)
    return chain
