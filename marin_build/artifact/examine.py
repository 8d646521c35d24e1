"""The state of a target: what is there, compared with its recipe and with what it was made from.

It reads the small files and asks for the size of each recorded file; no clock and no mtime decides anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from marin_build.artifact.attempt import Attempt, read_attempt
from marin_build.artifact.cause import Cause, causes, drift_error, drifted_targets, input_error, shown_changes
from marin_build.artifact.lease import holder
from marin_build.artifact.owner import Owner
from marin_build.artifact.record import Record, entry_target, read_record
from marin_build.artifact.store import Store
from marin_build.artifact.verify import Problem, check_sizes, is_old
from marin_build.errors import DamageError, DriftError, RecipeError
from marin_build.recipe.drift import Change
from marin_build.recipe.target import Target

if TYPE_CHECKING:
    from marin_build.recipe.load import RecipeBook

MAX_SHOWN = 10


class State(StrEnum):
    missing = "missing"
    partial = "partial"
    """Unfinished work that can be resumed."""
    building = "building"
    """Somebody holds a live lease."""
    finished = "finished"
    drifted = "drifted"
    """Finished, or unfinished work, of another recipe under the same version."""
    outdated = "outdated"
    """Finished, but a dependency was rebuilt to other bytes since."""
    damaged = "damaged"


@dataclass(frozen=True)
class Status:
    """What is true of one target."""

    target: Target
    state: State
    record: Record | None = None
    """Its record, if it is readable: of the old artifact while a new one is being made."""
    reasons: tuple[str, ...] = ()
    """Why it is in this state, a line each, for people."""
    changes: tuple[Change, ...] = ()
    """For `drifted`: each field that differs, the root cause first."""
    owner: Owner | None = None
    """For `building`: who builds."""
    beneath: State | None = None
    """For `building`: the state that it has apart from that."""
    causes: tuple[Cause, ...] = ()
    """As `changes`, with the target of each."""
    drifted: tuple[Target, ...] = ()
    """For `drifted`: it and what it is made from, as far as their records drifted; dependencies first."""
    problems: tuple[Problem, ...] = ()
    """For `damaged`: each file that is not as recorded."""

    @property
    def needs_build(self) -> bool:
        """True when a plain run has work to do here; a `dev` or derived one also when it is not up to date."""
        state = self.beneath or self.state
        if state in (State.drifted, State.outdated):
            return self.target.follows_its_recipe
        return state in (State.missing, State.partial, State.damaged)

    @property
    def is_rebuild(self) -> bool:
        """True when it is finished, and a rebuild of it was begun and interrupted."""
        return (self.beneath or self.state) is State.partial and self.record is not None

    def drift_error(self, book: RecipeBook) -> DriftError:
        """The error that a plain build of a `drifted` target stops with."""
        if self.causes:
            return drift_error(book, self.target, self.causes, self.drifted, finished=self.record is not None)
        return input_error(self.target, self.changes)


def examine(store: Store, book: RecipeBook, target: Target) -> Status:
    """The state of `target`.

    Raises:
        RecipeError: its recipe, or one upstream of it, is missing or wrong.
        RequestError: a newer version of the program wrote its record.
    """
    return examine_all(store, book, [target])[0]


def examine_all(store: Store, book: RecipeBook, targets: Iterable[Target]) -> list[Status]:
    """The state of each of `targets`, in their order; each record is read once.

    Raises:
        RecipeError, RequestError: see `examine`.
    """
    look = Look(store, book)

    def status(target: Target) -> Status:
        return _with_owner(look.judge(target), holder(store, target))

    if store.parallel == 1:
        return [status(target) for target in targets]
    with ThreadPoolExecutor(store.parallel) as pool:
        return list(pool.map(status, targets))


def _with_owner(status: Status, owner: Owner | None) -> Status:
    if owner is None:
        return status
    reasons = (f"{owner} is building it", *status.reasons)
    return dataclasses.replace(status, state=State.building, beneath=status.state, owner=owner, reasons=reasons)


class Look:
    """One look at the store: records are read once and kept."""

    def __init__(self, store: Store, book: RecipeBook) -> None:
        self.store, self.book = store, book
        self._records: dict[Target, Record | DamageError | None] = {}

    def record(self, target: Target) -> Record | None:
        """The record of `target`; None where there is none or it is damaged."""
        found = self._record_or_error(target)
        return found if isinstance(found, Record) else None

    def _record_or_error(self, target: Target) -> Record | DamageError | None:
        if target not in self._records:
            try:
                self._records[target] = self._read_record(target)
            except DamageError as error:
                self._records[target] = error
        return self._records[target]

    def _read_record(self, target: Target) -> Record | None:
        record = read_record(self.store, target)
        if record is not None and self._is_old(record):
            raise DamageError(
                f"{target} is damaged: its record is an old one: its files were made later, from the recipe of now"
            )
        return record

    def _is_old(self, record: Record) -> bool:
        """True when a record of another recipe lies beside later work of the recipe of now."""
        try:
            fingerprint = self.book.fingerprint(record.target)
        except RecipeError:
            return False
        if record.fingerprint == fingerprint:
            return False
        attempt = read_attempt(self.store, record.target)
        return attempt is not None and attempt.fingerprint == fingerprint and is_old(record, attempt)

    def judge(self, target: Target) -> Status:
        """The state of `target`, apart from who may be building it."""
        found = self._record_or_error(target)
        if isinstance(found, DamageError):
            return Status(target, State.damaged, None, tuple(str(found).splitlines()))
        attempt = read_attempt(self.store, target)
        if found is None:
            return self._unfinished(target, attempt)
        return self._finished(target, found, attempt)

    def changed_inputs(self, made: Record | Attempt) -> tuple[Change, ...]:
        """Dependencies whose bytes are no longer those that `made` was made from; absent ones do not count."""
        changes = []
        for entry in made.dependencies:
            record = self.record(entry_target(entry))
            if record is not None and record.digest != entry["digest"]:
                changes.append(Change(f"{record.target} digest", entry["digest"], record.digest))
        return tuple(changes)

    def drifted(self, target: Target) -> tuple[Target, ...]:
        return drifted_targets(self.book, self.record, target)

    def can_resume(self, attempt: Attempt) -> bool:
        """True when unfinished work is of the recipe of now, on the input bytes of now."""
        same = attempt.fingerprint == self.book.fingerprint(attempt.target)
        return same and not self.changed_inputs(attempt)

    def _is_interrupted_rebuild(self, record: Record, attempt: Attempt) -> bool:
        """True when a rebuild was begun beside the finished artifact, can go on, and has not taken its place."""
        return self.store.has_rebuild(record, attempt) and self.can_resume(attempt)

    def _unfinished(self, target: Target, attempt: Attempt | None) -> Status:
        if self.store.is_decided(target):
            return Status(target, State.partial, None, ("its finished build is being put in place",))
        if not self.store.has_work(target, attempt):
            return Status(target, State.missing, None, (_failure(attempt) or "not built yet",))
        if attempt is None:
            return Status(target, State.missing, None, ("files of unknown origin are there; a build sets them aside",))
        if found := causes(self.book, self.record, target, attempt):
            changes = shown_changes(target, found)
            reasons = ("its unfinished work is of another recipe", *_first(changes))
            return Status(target, State.drifted, None, reasons, changes, causes=found, drifted=self.drifted(target))
        if changes := self.changed_inputs(attempt):
            reasons = ("its unfinished work is on other input bytes", *_first(changes))
            return Status(target, State.drifted, None, reasons, changes)
        return Status(target, State.partial, None, (_failure(attempt) or f"unfinished since {attempt.started}",))

    def _finished(self, target: Target, record: Record, attempt: Attempt | None) -> Status:
        found = causes(self.book, self.record, target, record)
        interrupted = attempt if attempt and self._is_interrupted_rebuild(record, attempt) else None
        if found and not interrupted:
            changes = shown_changes(target, found)
            reasons = ("built from another recipe", *_first(changes))
            return Status(target, State.drifted, record, reasons, changes, causes=found, drifted=self.drifted(target))
        if interrupted:
            reason = "a rebuild of it was interrupted; the old one stays until the new one is finished"
            place = self.store.shown(target, interrupted.folder)
            helps = f"to finish it: snakemake {target}; to keep the old one: remove {place}"
            return Status(target, State.partial, record, (reason, helps))
        if problems := self.damage(record):
            return Status(target, State.damaged, record, tuple(_first(problems)), problems=problems)
        if changes := self.changed_inputs(record):
            reasons = ("a dependency was rebuilt to other bytes", *_first(changes))
            return Status(target, State.outdated, record, reasons, changes)
        return Status(target, State.finished, record)

    def damage(self, record: Record) -> tuple[Problem, ...]:
        """What is wrong with the content. Lost logs are reported by `verify`, but are no reason to build anew."""
        content = record.content
        problems = check_sizes(self.store.files(record), content)
        paths = {entry["path"] for entry in content} - {problem.path for problem in problems}
        return (
            *problems,
            *(Problem(entry["path"], entry["problem"]) for entry in record.damage if entry["path"] in paths),
        )


def _failure(attempt: Attempt | None) -> str | None:
    failure = attempt.failure if attempt else None
    return f"the last attempt failed: {failure['message'].partition(chr(10))[0]}" if failure else None


def _first(items: tuple[Change, ...] | tuple[Problem, ...]) -> list[str]:
    more = [f"and {len(items) - MAX_SHOWN} more"] if len(items) > MAX_SHOWN else []
    return [*map(str, items[:MAX_SHOWN]), *more]
