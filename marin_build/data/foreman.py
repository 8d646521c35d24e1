"""The foreman: hands out the work of tokenizing, commits shards as they come, and takes files in their order.

Workers run ahead of that order; what counts, fails or is reported follows it, so the result and the error are those of
a single process.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from marin_build.artifact.context import BuildContext
from marin_build.data.crew import Crew, Ended, Failed, Key
from marin_build.data.donors import Donors
from marin_build.data.durable import commit
from marin_build.data.ledger import ContentDigest, names_of, rejections_of, write_sidecar
from marin_build.data.part import Assignment, bad_count, bad_documents, source_of
from marin_build.data.progress import Progress
from marin_build.data.sources import SourceFile
from marin_build.data.workshop import (
    Advanced,
    Complete,
    Cut,
    FileBucket,
    FileRange,
    Job,
    Made,
    Message,
    Surveyed,
    WholeFile,
)
from marin_build.errors import Stopped

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Piece:
    """What is worked on in one go: a source file, or one bucket of a large plain one."""

    file: SourceFile
    bucket: int | None = None


@dataclass
class _PieceState:
    sidecars: dict[int, dict[str, Any]] = field(default_factory=dict)
    shards: int | None = None
    """How many it has, once that is known."""

    @property
    def complete(self) -> bool:
        return self.shards is not None and len(self.sidecars) >= self.shards


class Foreman:
    """Runs a crew until all pieces are taken, or as many as a token budget needs."""

    def __init__(
        self,
        context: BuildContext,
        assignment: Assignment,
        pieces: Sequence[Piece],
        crew: Crew,
        progress: Progress,
        *,
        donors: Donors,
        budget: int | None = None,
        is_needed: Callable[[int, Foreman], bool] = lambda number, foreman: True,
    ) -> None:
        """`is_needed` is asked before a piece is begun, by its number: at the first one that is not, it ends."""
        self._context, self._assignment, self._budget = context, assignment, budget
        self._pieces, self._is_needed = list(pieces), is_needed
        self._crew, self._progress, self._donors = crew, progress, donors
        self.processes, self.policy = crew.size, assignment.policy
        self._states: dict[int, _PieceState] = {}
        """Pieces that were started and not taken yet."""
        self._started = 0
        self._running: set[Key] = set()
        self._waiting: list[tuple[Key, FileRange]] = []
        self._failure: tuple[Key, Exception] | None = None
        self.pieces_taken = 0
        self.sidecars: list[dict[str, Any]] = []
        """Of the pieces taken, in their order."""
        self.surveys: dict[str, tuple[tuple[int, int, str], ...]] = {}
        """Of the files whose first bucket was among the pieces."""
        self.tokens = self._bad = self.kept = self.made = self.shared = 0
        self.content = ContentDigest()

    @property
    def budget_met(self) -> bool:
        return self._budget is not None and self.tokens >= self._budget

    def run(self) -> None:
        while self.pieces_taken < len(self._pieces) and not self.budget_met:
            if self._context.stop_requested():
                raise Stopped(
                    f"stopped by a signal; {self.made + self.kept + self.shared:,} shards are kept, "
                    "the same command goes on"
                )
            self._hand_out()
            if self._running:
                for key, message in self._crew.receive(POLL_SECONDS):
                    self._note(key, message)
            self._take()
            self._raise_failure()

    def _hand_out(self) -> None:
        while self._crew.has_room() and (entry := self._next_job()):
            self._running.add(entry[0])
            self._crew.start(*entry)

    def _next_job(self) -> tuple[Key, Job] | None:
        if self._failure:  # only what comes before it still matters
            return heapq.heappop(self._waiting) if self._waiting and self._waiting[0][0] < self._failure[0] else None
        if self._waiting:
            return heapq.heappop(self._waiting)
        while self._started < len(self._pieces) and not (self._enough_is_made() or self._context.stop_requested()):
            number = self._started
            if not self._is_needed(number, self):
                del self._pieces[number:]
                return None
            self._started += 1
            if job := self._begun(number, self._pieces[number]):
                return (number, -1), job
        return None

    def _begun(self, number: int, piece: Piece) -> Job | None:
        """The job that makes a piece; none where another artifact has all of it."""
        state = self._states[number] = _PieceState()
        taken, is_all = self._donors.take(piece.file, piece.bucket)
        if is_all:
            state.sidecars, state.shards = dict(taken), len(taken)
            self.shared += len(taken)
            self._progress.add(*_size_of(taken.values()), True)
            return None
        if piece.bucket is None:
            return WholeFile(piece.file, taken)
        return FileBucket(piece.file, piece.bucket, taken)

    def _enough_is_made(self) -> bool:
        """Whether the pieces that were started hold the budget already, so that the next one cannot be needed."""
        if self._budget is None:
            return False
        ahead = sum(sidecar["tokens"] for state in self._states.values() for sidecar in state.sidecars.values())
        return self.tokens + ahead >= self._budget

    def _note(self, key: Key, message: Message | Ended) -> None:
        match message:
            case Advanced():
                self._progress.add(message.bytes, message.tokens, message.kept)
            case Made():
                self._commit(message)
                self._states[key[0]].sidecars[message.sidecar["number"]] = message.sidecar
            case Cut():
                self._divide(key[0], message.ranges)
            case Surveyed():
                self.surveys[message.file] = message.ranges
            case Complete():
                self._states[key[0]].shards = message.shards
            case Ended():
                self._running.discard(key)
        if isinstance(message, Failed) and (self._failure is None or key < self._failure[0]):
            self._failure = key, message.error

    def _divide(self, number: int, ranges: Sequence[FileRange]) -> None:
        """The ranges of a file that was surveyed: what others have made of these very bytes is taken over."""
        state = self._states[number]
        state.shards = len(ranges)
        for part in ranges:
            source = source_of(part.file, part.start, part.end, part.digest)
            known = part.number in part.taken
            if not known and (sidecar := self._donors.take_range(part.file, part.number, source, part.last)):
                state.sidecars[part.number] = sidecar
                self.shared += 1
                self._progress.add(*_size_of([sidecar]), True)
            else:
                heapq.heappush(self._waiting, ((number, part.number), part))

    def _commit(self, message: Made) -> None:
        if message.kept:
            self.kept += 1
            return
        self._context.check_lease()
        commit(self._context.folder / message.sidecar["file"])
        write_sidecar(self._context.folder, message.sidecar)
        self._context.keep(names_of(message.sidecar), shared=True)
        self.made += 1

    def _take(self) -> None:
        """Count the pieces that are complete, as far as none before them is missing and the budget is not met."""
        while (state := self._states.get(self.pieces_taken)) and state.complete and not self.budget_met:
            for number in sorted(state.sidecars):
                self._take_shard(state.sidecars[number])
            del self._states[self.pieces_taken]
            self.pieces_taken += 1

    def _take_shard(self, sidecar: dict[str, Any]) -> None:
        self.sidecars.append(sidecar)
        self.tokens += sidecar["tokens"]
        self._bad += bad_count(sidecar)
        if self._bad > self._assignment.max_bad_documents:
            raise bad_documents(self._assignment, self._bad, rejections_of(self.sidecars))
        self.content.join(sidecar["content"])

    def _raise_failure(self) -> None:
        """Raise what went wrong once all work before it is done and it is still needed: always the same error."""
        if self._failure is None or self.budget_met:
            return
        key, error = self._failure
        earlier = [*self._running, *(entry[0] for entry in self._waiting)]
        if key[0] == self.pieces_taken and not any(other < key for other in earlier):
            raise error


def _size_of(sidecars: Iterable[dict[str, Any]]) -> tuple[int, int]:
    """Source bytes and tokens."""
    found = list(sidecars)
    return sum(s["source"]["end"] - s["source"]["start"] for s in found), sum(s["tokens"] for s in found)
