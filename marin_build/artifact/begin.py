"""Where an attempt works, and what becomes of the work that is there: resumed, repaired, set aside, or built anew.

Work of another recipe, or on other input bytes, is never mixed in. What is finished and whole stays until the new one
is. Here it is decided; the store does it.
"""

from __future__ import annotations

import dataclasses
import logging

from marin_build.artifact.attempt import Attempt, read_attempt
from marin_build.artifact.cause import causes, drift_error, input_error
from marin_build.artifact.examine import Look, State, Status
from marin_build.artifact.lease import Lease
from marin_build.artifact.record import Record
from marin_build.artifact.store import LOGS, Store
from marin_build.artifact.verify import Problem, check_all, noted_losses
from marin_build.artifact.work import Work
from marin_build.errors import DamageError
from marin_build.recipe.target import Target

KINDS_MADE_ANEW = frozenset({"raw", "tokenizers", "tokenized", "parts", "checks"})
"""Cheap enough to be built from nothing by a plain run when nothing says what their files are."""


def begin(
    store: Store, look: Look, status: Status, new: Attempt, lease: Lease, logger: logging.Logger, *, forced: bool
) -> Work:
    """Prepare the folder to work in and write the attempt `new`, completed with that folder and what it resumes.

    A builder that slept through its lease must not clear away what its successor made: hence `lease.committing()`.

    Raises:
        LeasedError: another builder has taken over.
        DamageError, DriftError: what is there cannot be repaired without `-f`.
    """
    there = read_attempt(store, new.target)
    if there is not None and _is_resumed(store, look, status, there, new, forced):
        with lease.committing():
            return store.resume(_continued(new, there), there)
    if status.state is State.damaged and not forced:
        return _repair(store, look, status, there, new, lease, logger)
    with lease.committing():
        if status.record is not None:
            return store.rebuild(new)
        return _start_anew(store, new, there, logger, keep=not forced)


def _is_resumed(store: Store, look: Look, status: Status, there: Attempt, new: Attempt, forced: bool) -> bool:
    """True when the work that is there goes on as it is. A forced build goes on with the work of its own run only."""
    record = status.record
    if not look.can_resume(there) or not (record is None or store.has_rebuild(record, there)):
        return False
    return there.forced == new.forced if forced else status.state in (State.partial, State.missing)


def _start_anew(store: Store, new: Attempt, there: Attempt | None, logger: logging.Logger, *, keep: bool) -> Work:
    """Build from nothing; with `keep`, what is there is set aside.

    Raises:
        DamageError: a checkpoint's files are there, and nothing says what they were made from.
    """
    target = new.target
    made_anew = target.is_dev or target.kind in KINDS_MADE_ANEW
    if keep and there is None and not made_anew and store.has_work(target, None):
        raise _of_unknown_origin(target)
    return store.start_anew(new, logger, keep=keep)


def _repair(
    store: Store,
    look: Look,
    status: Status,
    there: Attempt | None,
    new: Attempt,
    lease: Lease,
    logger: logging.Logger,
) -> Work:
    """Go on without the damaged files: the builder makes what is missing.

    A checkpoint's files stay as they are: its builder knows by itself which steps are whole. What tells of the making
    and is damaged is lost: the record that the repair ends with says so.
    """
    target, record = new.target, status.record
    made = record or there
    if made is None or look.changed_inputs(made) or made.fingerprint != new.fingerprint:
        if target.follows_its_recipe or (made is None and target.kind in KINDS_MADE_ANEW):
            with lease.committing():
                return _start_anew(store, new, there, logger, keep=True)
        raise _beyond_repair(look, status, made)
    if record is not None and record.external:
        _announce_replacement(status, record, logger)
        with lease.committing():
            return store.rebuild(new)
    if record is None:
        with lease.committing():
            return store.repair(_continued(new, there), there, None, ())
    suspects = {problem.path for problem in status.problems} if target.kind in KINDS_MADE_ANEW else set()
    bad = _still_bad(store, record, suspects)
    repairing = dataclasses.replace(new, repairs=noted_losses(record, bad).to_dict())
    paths = sorted(problem.path for problem in bad if not problem.path.startswith(f"{LOGS}/"))
    with lease.committing():
        return store.repair(_continued(repairing, there), there, record, paths)


def _announce_replacement(status: Status, record: Record, logger: logging.Logger) -> None:
    """Say that what was adopted, and is damaged where it lies, is built here; its record stays until that is finished.

    Raises:
        DamageError: it is a checkpoint, which is trained from nothing only when asked for.
    """
    target, problem = record.target, f"{record.external}: {status.problems[0]}"
    if target.kind not in KINDS_MADE_ANEW:
        raise DamageError(
            f"{target} was adopted, and is damaged where it lies: {problem}\n"
            f"  restore it there, or train it from nothing here: snakemake -f {target}"
        )
    logger.warning("%s was ADOPTED and is damaged where it lies: %s", target, problem)
    logger.warning("%s is BUILT HERE INSTEAD, from its recipe; nothing is written there", target)


def _still_bad(store: Store, record: Record, suspects: set[str]) -> list[Problem]:
    """Those of the suspects, and of the logs and metrics, that are not as recorded.

    A file that was restored since it was found bad is kept.
    """
    entries = [entry for entry in record.files if entry["path"] in suspects or entry.get("outside_digest")]
    return check_all(store.files(record), entries)


def _beyond_repair(look: Look, status: Status, made: Record | Attempt | None) -> Exception:
    target = status.target
    if made is None:
        return DamageError(
            f"{target} is damaged, and nothing says what its files were made from: {status.reasons[0]}\n"
            f"  snakemake -f {target}  builds it from nothing"
        )
    if found := causes(look.book, look.record, target, made):
        return drift_error(look.book, target, found, look.drifted(target), finished=False)
    return input_error(target, look.changed_inputs(made), damaged=isinstance(made, Record))


def _of_unknown_origin(target: Target) -> DamageError:
    return DamageError(
        f"{target}: files are there, and neither a record nor an attempt says what they were made from\n"
        f"  restore .artifact.json from a copy, or build it from nothing: snakemake -f {target}"
    )


def _continued(new: Attempt, there: Attempt | None) -> Attempt:
    """`new`, as the one that goes on with the work of `there`."""
    if there is None:
        return new
    return dataclasses.replace(new, earlier=(*there.earlier, there.brief()), repairs=new.repairs or there.repairs)
