"""What the protocol knows of the machine, replaced by a model: clock, process ids, random names, heartbeat threads.

The clock moves only when the explorer lets time pass. A heartbeat is an actor that may beat as often as its process
is allowed to, at any moment. What no fault depends on (git, hashes of the code, loading recipes) is left out.
"""

from __future__ import annotations

import functools
import logging
import secrets
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

from explorer import LONG_SECONDS, Actor, attributes_replaced, current_actor, current_run, is_modelled, outside

from marin_build.artifact import (
    attempt_log,
    bucket,
    commit,
    digest,
    kept,
    lease,
    local_store,
    mirror,
    provenance,
    publish,
    verify,
)
from marin_build.artifact.lease import Lease
from marin_build.artifact.local_store import LocalStore
from marin_build.artifact.object_store import ObjectStore
from marin_build.artifact.object_work import ObjectWork
from marin_build.artifact.owner import Owner
from marin_build.recipe import load
from marin_build.recipe.load import RecipeBook

RERUN = "rerun"
RERUN_PID = 1


class _Event:
    """`threading.Event` of the model; waiting with a timeout is waiting for the next heartbeat."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        if actor := current_actor():
            actor.note("event", self._is_set)
        return self._is_set

    def wait(self, timeout: float) -> bool:
        actor = current_actor()
        assert actor is not None
        process = actor.process
        actor.pause("the next heartbeat is due", lambda: process.beats > 0 and not self._is_set)
        process.beats -= 1
        return False


class _Mutex:
    """`threading.Lock` of the model, between the actors of one process."""

    _is_held = False

    def __enter__(self) -> None:
        actor = current_actor()
        if self._is_held and actor is not None:
            actor.pause("waits for the other thread", lambda: not self._is_held)
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False


def _start(self: Lease) -> None:
    """In place of `Lease.start`: the heartbeat is one more actor of the process."""
    self._ended, self.lost = _Event(), _Event()  # type: ignore[assignment]
    self._changing, self._beaten = _Mutex(), time.monotonic()  # type: ignore[assignment]
    actor = current_actor()
    if actor is not None and actor.process.beats:
        actor.run.add_background(actor.process, f"{actor.name}♥", self._beat_until_ended)


_real_time, _real_clock, _real_sleep, _real_gmtime = time.time, time.monotonic, time.sleep, time.gmtime


def _clock() -> float:
    if not is_modelled():
        return _real_clock()
    actor = current_actor()
    clock = current_run().clock
    if actor:
        actor.note("clock", clock)
    return clock


def _time() -> float:
    return _clock() if is_modelled() else _real_time()


def _sleep(seconds: float) -> None:
    """Sleep until something changed that is worth looking at, or time has passed."""
    if not is_modelled():
        return _real_sleep(seconds)
    actor = current_actor()
    if actor is None:
        current_run().clock += LONG_SECONDS
        return
    with outside(actor.run):
        wake = actor.run.world.shared.wake(actor)
    since = actor.run.clock
    actor.pause("has waited", lambda: wake() or actor.run.clock != since)


def _gmtime(seconds: float | None = None) -> time.struct_time:
    if seconds is None and not is_modelled():
        return _real_gmtime()
    return _real_gmtime(1.7e9 + current_run().clock if seconds is None else seconds)


def _token_hex(count: int = 8) -> str:
    """The same for the same actor in every schedule."""
    actor = current_actor()
    name, number = (actor.name, actor.counter) if actor else (RERUN, 0)
    if actor:
        actor.counter += 1
    else:
        run = current_run()
        run.rerun_counter += 1
        number = run.rerun_counter
    return f"{name}{number}"


def _this_process(run: str | None = None) -> Owner:
    actor = current_actor()
    if actor is None:
        return Owner(current_run().rerun_host, "boot", "namespace", RERUN_PID, 0, RERUN, run)
    return Owner(actor.process.host, "boot", "namespace", actor.process.pid, 0, actor.process.name, run)


def _host(actor: Actor | None) -> str:
    return actor.process.host if actor else current_run().rerun_host


def _is_on_this_machine(self: Owner) -> bool:
    return self.host == _host(current_actor())


def _is_gone(self: Owner) -> bool:
    actor, run = current_actor(), current_run()
    gone = not any(process.alive and process.pid == self.pid for process in run.processes.values())
    if actor:
        actor.note("gone", self.pid, gone)
    return gone and self.pid != RERUN_PID


class _Serial:
    """A pool without threads: an actor does everything itself."""

    def __init__(self, workers: int) -> None:
        del workers

    def __enter__(self) -> _Serial:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, function: Callable[[Any], Any], items: Any) -> list[Any]:
        return [function(item) for item in items]

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


class _NoSignals:
    def requested(self) -> bool:
        return False

    def __enter__(self) -> _NoSignals:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _silent_logger() -> logging.Logger:
    logger = logging.Logger("marin_build", logging.INFO)
    logger.addHandler(logging.NullHandler())
    return logger


def _summarised(function: Callable[..., Any], show: Callable[[Any], object] = lambda result: result) -> Any:
    """`function`, after which an actor remembers what `show` makes of the result, and not how it came about.

    Read from the code: these functions keep nothing else. Histories that agree in their results are then one state.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        actor = current_actor()
        if actor is None:
            return function(*arguments, **options)
        before = actor.observed
        try:
            result = function(*arguments, **options)
        except Exception as error:
            actor.observed = before
            actor.note(function.__name__, type(error).__name__, str(error))
            raise
        actor.observed = before
        actor.note(function.__name__, show(result))
        return result

    return call


