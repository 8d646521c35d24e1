"""The folder of an artifact on a disk while it changes hands: work set aside, damage cleared, a rebuild put in place.

Every step can be repeated, and can be interrupted anywhere: what is left says by itself how to go on. The lease must
be held throughout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING

from marin_build.artifact.attempt import read_attempt, write_attempt
from marin_build.artifact.files import first_link
from marin_build.artifact.record import STAGED, Record, parse_record, read_record
from marin_build.artifact.store import (
    ASIDE,
    LOGS,
    OWN_NAMES,
    REBUILD,
    RECORD,
    TEMPORARY,
    disk_errors,
    make_folder,
    sync_folder,
)
from marin_build.errors import DamageError
from marin_build.recipe.target import Target

if TYPE_CHECKING:
    from marin_build.artifact.local_store import LocalStore

OLD = "replaced.json"
"""In `.rebuild`: the old record, once it has stepped aside for the new one."""

NOT_WORK = OWN_NAMES | {LOGS}


def has_files(folder: Path) -> bool:
    """True when a builder left at least one file here."""
    for base, folders, names in os.walk(folder):
        if base == str(folder):
            folders[:] = [name for name in folders if name not in NOT_WORK]
            names = [name for name in names if name not in NOT_WORK | {OLD}]
        if any(not name.endswith(TEMPORARY) for name in names):
            return True
    return False


def work_names(folder: Path) -> list[str]:
    """Top-level names of what builders left in a folder, unfinished files included."""
    try:
        return sorted(name for name in os.listdir(folder) if name not in NOT_WORK)
    except FileNotFoundError:
        return []


def discard(folder: Path) -> None:
    """Remove all work in a folder; records, logs and the folder stay."""
    for name in work_names(folder):
        remove(folder / name)


def set_aside(folder: Path, names: list[str]) -> Path | None:
    """Move files or folders out of the way, to `.aside`, where `verify` reports them; nothing there is replaced."""
    aside = folder / ASIDE
    if os.path.islink(aside):
        raise DamageError(f"{aside} is a link, and nothing is moved through one\n  remove it")
    for name in dict.fromkeys(first_link(folder, name) or name for name in names):
        place = _free(aside / name)
        make_folder(place.parent)
        os.rename(folder / name, place)
        sync_folder((folder / name).parent)
    return aside if names else None


def _free(path: Path) -> Path:
    """`path`, or where something is there already the first of `path.2`, `path.3`, …"""
    numbered = (path.with_name(f"{path.name}.{number}") for number in count(2))
    return next(place for place in chain([path], numbered) if not os.path.lexists(place))


def remove(path: Path) -> None:
    """Remove a file or a folder with all that is in it; nothing happens where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def staged_record(store: LocalStore, target: Target) -> Record | None:
    """The record of a finished rebuild that waits to be put in place; an unreadable one does not count."""
    return _readable(store, target, STAGED)


def is_half_moved(store: LocalStore, target: Target) -> bool:
    """True when a rebuild has taken the old one's place, and its attempt still says that it is being made."""
    attempt = read_attempt(store, target)
    if attempt is None or attempt.folder != REBUILD:
        return False
    record = _readable(store, target, RECORD)
    return record is not None and record.provenance.get("attempt") == attempt.id


def put_in_place(store: LocalStore, target: Target) -> None:
    """Finish a rebuild: let it take the place of the old artifact, and forget where it was made."""
    _swap(store, target)
    attempt = read_attempt(store, target)
    if attempt and is_half_moved(store, target):
        with disk_errors(store.folder(target) / REBUILD):
            remove(store.folder(target) / REBUILD)
        write_attempt(store, dataclasses.replace(attempt, folder="."))


def _readable(store: LocalStore, target: Target, name: str) -> Record | None:
    try:
        return read_record(store, target, name)
    except DamageError:
        return None


def _swap(store: LocalStore, target: Target) -> None:
    """Let the finished rebuild take the place of the old artifact; goes on where an earlier call was interrupted.

    Until the old record steps aside, readers see the old artifact whole; from then on nothing; and once the new record
    is there, the new artifact whole. Nothing happens when no finished rebuild waits. The lock must be held.

    Raises:
        MarinError: the disk failed; a repetition goes on.
    """
    folder = store.folder(target)
    rebuild = folder / REBUILD
    new = staged_record(store, target)
    if new is None:
        return
    with disk_errors(rebuild):
        if (folder / RECORD).exists():
            os.rename(folder / RECORD, rebuild / OLD)
            sync_folder(rebuild)
            sync_folder(folder)
        _move_up(rebuild, folder)
        _remove_left_over(folder, rebuild / OLD, new)
        os.rename(rebuild / RECORD, folder / RECORD)
        sync_folder(folder)


def _move_up(rebuild: Path, folder: Path) -> None:
    for name in sorted(os.listdir(rebuild)):
        if name not in (RECORD, OLD) and not name.endswith(TEMPORARY):
            remove(folder / name)
            os.rename(rebuild / name, folder / name)
    sync_folder(folder)


def _remove_left_over(folder: Path, old: Path, new: Record) -> None:
    """Remove the files that only the old record names; foreign files, logs and what lies behind links stay."""
    kept = {entry["path"] for entry in new.files}
    for path in _recorded_paths(old, new.target):
        if path not in kept and not path.startswith(f"{LOGS}/") and not first_link(folder, os.path.dirname(path)):
            with contextlib.suppress(FileNotFoundError, IsADirectoryError, NotADirectoryError):  # or now a new folder
                (folder / path).unlink()
            with contextlib.suppress(OSError):  # not empty
                os.removedirs((folder / path).parent)
    sync_folder(folder)


def _recorded_paths(record: Path, target: Target) -> list[str]:
    try:
        return [entry["path"] for entry in parse_record(record.read_bytes(), target, str(record)).files]
    except (FileNotFoundError, DamageError):  # none, or damaged: its files stay as foreign ones
        return []
