"""Donors: finished artifacts that hold shards which would come out the same here.

They are the parts of a token set, made side by side, and other versions of it: another budget, or another choice of
files. A shard is known by its stamp, which covers all that decides its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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

Ranges = frozenset[tuple[Any, ...]]
"""(start, end, xxh3_128) of the source bytes of each shard of a file."""
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
        """Take over what is proven of a file, or what there is of one bucket of it; and whether nothing is left to do.

        Whoever takes a bucket of a file proves nothing, and is believed no more than the one that it was taken from.
        """
        if bucket is not None:
            taken = self._take(file, [bucket], lambda record, sidecar: True)
            return taken, bucket in taken and bucket > 0  # whoever has the first bucket surveys the file
        taken = self._take(file, self._shards.get(file.name, ()), lambda *offer: self._is_proven(file, *offer))
        return taken, bool(_chain(taken, self._policy))

    def take_range(self, file: SourceFile, number: int, source: Mapping[str, Any], last: bool) -> dict[str, Any] | None:
        """Take over the shard of a range of a file that was surveyed just now; its sidecar, or None."""

        def agrees(record: Record, sidecar: Mapping[str, Any]) -> bool:
            return sidecar["source"] == source and sidecar["last"] == last

        return self._take(file, [number], agrees).get(number)

    def _take(self, file: SourceFile, numbers: Iterable[int], believed: Callable[..., bool]) -> dict[int, Any]:
        taken = {}
        for number in numbers:
            wanted = stamp(self._policy, file, number)
            for record, sidecar in self._shards.get(file.name, {}).get(number, ()):
                if sidecar["stamp"] != wanted or not believed(record, sidecar):
                    continue
                self._context.check_lease()
                names = names_of(sidecar)
                if self._context.take(record, names) == set(names):
                    taken[number] = sidecar
                    break
        return taken

    def _is_proven(self, file: SourceFile, record: Record, sidecar: Mapping[str, Any]) -> bool:
        """Whether a shard was made from the bytes that the file has to have: a part that worked on ranges of a file
        saw no more than those, so they have to be what the survey of the whole file saw there.
        """
        if record.kind != "parts" or buckets(file, self._policy) == 1:
            return True
        seen = tuple(sidecar["source"][key] for key in ("start", "end", "xxh3_128"))
        return seen in self._surveys.get((file.name, file.digest), ())

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
        same = same and LEDGER in record.content_by_path  # a cache of others that was adopted has none
        return same and any(entry["digest"] == tokenizer for entry in record.dependencies)

    def _note(self, record: Record) -> None:
        """Learn what an artifact holds; one that cannot be read has nothing to give."""
        try:
            listed = parse_object(self._context.read(record, SHARE if record.kind == "parts" else LEDGER))
            sidecars = [checked_sidecar(entry) for entry in listed["shards"]]
            surveys = {
                (entry["file"], entry["xxh3_128"]): frozenset(map(tuple, entry["ranges"]))
                for entry in listed.get("surveys", ())
            }
        except (MarinError, ValueError, KeyError, TypeError) as error:
            self._context.logger.warning("%s has no shards to give: %s", record.target, error)
            return
        for sidecar in sidecars:
            offers = self._shards.setdefault(sidecar["source"]["file"], {}).setdefault(sidecar["number"], [])
            offers.append((record, sidecar))
        self._surveys |= surveys


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
