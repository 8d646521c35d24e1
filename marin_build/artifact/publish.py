"""The build of one target, from the question whether anything is to do to the finished artifact.

    nothing to do? → refuse drift → lease → sources pinned, dependencies whole → attempt → builder → commit → mirror

Everything before the attempt only reads, so a refusal leaves no trace. Killed anywhere, the same call goes on.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from marin_build.artifact import donors, forced, mirror
from marin_build.artifact.attempt import Attempt, new_id, note_failure, now, read_attempt
from marin_build.artifact.attempt_log import AttemptLog, attempt_log, terminal_logger
from marin_build.artifact.begin import begin
from marin_build.artifact.cause import causes, drift_error
from marin_build.artifact.commit import commit, entry_of, start
from marin_build.artifact.context import BuildContext, BuildResult, Dependency
from marin_build.artifact.examine import Look, State, Status
from marin_build.artifact.lease import Lease, Sign, Terms, acquire, parse_lease
from marin_build.artifact.record import Record, parse_record, read_record, write_record
from marin_build.artifact.stop import StopSignals
from marin_build.artifact.store import FULL, LEASE, Store, disk_error
from marin_build.artifact.work import Work
from marin_build.errors import DamageError, MarinError, RequestError, Stopped
from marin_build.recipe.dependencies import identity_dependencies, unresolved
from marin_build.recipe.target import Target, parse_target
from marin_build.settings import Settings

if TYPE_CHECKING:
    from marin_build.recipe.load import RecipeBook

Builder = Callable[[BuildContext], BuildResult]


@dataclass(frozen=True)
class Outcome:
    """How a build ended well."""

    target: Target
    built: bool
    """False when the artifact was there already."""
    record: Record
    reasons: tuple[str, ...] = ()
    """What is to say about an artifact that was there, for example that it is outdated."""


@dataclass(frozen=True)
class _Request:
    target: Target
    book: RecipeBook
    store: Store
    settings: Settings
    builder: Builder
    forced_run: str | None
    run: str | None
    command: tuple[str, ...]


@dataclass(frozen=True)
class _Plan:
    """What is to be done, and from what."""

    status: Status
    look: Look
    dependencies: Mapping[str, Record]
    is_forced: bool


def build(
    target: Target,
    book: RecipeBook,
    store: Store,
    settings: Settings,
    builder: Builder,
    *,
    forced_run: str | None,
    run: str | None,
    command: list[str],
) -> Outcome:
    """Make `target` finished: reuse it, resume it, or build it. All that it needs must be finished.

    `forced_run` is the id of the run that forces it, and forces it once; `run` is the id of the run that asks, so that
    a retry of the same run does not repeat what cannot succeed.

    Raises:
        RequestError: a source is not pinned, a dependency is not built, the prefix cannot be written to.
        DriftError: it is, or its unfinished work is, of another recipe or other inputs; or they changed meanwhile.
        DamageError: a dependency is damaged, or it is itself beyond repair.
        LeasedError: somebody else is building it.
        Stopped: a signal came; what was done resumes.
        MarinError: whatever the builder says, a full disk, or the failure noted by an earlier attempt of the same run.
    """
    request = _Request(target, book, store, settings, builder, forced_run, run, tuple(command))
    logger = terminal_logger()
    ready = None if store.is_decided(target) else _plan(request)
    if isinstance(ready, Outcome):
        _tidy_after_the_dead(request, logger)
    outcome = ready if isinstance(ready, Outcome) else _build_leased(request, logger)
    for reason in outcome.reasons:
        logger.warning("%s: %s", target, reason)
    mirror.write(outcome.record)
    if forced_run is not None:
        forced.clear(target, forced_run)
    return outcome


def _build_leased(request: _Request, logger: logging.Logger) -> Outcome:
    with StopSignals() as signals, _leased(request, logger, signals, wait=request.settings.wait) as lease:
        plan = _plan(request)
        return plan if isinstance(plan, Outcome) else _carry_out(request, plan, lease, signals, logger)


@contextmanager
def _leased(request: _Request, logger: logging.Logger, signals: StopSignals, *, wait: bool) -> Iterator[Lease]:
    """Hold the lease of the target."""
    token = _highest_token(request.store, request.target)
    terms = Terms(request.settings.lease_seconds, wait, request.run, token, signals.requested)
    lease = acquire(request.store, request.target, terms, logger)
    try:
        yield lease
    finally:
        _release(lease, logger)


def _highest_token(store: Store, target: Target) -> int:
    """That of the attempt or of the record that is there: a new one must be higher."""
    attempt = read_attempt(store, target)
    try:
        record = read_record(store, target)
    except DamageError:
        record = None
    return max(attempt.token if attempt else 0, record.provenance.get("token", 0) if record else 0)


def _tidy_after_the_dead(request: _Request, logger: logging.Logger) -> None:
    """Remove what a builder left that was killed between its record and its last step; it would do no harm."""
    lease = parse_lease(request.store.read(request.target, LEASE))
    if (lease and lease.sign() is Sign.dead) or request.store.is_untidy(request.target):
        # Somebody else may be at it, or the prefix cannot be written to: both are well.
        with suppress(MarinError), _leased(request, logger, StopSignals(), wait=False):
            pass


def _release(lease: Lease, logger: logging.Logger) -> None:
    try:
        lease.release()
    except MarinError as error:  # it ends with this process anyway
        logger.warning("%s: the lease could not be dropped: %s", lease.target, error)


# ---- is anything to do? ----------------------------------------------------------------------------------------------


def _plan(request: _Request) -> Outcome | _Plan:
    """What is to do, or the outcome where nothing is. Only reads."""
    target, book, store = request.target, request.book, request.store
    look = Look(store, book)
    status = look.judge(target)
    is_forced = request.forced_run is not None and not _was_forced_by(status.record, request.forced_run)
    if not is_forced and not status.needs_build:
        if status.state is State.drifted or status.record is None:
            raise status.drift_error(book)
        return Outcome(target, False, status.record, status.reasons)
    if attempt := read_attempt(store, target):
        attempt.raise_again_in(request.run)
    refuse_unpinned(book, target)
    return _Plan(status, look, dependencies_of(look, target), is_forced)


def _was_forced_by(record: Record | None, run: str) -> bool:
    return record is not None and record.provenance.get("forced") == run


def refuse_unpinned(book: RecipeBook, target: Target) -> None:
    """Raise RequestError for a source that may change under its name."""
    fields = unresolved(book.load(target))
    if fields:
        raise RequestError(
            f"{book.shown(target)}: {fields[0]} is unresolved; a build needs a pinned source\n"
            f"  marin-build pin {target}  writes it into the recipe"
        )


def dependencies_of(look: Look, target: Target) -> dict[str, Record]:
    """Records of everything that it needs: finished, of its recipe of now, with every file in its place.

    Raises:
        RequestError, DriftError, DamageError: one is not.
    """
    return {text: finished_dependency(look, target, parse_target(text)) for text in look.book.needs(target)}


def finished_dependency(look: Look, consumer: Target, target: Target) -> Record:
    """The record of something that `consumer` is made from.

    Raises:
        RequestError, DriftError, DamageError: it is not finished, of another recipe, or damaged.
    """
    record, state = look.record(target), look.judge(target).state
    what, help_line = f"{consumer}: its dependency {target}", f"\n  snakemake {target}"
    if record is None:
        if state is State.damaged:
            raise DamageError(f"{what} is damaged: its record cannot be read{help_line}")
        raise RequestError(f"{what} is not finished; build it first{help_line}")
    if found := causes(look.book, look.record, target, record):
        if target.follows_its_recipe:
            raise RequestError(f"{what} is of an older recipe; build it first{help_line}")
        raise drift_error(look.book, target, found, look.drifted(target), finished=True)
    if problems := look.damage(record):
        raise DamageError(f"{what} is damaged: {problems[0]}{help_line}")
    return record


# ---- the work --------------------------------------------------------------------------------------------------------


def _carry_out(request: _Request, plan: _Plan, lease: Lease, signals: StopSignals, logger: logging.Logger) -> Outcome:
    store, target, book = request.store, request.target, request.book
    with disk_errors_explained(Path(store.shown(target))):
        new = _new_attempt(request, plan, lease)
        work = begin(store, plan.look, plan.status, new, lease, logger, forced=plan.is_forced)
        attempt = work.attempt
        begun = start(attempt, plan.status.record, book.folder, request.command)
    with _working(store, work, lease) as log:
        context = BuildContext(
            target=target,
            recipe=book.load(target),
            fingerprint=attempt.fingerprint,
            folder=work.folder,
            logs=work.logs,
            dependencies=fetched(store, plan.dependencies),
            settings=request.settings,
            logger=log.logger,
            stop_requested=lambda: signals.requested() or lease.is_lost(),
            check_lease=lease.check,
            keep=work.keep,
            others=lambda kind: donors.finished(store, kind, target),
            read=lambda record, name: donors.read_small(store, record, name),
            take=lambda record, names: work.take(record, names, lambda: _go_on(target, lease, signals)),
            must_resume=attempt.repairs is not None,
            forced=attempt.forced,
        )
        log.logger.info("building %s in %s", target, context.folder)
        with disk_errors_explained(context.folder):
            result = request.builder(context)
            record = commit(store, book, lease, context, begun, result, work, log)
    return Outcome(target, True, record)


def _go_on(target: Target, lease: Lease, signals: StopSignals) -> None:
    lease.check()
    if signals.requested():
        raise Stopped(f"{target}: stopped by a signal while files were taken over; the same command goes on")


@contextmanager
def _working(store: Store, work: Work, lease: Lease) -> Iterator[AttemptLog]:
    """The log of the work; whatever happens, it is brought to where others can read it."""
    with closing(work), attempt_log(work.logs, work.attempt.id) as log, _failures_noted(store, work, lease, log):
        yield log


def fetched(store: Store, records: Mapping[str, Record]) -> dict[str, Dependency]:
    return {text: Dependency(record.target, store.fetch(record), record.to_dict()) for text, record in records.items()}


def _new_attempt(request: _Request, plan: _Plan, lease: Lease) -> Attempt:
    used = identity_dependencies(request.book.load(request.target))
    return Attempt(
        id=new_id(),
        name=request.target.name,
        version=request.target.version,
        fingerprint=request.book.fingerprint(request.target),
        recipe=request.book.identity(request.target),
        dependencies=tuple(entry_of(plan.dependencies[text].to_dict()) for text in used),
        folder=".",
        token=lease.file.token,
        started=now(),
        host=socket.gethostname(),
        run=request.run,
        forced=request.forced_run if plan.is_forced else None,
    )


@contextmanager
def _failures_noted(store: Store, work: Work, lease: Lease, log: AttemptLog) -> Iterator[None]:
    """Write every failure to the attempt's log, and one that a retry cannot cure into the attempt.

    Raises:
        LeasedError: in place of any failure, when the lease was lost: then that is the reason.
    """
    try:
        yield
    except BaseException as error:
        log.failed(error, expected=isinstance(error, MarinError))
        if lease.is_lost():
            lease.check()
        if isinstance(error, MarinError):
            try:
                with lease.committing():
                    note_failure(store, work.attempt, error)
                    _put_record_back(store, work.attempt, error)
            except MarinError as problem:
                log.logger.warning("the failure could not be noted: %s", problem)
        raise


def _put_record_back(store: Store, attempt: Attempt, error: MarinError) -> None:
    """A damaged artifact that turned out beyond repair keeps its record, and with it its state and what it tells."""
    if attempt.repairs is not None and isinstance(error, DamageError) and read_record(store, attempt.target) is None:
        write_record(store, parse_record(json.dumps(attempt.repairs).encode(), attempt.target, "in its attempt"))


@contextmanager
def disk_errors_explained(folder: Path) -> Iterator[None]:
    """Turn what the system says about files into one line; libraries often wrap a full disk in errors of their own."""
    try:
        yield
    except MarinError:
        raise
    except MemoryError as error:
        raise MarinError(
            f"out of memory while {folder} was made\n"
            "  give it more, or fewer processes (--config processes=N), and run the same command again: what was done "
            "is kept"
        ) from error
    except Exception as error:
        if full := _full_disk(error):
            raise disk_error(full, folder) from error
        if isinstance(error, OSError) and error.filename is not None:
            raise MarinError(f"{error.filename}: {error.strerror}") from error
        raise


def _full_disk(error: BaseException | None) -> OSError | None:
    """The full disk behind an error, whoever wrapped it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return error
        for number in FULL:
            if os.strerror(number) in str(error):
                return OSError(number, os.strerror(number))
        error = error.__cause__ or error.__context__
    return None
