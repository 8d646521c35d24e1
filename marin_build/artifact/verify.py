"""Are the bytes still those that were made? Quick: presence and size of each file. Full: every byte.

A full verification that finds something marks the record, so that everybody sees the damage; one that finds all well
takes the mark away. Files that the record does not name are reported apart and fail nothing.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from marin_build.artifact.digest import MAX_THREADS, hash_stream
from marin_build.artifact.files import Files
from marin_build.artifact.record import Record, change_record, read_record
from marin_build.artifact.store import RECORD, Store
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
    try:
        record = read_record(store, target)
    except DamageError as error:
        return Report(target, full, 0, 0, (Problem(RECORD, str(error)),), ())
    if record is None:
        return Report(target, full, 0, 0, (Problem(RECORD, "missing: the artifact is not finished"),), ())
    files = store.files(record)
    problems = check_sizes(files, record.files)
    if full:
        bad = {problem.path for problem in problems}
        problems += check_bytes(files, [entry for entry in record.files if entry["path"] not in bad])
        problems += _mark(store, record, problems)
    else:
        seen = {problem.path for problem in problems}
        problems += [Problem(**entry) for entry in record.damage if entry["path"] not in seen]
    size = sum(entry["bytes"] for entry in record.files)
    return Report(target, full, len(record.files), size, tuple(problems), tuple(store.foreign(record)))


def check_sizes(files: Files, entries: Iterable[Entry]) -> list[Problem]:
    """Files that are missing, are no plain files, or have another size."""
    expected = {entry["path"]: entry["bytes"] for entry in entries}
    problems = []
    for path, seen in files.sizes(list(expected)).items():
        if seen is None:
            problems.append(Problem(path, "missing"))
        elif isinstance(seen, MarinError):
            problems.append(Problem(path, str(seen)))
        elif seen != expected[path]:
            problems.append(Problem(path, f"has {seen:,} bytes instead of {expected[path]:,}"))
    return problems


def check_bytes(files: Files, entries: Iterable[Entry]) -> list[Problem]:
    """Files whose bytes are not those recorded, or cannot be read."""

    def check(entry: Entry) -> Problem | None:
        try:
            _, digest = hash_stream(lambda: files.open(entry["path"]), f"{files.shown}/{entry['path']}")
        except MarinError as error:
            return Problem(entry["path"], str(error))
        if digest == entry["xxh3_128"]:
            return None
        return Problem(entry["path"], f"other bytes: xxh3_128 {digest} instead of {entry['xxh3_128']}")

    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
        return [problem for problem in pool.map(check, entries) if problem]


def _mark(store: Store, record: Record, problems: list[Problem]) -> list[Problem]:
    """Write what was found into the record; what keeps us from it is one more problem."""
    damage = tuple(dataclasses.asdict(problem) for problem in problems)
    if damage == record.damage:
        return []
    try:
        with store.lock(record.target):  # where it was rebuilt meanwhile, nothing is written: the mark is not its own
            change_record(store, record, dataclasses.replace(record, damage=damage))
    except MarinError as error:
        return [Problem(RECORD, f"the result could not be noted: {error}")]
    return []
