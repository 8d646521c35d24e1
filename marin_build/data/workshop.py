"""A worker's side of tokenizing: it turns source files, or ranges of one, into shards beside their final names.

A source file is cut where its units begin in the next `shard_bytes` of the (decompressed) text, so the shards of a
file depend on its content alone. A large plain file is first surveyed: one pass finds the cuts and proves the digest
of the file, and its ranges can then be worked on side by side, each against its own digest. Other files are worked
through in one go, and their digest is proven before the last shard is handed over.

The builder gets messages: `Advanced` and `Made` any number of times, and at the end of a file `Cut` or `Complete`.
Only the builder gives shards their names and writes sidecars, since it holds the lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from marin_build.data.documents import can_be_cut, is_lines, units
from marin_build.data.ledger import Policy, read_sidecar
from marin_build.data.part import Assignment, KeptPart, Part, source_of
from marin_build.data.reading import Reading, is_compressed, read_chunks
from marin_build.data.sources import SourceFile
from marin_build.errors import RequestError

BATCH_BYTES = 1 << 20
"""Source bytes that are encoded at once: large enough for speed, small enough for memory and prompt stops."""


Taken = Mapping[int, dict[str, Any]]
"""Sidecars by number of shards that were taken over from another artifact and need not lie in the folder."""


@dataclass(frozen=True)
class WholeFile:
    """A file of which nothing is known yet but its digest."""

    file: SourceFile
    taken: Taken = field(default_factory=dict)


@dataclass(frozen=True)
class FileBucket:
    """The units that begin in the `number`-th `shard_bytes` of a large plain file, which nobody has surveyed yet."""

    file: SourceFile
    number: int
    taken: Taken = field(default_factory=dict)


@dataclass(frozen=True)
class FileRange:
    """The part of a plain file that becomes the shard of this number."""

    file: SourceFile
    number: int
    last: bool
    start: int
    end: int
    digest: str
    taken: Taken = field(default_factory=dict)


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
class Surveyed:
    """Where the shards of a plain file begin and end, and the digest of the bytes of each; the whole file is proven."""

    file: str
    ranges: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True)
class Complete:
    """All shards of a file, or of a bucket of it, so many, have been reported."""

    shards: int


Job = WholeFile | FileRange | FileBucket
Message = Advanced | Made | Cut | Surveyed | Complete


class Workshop:
    """Performs jobs, one after the other."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment, self._policy = assignment, assignment.policy

    def perform(self, job: Job) -> Iterator[Message]:
        match job:
            case FileRange():
                return self._range(job)
            case FileBucket():
                return self._bucket(job)
            case WholeFile():
                return self._file(job.file, job.taken)

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

    def _file(self, file: SourceFile, taken: Taken) -> Iterator[Message]:
        kept = self._kept_from_the_start(file, taken)
        if kept and kept[-1]["last"]:
            yield Advanced(file.bytes, sum(sidecar["tokens"] for sidecar in kept), kept=True)
            yield from (Made(sidecar, kept=True) for sidecar in kept)
            yield Complete(len(kept))
        elif file.bytes > self._policy.shard_bytes and not is_compressed(file.name) and can_be_cut(self._policy.format):
            yield from self._cut(file, taken)
        else:
            yield from self._stream(file, {sidecar["number"]: sidecar for sidecar in kept} | dict(taken))

    def _kept(self, file: SourceFile, number: int, taken: Taken) -> dict[str, Any] | None:
        return taken.get(number) or read_sidecar(self._assignment.folder, self._policy, file, number)

    def _kept_from_the_start(self, file: SourceFile, taken: Taken) -> list[dict[str, Any]]:
        """Sidecars of the file's first intact shards, up to one that is missing."""
        sidecars: list[dict[str, Any]] = []
        number = 0
        while not (sidecars and sidecars[-1]["last"]) and (sidecar := self._kept(file, number, taken)):
            sidecars.append(sidecar)
            number = self._number(sidecar["source"]["end"])
        return sidecars

    def _number(self, at: int) -> int:
        return number_of(at, self._policy)

    def _begins_a_shard(self, at: int, start: int) -> bool:
        """Whether a unit at byte `at` begins a new shard after the one that began at `start`."""
        return self._number(at) != self._number(start)

    # ---- a large plain file ----

    def _cut(self, file: SourceFile, taken: Taken) -> Iterator[Message]:
        ranges: tuple[tuple[int, int, str], ...] = ()
        for message in self._survey(file):
            if isinstance(message, Surveyed):
                ranges = message.ranges
            else:
                yield message
        yield Cut(
            tuple(
                FileRange(file, self._number(start), end == file.bytes, start, end, digest, taken)
                for start, end, digest in ranges
            )
        )

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
        hashes = [digest.hexdigest() for digest in digests]
        yield Surveyed(file.name, tuple(zip(starts, [*starts[1:], at], hashes, strict=True)))

    def _range(self, job: FileRange) -> Iterator[Message]:
        source = source_of(job.file, job.start, job.end, job.digest)
        kept = self._kept(job.file, job.number, job.taken)
        if kept and kept["source"] == source and kept["last"] == job.last:
            yield Advanced(job.end - job.start, kept["tokens"], kept=True)
            yield Made(kept, kept=True)
            return
        part = Part(self._assignment, job.file, job.number, job.start)
        yield from self._filled(part, read_chunks(job.file.path, job.start, job.end, lambda _: None))
        if part.source() != source:
            raise job.file.changed(f"other bytes from {job.start:,} to {job.end:,}")
        yield Made(part.finish(job.last), kept=False)

    def _bucket(self, job: FileBucket) -> Iterator[Message]:
        """One range of a file whose cuts are known to nobody here. The first one surveys the file for the others."""
        if job.number == 0:
            yield from self._survey(job.file)
        if kept := self._kept(job.file, job.number, job.taken):
            yield Advanced(kept["source"]["end"] - kept["source"]["start"], kept["tokens"], kept=True)
            yield Made(kept, kept=True)
            yield Complete(1)
            return
        first_byte, size = job.number * self._policy.shard_bytes, self._policy.shard_bytes
        start = first_unit(job.file, first_byte)
        if start >= min(first_byte + size, job.file.bytes):
            yield Complete(0)
            return
        end = first_unit(job.file, first_byte + size)
        part = Part(self._assignment, job.file, job.number, start)
        yield from self._filled(part, read_chunks(job.file.path, start, end, lambda _: None))
        yield Made(part.finish(last=end == job.file.bytes), kept=False)
        yield Complete(1)

    def _filled(self, part: Part, chunks: Iterable[bytes]) -> Iterator[Message]:
        for unit in units(chunks, self._policy.format):
            part.add(unit)
            if part.waiting_bytes >= BATCH_BYTES:
                yield Advanced(part.waiting_bytes, part.encode())
        yield Advanced(part.waiting_bytes, part.encode())

    # ---- any other file ----

    def _stream(self, file: SourceFile, kept: Taken | None) -> Iterator[Message]:
        """Work through a file; where a shard of an earlier attempt is, only see that it belongs to the file.

        `kept` are sidecars that are known already; None: no shard is kept.
        """
        reading = Reading(file)
        made, part = 0, self._part(file, kept, 0, 0)
        for unit in units(reading.text(self._policy.format), self._policy.format):
            if self._begins_a_shard(part.end, part.start):
                yield Advanced(reading.news(), part.encode(), part.kept)
                if (sidecar := part.finish(last=False)) is None:
                    yield from self._stream(file, None)
                    return
                yield Made(sidecar, part.kept)
                made, part = made + 1, self._part(file, kept, part.end, part.bad_documents)
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
        yield Complete(made + 1)

    def _part(self, file: SourceFile, kept: Taken | None, start: int, bad_before: int) -> Part | KeptPart:
        number = self._number(start)
        if kept is not None and (sidecar := self._kept(file, number, kept)):
            return KeptPart(sidecar, file, start, bad_before)
        return Part(self._assignment, file, number, start, bad_before)


def number_of(at: int, policy: Policy) -> int:
    """The number of the shard that begins at byte `at`; a unit longer than `shard_bytes` leaves numbers out."""
    return at // policy.shard_bytes


def buckets(file: SourceFile, policy: Policy) -> int:
    """In how many ranges jobs that know nothing of each other can work on a file: 1 unless it is plain lines."""
    if is_compressed(file.name) or not is_lines(policy.format):
        return 1
    return max(1, -(-file.bytes // policy.shard_bytes))


def first_unit(file: SourceFile, at: int) -> int:
    """Where the first unit of a plain file begins that begins at byte `at` or later; its end where none does."""
    if at == 0:
        return 0
    place = at - 1  # a line that ends here begins at `at`
    for chunk in read_chunks(file.path, place, None, lambda _: None):
        newline = chunk.find(b"\n")
        if newline >= 0:
            return place + newline + 1
        place += len(chunk)
    return file.bytes
