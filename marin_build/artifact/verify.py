"""Are the bytes still those that were made? Quick: presence and size of each file. Full: every byte.

A full verification that finds something marks the record, so that everybody sees the damage; one that finds all well
takes the mark away. Files that the record does not name are reported apart and fail nothing.
"""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marin_build.artifact.digest import MAX_THREADS, hash_file
from marin_build.artifact.record import Record, read_record, write_record
from marin_build.artifact.store import ASIDE, LOGS, OWN_NAMES, RECORD, TEMPORARY, Store
from marin_build.errors import DamageError, MarinError
from marin_build.recipe.target import Target

Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Problem:
    """One file that is not as the record says."""

    path: str
    problem: str

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


@dataclass(frozen=True)
class Report:
    """What one verification saw."""

    target: Target
    full: bool
    files: int
    bytes: int
    problems: tuple[Problem, ...]
    foreign: tuple[str, ...]
    """Files that no record names."""

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "target": str(self.target), "ok": self.ok}


def verify(store: Store, target: Target, full: bool) -> Report:
    """Compare the files of `target` with its record.

    Raises:
        RequestError: a newer version of the program wrote the record.
    """
    folder = store.folder(target)
    try:
        record = read_record(store, target)
    except DamageError as error:
        return Report(target, full, 0, 0, (Problem(RECORD, str(error)),), ())
    if record is None:
        return Report(target, full, 0, 0, (Problem(RECORD, "missing: the artifact is not finished"),), ())
    problems = check_sizes(folder, record.files)
    if full:
        bad = {problem.path for problem in problems}
        problems += check_bytes(folder, [entry for entry in record.files if entry["path"] not in bad])
        problems += _mark(store, record, problems)
    else:
        seen = {problem.path for problem in problems}
        problems += [Problem(**entry) for entry in record.damage if entry["path"] not in seen]
    size = sum(entry["bytes"] for entry in record.files)
    return Report(target, full, len(record.files), size, tuple(problems), tuple(foreign_files(folder, record)))


def check_sizes(folder: Path, entries: Iterable[Entry]) -> list[Problem]:
    """Files that are missing, are no plain files, or have another size; a stat for each.

    Links are followed: who moves shards to another disk and leaves links has lost nothing.
    """
    problems = []
    for entry in entries:
        try:
            seen = os.stat(f"{folder}/{entry['path']}")
        except OSError as error:
            missing = isinstance(error, FileNotFoundError | NotADirectoryError)
            problems.append(Problem(entry["path"], "missing" if missing else f"cannot be read: {error.strerror}"))
            continue
        if not stat.S_ISREG(seen.st_mode):
            problems.append(Problem(entry["path"], "is not a plain file"))
        elif seen.st_size != entry["bytes"]:
            problems.append(Problem(entry["path"], f"has {seen.st_size:,} bytes instead of {entry['bytes']:,}"))
    return problems


def check_bytes(folder: Path, entries: list[Entry]) -> list[Problem]:
    """Files whose bytes are not those recorded, or cannot be read."""

    def check(entry: Entry) -> Problem | None:
        try:
            _, digest = hash_file(folder / entry["path"])
        except MarinError as error:
            return Problem(entry["path"], str(error))
        if digest == entry["xxh3_128"]:
            return None
        return Problem(entry["path"], f"other bytes: xxh3_128 {digest} instead of {entry['xxh3_128']}")

    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
        return [problem for problem in pool.map(check, entries) if problem]


def foreign_files(folder: Path, record: Record) -> list[str]:
    """Files of the folder that the record does not name: relative paths, sorted."""
    known = {entry["path"] for entry in record.files}
    skip = OWN_NAMES - {ASIDE} | {LOGS}
    found = []
    for base, folders, names in os.walk(folder):
        front = os.path.relpath(base, folder) + "/" if base != str(folder) else ""
        if not front:
            folders[:] = [name for name in folders if name not in skip]
        paths = (f"{front}{name}" for name in names if front or (name not in skip and not name.endswith(TEMPORARY)))
        found += [path for path in paths if path not in known]
    return sorted(found)


def _mark(store: Store, record: Record, problems: list[Problem]) -> list[Problem]:
    """Write what was found into the record; what keeps us from it is one more problem."""
    damage = tuple(dataclasses.asdict(problem) for problem in problems)
    if damage == record.damage:
        return []
    try:
        with store.lock(record.target):
            if read_record(store, record.target) == record:  # else it was rebuilt meanwhile, and its mark is not ours
                write_record(store, dataclasses.replace(record, damage=damage))
    except MarinError as error:
        return [Problem(RECORD, f"the result could not be noted: {error}")]
    return []
