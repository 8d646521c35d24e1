"""The explorer can fail: protocols with one guard taken out are found, each with its shortest schedule."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from explorer import Bounds, attributes_replaced, current_actor, shortest_violation
from scenarios import LOCAL, OBJECTS, PAUSE, Scenario

from marin_build.artifact import accept, publish, verify, workspace
from marin_build.artifact.begin import begin
from marin_build.artifact.lease import Lease, LeaseFile, Sign
from marin_build.artifact.local_store import LocalStore
from marin_build.artifact.object_store import ObjectStore
from marin_build.artifact.object_work import ObjectWork
from marin_build.artifact.record import write_record
from marin_build.artifact.store import BUILDS, RECORD, make_folder
from marin_build.artifact.workspace import OLD, REBUILD

SCENARIOS = {scenario.name: scenario for scenario in (*LOCAL, *OBJECTS)}
PLAIN = Bounds(preemptions=1, crashes=0, jumps=0)


def _swap_without_stepping_aside(store: LocalStore, target: Any) -> None:
    folder = store.folder(target)
    if (new := workspace.staged_record(store, target)) is not None:
        workspace._move_up(folder / REBUILD, folder)
        workspace._remove_left_over(folder, folder / REBUILD / OLD, new)
        os.rename(folder / REBUILD / RECORD, folder / RECORD)


def _swap_with_the_record_first(store: LocalStore, target: Any) -> None:
    folder = store.folder(target)
    if workspace.staged_record(store, target) is not None:
        os.rename(folder / RECORD, folder / REBUILD / OLD)
        os.rename(folder / REBUILD / RECORD, folder / RECORD)
        workspace._move_up(folder / REBUILD, folder)


@contextlib.contextmanager
def _no_lock(self: LocalStore, target: Any) -> Iterator[None]:
    make_folder(self.folder(target))
    yield


_real_lock = LocalStore.lock


def _no_lock_for_accept(self: LocalStore, target: Any) -> Any:
    actor = current_actor()
    return contextlib.nullcontext() if actor and actor.name == "accepter" else _real_lock(self, target)


def _written_whatever_is_there(store: LocalStore, old: Any, new: Any) -> bool:
    write_record(store, new)
    return True


def _begin_unfenced(
    store: LocalStore, look: Any, status: Any, new: Any, lease: Any, logger: Any, *, forced: bool, real: Any = begin
) -> Any:
    return real(store, look, status, new, SimpleNamespace(committing=contextlib.nullcontext), logger, forced=forced)


def _note_whatever_is_there(store: LocalStore, record: Any, noted: Any) -> list[Any]:
    with store.lock(record.target):
        write_record(store, noted)
    return []


def _roll_forward_without_tokens(self: ObjectStore, target: Any, attempt: str) -> None:
    if (data := self.read(target, f"{BUILDS}/{attempt}/{RECORD}")) is not None:
        self.replace(target, RECORD, data)


def _commit_without_a_seal(self: Lease, attempt: str) -> None:
    """The lease is not looked at."""


def _bring_nothing_at_first(self: ObjectWork, pieces: Any, gone: Any) -> None:
    """What `_record_before_bytes` brings afterwards."""


def _record_before_bytes(self: ObjectWork, lease: Any, record: Any, tidy: Any) -> None:
    self._store.replace(record.target, RECORD, record.to_bytes())
    for entry in record.content:
        self._bucket.upload(self.folder / entry["path"], self._files.key(entry["path"]))


@dataclass(frozen=True)
class Mutation:
    """A guard taken out, and where that must show."""

    name: str
    scenario: str
    replacements: tuple[tuple[Any, str, Callable[..., Any]], ...]
    shows: str
    bounds: Bounds = PLAIN

    def __str__(self) -> str:
        return self.name


MUTATIONS = (
    Mutation(
        "a commit does not check the lease",
        "two builders from nothing",
        ((Lease, "check", lambda self: None),),
        "commits, and the lease is that of",
        PAUSE,
    ),
    Mutation(
        "an attempt begins without the lease",
        "two builders from nothing",
        ((publish, "begin", _begin_unfenced),),
        "not what the record of",
        PAUSE,
    ),
    Mutation(
        "every lease looks dead",
        "two builders from nothing",
        ((LeaseFile, "sign", lambda self: Sign.dead),),
        "B and A build at the same time",
    ),
    Mutation(
        "the lock does not exclude",
        "two builders from nothing",
        ((LocalStore, "lock", _no_lock),),
        "commits, and the lease is that of",
        PAUSE,
    ),
    Mutation(
        "the old record does not step aside",
        "a rebuild and a reader",
        ((workspace, "_swap", _swap_without_stepping_aside),),
        "not what the record of",
    ),
    Mutation(
        "the record moves before the bytes",
        "a rebuild and a reader",
        ((workspace, "_swap", _swap_with_the_record_first),),
        "not what the record of",
    ),
    Mutation(
        "verify marks whatever is there",
        "a rebuild and verify --full",
        ((verify, "_note", _note_whatever_is_there),),
        "not what the record of",
    ),
    Mutation(
        "accept looks, and writes whatever is there by then",
        "a rebuild and accept",
        ((accept, "change_record", _written_whatever_is_there), (LocalStore, "lock", _no_lock_for_accept)),
        "not what the record of",
    ),
    Mutation(
        "a roll-forward does not compare tokens",
        "two rebuilds, preconditions",
        ((ObjectStore, "put_in_place", _roll_forward_without_tokens),),
        "replaces one of token",
        PAUSE,
    ),
    Mutation(
        "a commit does not seal its lease, and puts its record whatever is there",
        "two rebuilds, preconditions",
        ((Lease, "seal", _commit_without_a_seal), (ObjectStore, "put_in_place", _roll_forward_without_tokens)),
        "replaces one of token",
        PAUSE,
    ),
    Mutation(
        "the record is put before the bytes",
        "a rebuild and a reader, preconditions",
        ((ObjectWork, "commit", _record_before_bytes), (ObjectWork, "_bring", _bring_nothing_at_first)),
        "not what the record of",
    ),
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_protocol_is_found_in_which(folder: Path, mutation: Mutation):
    scenario: Scenario = SCENARIOS[mutation.scenario]
    with (
        scenario.world(folder) as world,
        attributes_replaced(*mutation.replacements),
    ):
        found = shortest_violation(world, mutation.bounds)
    assert found is not None
    print(found)
    assert mutation.shows in str(found)
