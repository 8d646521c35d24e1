"""Workers: processes that perform jobs and send messages, or the same in line where one process is to do it all.

Processes are spawned, never forked: a fork beside the threads of a tokenizer library can hang. A worker ends when its
builder does, however that ends: it waits for that in a thread of its own, so a killed build leaves no process that
still writes. Signals are the builder's to handle.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Protocol

from marin_build.data.part import Assignment
from marin_build.data.workshop import Job, Message, Workshop
from marin_build.errors import MarinError

Key = tuple[int, int]
"""Source file and range: the order of the work."""


class Ended:
    """The last message about a job."""


class Failed(Ended):
    def __init__(self, error: Exception) -> None:
        self.error = error


class Crew(Protocol):
    size: int

    def has_room(self) -> bool: ...
    def start(self, key: Key, job: Job) -> None:
        """Begin a job; only after has_room()."""

    def receive(self, timeout_seconds: float) -> list[tuple[Key, Message | Ended]]:
        """What is new, waiting at most this long for it; the last message about a job is an `Ended`."""

    def close(self) -> None:
        """Drop all work at once."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def make_crew(assignment: Assignment, size: int) -> Crew:
    return InlineCrew(assignment) if size == 1 else ProcessCrew(assignment, size)


class InlineCrew:
    """Performs one job at a time in this process, one message each time that it is asked."""

    size = 1

    def __init__(self, assignment: Assignment) -> None:
        _single_thread()
        self._workshop = Workshop(assignment)
        self._work: tuple[Key, Iterator[Message]] | None = None

    def has_room(self) -> bool:
        return self._work is None

    def start(self, key: Key, job: Job) -> None:
        self._work = key, _messages(self._workshop, job)

    def receive(self, timeout_seconds: float) -> list[tuple[Key, Message | Ended]]:
        if self._work is None:
            return []
        key, messages = self._work
        message: Message | Ended
        try:
            message = next(messages, Ended())
        except MarinError as error:
            message = Failed(error)
        if isinstance(message, Ended):
            self._work = None
        return [(key, message)]

    def close(self) -> None:
        self._work = None


class ProcessCrew:
    """Performs a job in each of several processes."""

    def __init__(self, assignment: Assignment, size: int) -> None:
        self.size = size
        self._workers = [_Worker(assignment) for _ in range(size)]

    def has_room(self) -> bool:
        return any(worker.key is None for worker in self._workers)

    def start(self, key: Key, job: Job) -> None:
        next(worker for worker in self._workers if worker.key is None).start(key, job)

    def receive(self, timeout_seconds: float) -> list[tuple[Key, Message | Ended]]:
        busy = {worker.connection: worker for worker in self._workers if worker.key is not None}
        return [busy[connection].receive() for connection in wait(list(busy), timeout_seconds)]

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()


class _Worker:
    """The builder's end of one process."""

    def __init__(self, assignment: Assignment) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=work, args=(theirs, assignment), daemon=True)
        self.process.start()
        theirs.close()
        self.key: Key | None = None

    def start(self, key: Key, job: Job) -> None:
        self.key = key
        self._send(job)

    def _send(self, job: Job) -> None:
        with contextlib.suppress(OSError):  # the process is gone, which the next receive() says
            self.connection.send(job)

    def receive(self) -> tuple[Key, Message | Ended]:
        assert self.key is not None
        key = self.key
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(message, Ended):
            self.key = None
        return key, message

    def _death(self) -> MarinError:
        self.process.join()
        code = self.process.exitcode or 0
        how = f"was ended by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with code {code}"
        hint = "  it was most likely out of memory\n" if -code in (signal.SIGKILL, signal.SIGABRT) else ""
        return MarinError(f"a worker process {how} while it tokenized\n{hint}{_LESS_MEMORY}")


_LESS_MEMORY = (
    "  less memory: fewer processes (--config processes=N), or a recipe with lower shard_bytes\n"
    "  run the same command again: finished shards are kept"
)


# ---- in the process --------------------------------------------------------------------------------------------------


def work(connection: Connection, assignment: Assignment) -> None:
    """Perform the jobs that come through `connection` until it closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_builder, daemon=True).start()
    _single_thread()
    workshop = Workshop(assignment)
    while True:
        try:
            job = connection.recv()
            _perform(workshop, job, connection)
        except (EOFError, OSError):
            return  # the builder is gone, or wants no more


def _perform(workshop: Workshop, job: Job, connection: Connection) -> None:
    try:
        for message in _messages(workshop, job):
            connection.send(message)
    except MarinError as error:
        connection.send(Failed(error))
    except Exception as error:
        connection.send(
            Failed(_UnexpectedError(f"{type(error).__name__} in a worker process\n{traceback.format_exc()}"))
        )
    else:
        connection.send(Ended())


def _messages(workshop: Workshop, job: Job) -> Iterator[Message]:
    try:
        yield from workshop.perform(job)
    except MemoryError:
        raise MarinError(f"out of memory while {job.file.name} was tokenized\n{_LESS_MEMORY}") from None


class _UnexpectedError(Exception):
    """A fault of ours, with the worker's traceback."""


def _end_with_the_builder() -> None:
    builder = multiprocessing.parent_process()
    assert builder is not None
    wait([builder.sentinel])
    os._exit(1)


def _single_thread() -> None:
    """One process is one thread: the number of processes is what a user chooses."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
