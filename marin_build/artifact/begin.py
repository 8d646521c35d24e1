"""Where an attempt works, and what becomes of the work that is there: resumed, repaired, set aside, or built anew.

Work of another recipe, or on other input bytes, is never mixed in. What is finished and whole stays until the new one
is. An attempt file is removed before its work is, so that half-removed work belongs to no recipe.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path

from marin_build.artifact.attempt import Attempt, read_attempt, write_attempt
from marin_build.artifact.cause import causes, drift_error, input_error
from marin_build.artifact.examine import Look, State, Status
from marin_build.artifact.record import Record
from marin_build.artifact.store import ATTEMPT, REBUILD, RECORD, Store, make_folder
from marin_build.artifact.verify import check_bytes, check_sizes
from marin_build.artifact.workspace import discard, has_work, remove, set_aside, work_names
from marin_build.errors import DamageError
from marin_build.recipe.target import Target

KINDS_MADE_ANEW = frozenset({"raw", "tokenizers", "tokenized"})
"""Cheap enough to be built from nothing by a plain run when nothing says what their files are."""


def begin(store: Store, look: Look, status: Status, new: Attempt, logger: logging.Logger, *, forced: bool) -> Attempt:
    """Prepare the folder to work in and write the attempt `new`, completed with that folder and what it resumes.

    Raises:
        DamageError, DriftError: what is there cannot be repaired without `-f`.
    """
    there = read_attempt(store, new.target)
    if there is not None and _is_resumed(look, status, there, new, forced):
        written = _write(store, new, there.folder, there)
    elif status.state is State.damaged and not forced:
        written = _repair(store, look, status, there, new, logger)
    elif status.record is not None:
        written = _rebuild_beside(store, new)
    else:
        written = _start_anew(store, new, there, logger, keep=not forced)
    make_folder(store.folder(new.target) / written.folder)
    return written


def _is_resumed(look: Look, status: Status, there: Attempt, new: Attempt, forced: bool) -> bool:
    """True when the work that is there goes on as it is. A forced build goes on with the work of its own run only."""
    if not look.can_resume(there) or not _is_unfinished(there, status.record):
        return False
    return there.forced == new.forced if forced else status.state in (State.partial, State.missing)


def _is_unfinished(there: Attempt, record: Record | None) -> bool:
    return record is None or (there.folder == REBUILD and there.id != record.provenance.get("attempt"))


def _rebuild_beside(store: Store, new: Attempt) -> Attempt:
    """Build in `.rebuild`; the finished artifact stays."""
    store.delete(new.target, ATTEMPT)
    remove(store.folder(new.target) / REBUILD)
    return _write(store, new, REBUILD, None)


def _start_anew(store: Store, new: Attempt, there: Attempt | None, logger: logging.Logger, *, keep: bool) -> Attempt:
    """Build in the folder itself, from nothing; with `keep`, what is there is set aside, else removed.

    Raises:
        DamageError: a checkpoint's files are there, and nothing says what they were made from.
    """
    main = store.folder(new.target)
    if keep and there is None and has_work(main) and not (new.target.is_dev or new.target.kind in KINDS_MADE_ANEW):
        raise _of_unknown_origin(new.target)
    store.delete(new.target, ATTEMPT)
    store.delete(new.target, RECORD)
    remove(main / REBUILD)
    if not keep:
        discard(main)
    elif aside := set_aside(store, new.target, main, work_names(main)):
        logger.warning("%s: older work was moved to %s", new.target, aside)
    return _write(store, new, ".", None)


def _repair(
    store: Store, look: Look, status: Status, there: Attempt | None, new: Attempt, logger: logging.Logger
) -> Attempt:
    """Make a damaged artifact unfinished again, without its damaged files: the builder makes what is missing.

    A checkpoint's files stay where they are: its builder knows by itself which steps are whole.
    """
    target, record = new.target, status.record
    made = record or there
    if made is None or look.changed_inputs(made) or made.fingerprint != new.fingerprint:
        if target.is_dev or (made is None and target.kind in KINDS_MADE_ANEW):
            return _start_anew(store, new, there, logger, keep=True)
        raise _beyond_repair(look, status, made)
    folder = there.folder if there and record is None else "."
    written = _write(store, dataclasses.replace(new, repairs=record.to_dict() if record else None), folder, there)
    main = store.folder(target)
    if target.kind in KINDS_MADE_ANEW:
        set_aside(store, target, main, _still_bad(main, record, {problem.path for problem in status.problems}))
    if folder == ".":
        store.delete(target, RECORD)
    return written


def _still_bad(main: Path, record: Record | None, suspects: set[str]) -> list[str]:
    """The files that are there and are not as recorded. One that was restored since it was found bad is kept."""
    entries = [entry for entry in record.files if entry["path"] in suspects] if record else []
    bad = {problem.path for problem in check_sizes(main, entries)}
    bad |= {problem.path for problem in check_bytes(main, [entry for entry in entries if entry["path"] not in bad])}
    return sorted(path for path in bad if os.path.lexists(main / path))


def _beyond_repair(look: Look, status: Status, made: Record | Attempt | None) -> Exception:
    target = status.target
    if made is None:
        return DamageError(
            f"{target} is damaged, and nothing says what its files were made from: {status.reasons[0]}\n"
            f"  snakemake -f {target}  builds it from nothing"
        )
    if found := causes(look.book, look.record, target, made):
        return drift_error(look.book, target, found, look.drifted(target), finished=False)
    return input_error(target, look.changed_inputs(made))


def _of_unknown_origin(target: Target) -> DamageError:
    return DamageError(
        f"{target}: files are there, and neither a record nor an attempt says what they were made from\n"
        f"  restore .artifact.json from a copy, or build it from nothing: snakemake -f {target}"
    )


def _write(store: Store, new: Attempt, folder: str, resumed: Attempt | None) -> Attempt:
    earlier = (*resumed.earlier, resumed.brief()) if resumed else ()
    repairs = new.repairs or (resumed.repairs if resumed else None)
    written = dataclasses.replace(new, folder=folder, earlier=earlier, repairs=repairs)
    write_attempt(store, written)
    return written
