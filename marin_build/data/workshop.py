"""A worker's side of tokenizing: it turns source files, or ranges of one, into shards beside their final names.

A source file is cut where its units begin in the next `shard_bytes` of the (decompressed) text, so the shards of a
file depend on its content alone. A large plain file is first surveyed: one pass finds the cuts and proves the digest
of the file, and its ranges can then be worked on side by side, each against its own digest. Other files are worked
through in one go, and their digest is proven before the last shard is handed over.

The builder gets messages: `Advanced` and `Made` any number of times, and at the end of a file `Cut` or `Complete`.
Only the builder gives shards their names and writes sidecars, since it holds the lease.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

from marin_build.data.documents import can_be_cut, units
from marin_build.data.ledger import read_sidecar
from marin_build.data.part import Assignment, KeptPart, Part, source_of
from marin_build.data.reading import Reading, is_compressed, read_chunks
from marin_build.data.sources import SourceFile
from marin_build.errors import RequestError

BATCH_BYTES = 1 << 20
"""Source bytes that are encoded at once: large enough for speed, small enough for memory and prompt stops."""


@dataclass(frozen=True)
class WholeFile:
    """A file of which nothing is known yet but its digest."""

    file: SourceFile


@dataclass(frozen=True)
class FileRange:
    """The part of a plain file that becomes the shard of this number."""

    file: SourceFile
    number: int
    last: bool
    start: int
    end: int
    digest: str


@dataclass(frozen=True)
class Advanced:
    """So many bytes of source files and tokens further."""

    bytes: int
    tokens: int = 0
    kept: bool = False


@dataclass(frozen=True)
class Made:
    """A shard is ready under its temporary name, or was kept from an earlier attempt under its final one."""

    sidecar: dict[str, Any]
    kept: bool


@dataclass(frozen=True)
class Cut:
    """A plain file is to be made from these ranges."""

    ranges: tuple[FileRange, ...]


@dataclass(frozen=True)
class Complete:
    """All shards of a file, so many, have been reported."""

    shards: int


Job = WholeFile | FileRange
Message = Advanced | Made | Cut | Complete


class Workshop:
    """Performs jobs, one after the other."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment, self._policy = assignment, assignment.policy

    def perform(self, job: Job) -> Iterator[Message]:
        return self._range(job) if isinstance(job, FileRange) else self._file(job.file)

    def remake(self, file: SourceFile, number: int, start: int) -> dict[str, Any]:
        """Make one shard alone, which begins at byte `start` of the (decompressed) text; returns its sidecar."""
        part, at = Part(self._assignment, file, number, start), 0
        if can_be_cut(self._policy.format) and not is_compressed(file.name):
            chunks, at = read_chunks(file.path, start, None, lambda _: None), start
        else:
            chunks = Reading(file).text(self._policy.format)
        for unit in units(chunks, self._policy.format):
            if at > start and self._begins_a_shard(at, start):
                return part.finish(last=False)
            if at >= start:
                part.add(unit)
            if part.waiting_bytes >= BATCH_BYTES:
                part.encode()
            at += len(unit)
        return part.finish(last=True)

    def _file(self, file: SourceFile) -> Iterator[Message]:
        kept = self._kept_from_the_start(file)
        if kept and kept[-1]["last"]:
            yield Advanced(file.bytes, sum(sidecar["tokens"] for sidecar in kept), kept=True)
            yield from (Made(sidecar, kept=True) for sidecar in kept)
            yield Complete(len(kept))
        elif file.bytes > self._policy.shard_bytes and not is_compressed(file.name) and can_be_cut(self._policy.format):
            yield from self._survey(file)
        else:
            yield from self._stream(file, kept)

    def _kept(self, file: SourceFile, number: int) -> dict[str, Any] | None:
        return read_sidecar(self._assignment.folder, self._policy, file, number)

    def _kept_from_the_start(self, file: SourceFile) -> list[dict[str, Any]]:
        """Sidecars of the file's first intact shards, up to one that is missing."""
        sidecars: list[dict[str, Any]] = []
        while not (sidecars and sidecars[-1]["last"]) and (sidecar := self._kept(file, len(sidecars))):
            sidecars.append(sidecar)
        return sidecars

    def _begins_a_shard(self, at: int, start: int) -> bool:
        """Whether a unit at byte `at` begins a new shard after the one that began at `start`."""
        return at // self._policy.shard_bytes != start // self._policy.shard_bytes

    # ---- a large plain file ----

    def _survey(self, file: SourceFile) -> Iterator[Message]:
        """Find the cuts, and prove the digest of the whole file before any of it is used."""
        total, starts, digests = file.hasher(), [0], [xxhash.xxh3_128()]
        at = told = 0
        for unit in units(read_chunks(file.path, 0, None, total.update), self._policy.format):
            if self._begins_a_shard(at, starts[-1]):
                starts.append(at)
                digests.append(xxhash.xxh3_128())
            digests[-1].update(unit)
            at += len(unit)
            if at - told > BATCH_BYTES:
                told = at
                yield Advanced(0)  # lets the builder look whether it has to stop
        if total.hexdigest() != file.digest:
            raise file.changed(total.hexdigest())
        ranges = zip(starts, [*starts[1:], at], digests, strict=True)
        yield Cut(
            tuple(
                FileRange(file, number, number + 1 == len(starts), start, end, digest.hexdigest())
                for number, (start, end, digest) in enumerate(ranges)
            )
        )

    def _range(self, job: FileRange) -> Iterator[Message]:
        source = source_of(job.file, job.start, job.end, job.digest)
        kept = self._kept(job.file, job.number)
        if kept and kept["source"] == source and kept["last"] == job.last:
            yield Advanced(job.end - job.start, kept["tokens"], kept=True)
            yield Made(kept, kept=True)
            return
        part = Part(self._assignment, job.file, job.number, job.start)
        for unit in units(read_chunks(job.file.path, job.start, job.end, lambda _: None), self._policy.format):
            part.add(unit)
            if part.waiting_bytes >= BATCH_BYTES:
                yield Advanced(part.waiting_bytes, part.encode())
        yield Advanced(part.waiting_bytes, part.encode())
        if part.source() != source:
            raise job.file.changed(f"other bytes from {job.start:,} to {job.end:,}")
        yield Made(part.finish(job.last), kept=False)

    # ---- any other file ----

    def _stream(self, file: SourceFile, kept: list[dict[str, Any]] | None) -> Iterator[Message]:
        """Work through a file; where a shard of an earlier attempt is, only see that it belongs to the file.

        `kept` are the sidecars of its first intact shards; None: no shard is kept.
        """
        reading = Reading(file)
        number, part = 0, self._part(file, kept, 0, 0, 0)
        for unit in units(reading.text(self._policy.format), self._policy.format):
            if self._begins_a_shard(part.end, part.start):
                yield Advanced(reading.news(), part.encode(), part.kept)
                if (sidecar := part.finish(last=False)) is None:
                    yield from self._stream(file, None)
                    return
                yield Made(sidecar, part.kept)
                number, part = number + 1, self._part(file, kept, number + 1, part.end, part.bad_documents)
            part.add(unit)
            if part.waiting_bytes >= BATCH_BYTES:
                yield Advanced(reading.news(), part.encode(), part.kept)
        yield Advanced(reading.news(), part.encode(), part.kept)
        reading.check()
        if not part.end:
            raise RequestError(
                f"{self._assignment.target}: source file {file.path} is empty; take it out of the source"
            )
        if (sidecar := part.finish(last=True)) is None:
            yield from self._stream(file, None)
            return
        yield Made(sidecar, part.kept)
        yield Complete(number + 1)

    def _part(
        self, file: SourceFile, kept: list[dict[str, Any]] | None, number: int, start: int, bad_before: int
    ) -> Part | KeptPart:
        if kept is not None:
            sidecar = kept[number] if number < len(kept) else self._kept(file, number)
            if sidecar:
                return KeptPart(sidecar, file, start, bad_before)
        return Part(self._assignment, file, number, start, bad_before)