def _forgetting(function: Callable[..., Any], memory: Callable[..., object] = lambda *_: None) -> Callable[..., Any]:
    """`function`, at whose start an actor's memory is what `memory` makes of the arguments: the rest is forgotten.

    Read from the code: its callers keep nothing else that decides anything.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        if actor := current_actor():
            actor.observed = b""
            actor.note(function.__name__, memory(*arguments))
        return function(*arguments, **options)

    return call


def _locked(path: Any, target: Any, locked: Callable[..., int] = local_store._locked) -> int:
    """In place of `local_store._locked`: each try for a lock starts without a memory of those before it."""
    if actor := current_actor():
        actor.before_lock = actor.observed
    return locked(path, target)


def _shown_plan(plan: Any) -> object:
    if isinstance(plan, publish.Outcome):
        return plan
    return plan.status, plan.look._records, plan.dependencies, plan.is_forced


def _shown_work(work: Any) -> object:
    """What an actor has of its work in its own hands: on an object store its scratch folder."""
    if not isinstance(work, ObjectWork):
        return work.attempt
    files = sorted((str(path), path.read_bytes()) for path in work.folder.rglob("*") if path.is_file())
    return work.attempt, files, work._kept


def _plan_memory(request: Any, plan: Any, lease: Lease, *_: Any) -> object:
    return _shown_plan(plan), lease.file


def _commit_memory(
    store: Any, book: Any, lease: Lease, context: Any, begun: Any, result: Any, work: Any, log: Any
) -> object:
    return lease.file, begun, result, _shown_work(work)


def _release_memory(lease: Lease, *_: Any) -> object:
    return lease.file, repr(sys.exc_info()[1])


SUMMARISED: tuple[tuple[Any, str], ...] = (
    (LocalStore, "read"),
    (LocalStore, "replace"),
    (LocalStore, "exchange"),
    (LocalStore, "delete"),
    (LocalStore, "has_work"),
    (LocalStore, "has_rebuild"),
    (LocalStore, "is_decided"),
    (LocalStore, "is_untidy"),
    (LocalStore, "settle"),
    (ObjectStore, "read"),
    (ObjectStore, "exchange"),
    (ObjectStore, "has_work"),
    (ObjectStore, "has_rebuild"),
    (ObjectStore, "is_decided"),
    (ObjectStore, "settle"),
    (ObjectStore, "put_in_place"),
    (ObjectWork, "keep"),
    (kept, "read_chain"),
    (local_store, "make_folder"),
    (attempt_log, "make_folder"),
    (commit, "_collect"),
    (Lease, "check"),
)


def modelled(book: RecipeBook) -> AbstractContextManager[None]:
    """While entered, the protocol runs on the model of a machine, with the recipes of `book` already loaded."""
    return attributes_replaced(
        (time, "time", _time),
        (time, "monotonic", _clock),
        (time, "sleep", _sleep),
        (time, "gmtime", _gmtime),
        (secrets, "token_hex", _token_hex),
        (Lease, "start", _start),
        (lease, "this_process", _this_process),
        (Owner, "is_on_this_machine", _is_on_this_machine),
        (Owner, "is_gone", _is_gone),
        (Owner, "was_before_boot", lambda self, wall_seconds: False),
        (bucket, "ThreadPoolExecutor", _Serial),
        (kept, "THREADS", 1),
        (digest, "ThreadPoolExecutor", _Serial),
        (verify, "ThreadPoolExecutor", _Serial),
        (publish, "StopSignals", _NoSignals),
        (publish, "terminal_logger", _silent_logger),
        (attempt_log, "terminal_logger", _silent_logger),
        (mirror, "write", lambda record: None),
        (provenance, "circumstances", lambda recipes, command: {}),
        (provenance, "code_hashes", dict),
        (provenance, "code", lambda at_start: {"digest": "0" * 32, "modules": []}),
        (provenance, "package_versions", dict),
        *((owner, name, _summarised(getattr(owner, name))) for owner, name in SUMMARISED),
        (local_store, "_locked", _summarised(_locked, lambda descriptor: None)),
        (publish, "acquire", _summarised(publish.acquire, lambda found: found.file)),
        (publish, "begin", _summarised(publish.begin, _shown_work)),
        (publish, "_plan", _summarised(publish._plan, _shown_plan)),
        (publish, "_build_leased", _forgetting(publish._build_leased)),
        (publish, "_carry_out", _forgetting(publish._carry_out, _plan_memory)),
        (publish, "commit", _forgetting(publish.commit, _commit_memory)),
        (publish, "_release", _forgetting(publish._release, _release_memory)),
        (load, "RecipeBook", lambda folder, encoder: book),
    )
