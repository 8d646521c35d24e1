"""Are the bytes still those that were made? Quick: presence and size of each file. Full: every byte.

A full verification that finds damaged content marks the record, so that everybody sees it; one that finds all well
takes the mark away. Logs and metrics cannot be made again: one that is lost fails the full verification that finds it,
which notes it in the record as lost, and no later one. Files that the record does not name fail nothing.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from marin_build.artifact.attempt import Attempt, now, read_attempt
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
    external: str | None = None
    """Where an adopted artifact lies."""
    lost: tuple[str, ...] = ()
    """Logs and metrics that were noted as lost before; they fail nothing."""

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
    problems = check_all(files, record.files) if full else check_sizes(files, record.files)
    content = {entry["path"] for entry in record.content}
    if any(problem.path in content for problem in problems) and is_old(record, read_attempt(store, target)):
        problems = [Problem(RECORD, "is an old one: its files were made later, from another recipe")]
    if full:
        problems += _note(store, record, _noted(files, record, problems))
    else:
        seen = {problem.path for problem in problems}
        problems += [Problem(entry["path"], entry["problem"]) for entry in record.damage if entry["path"] not in seen]
    size = sum(entry["bytes"] for entry in record.files)
    lost = tuple(entry["path"] for entry in record.lost)
    foreign = tuple(store.foreign(record))
    return Report(target, full, len(record.files), size, tuple(problems), foreign, record.external, lost)


def is_old(record: Record, attempt: Attempt | None) -> bool:
    """True when the work in the folder is of a later attempt and another recipe: the record was put there since."""
    if attempt is None or attempt.folder != "." or attempt.repairs is not None:
        return False
    return attempt.fingerprint != record.fingerprint and attempt.id != record.provenance.get("attempt")


def check_sizes(files: Files, entries: Iterable[Entry]) -> list[Problem]:
    """Files that are missing, are no plain files, or have another size."""
    expected = {entry["path"]: entry["bytes"] for entry in entries}
    problems = []
    for path, seen in files.sizes(list(expected)).items():
        if seen != expected[path]:  # what was seen of many at once may be old
            seen = files.sizes([path])[path]
        if seen is None:
            problems.append(Problem(path, "missing"))
        elif isinstance(seen, MarinError):
            problems.append(Problem(path, str(seen)))
        elif seen != expected[path]:
            problems.append(Problem(path, f"has {seen:,} bytes instead of {expected[path]:,}"))
    return problems


def check_all(files: Files, entries: Iterable[Entry]) -> list[Problem]:
    """Files that are not as recorded, every byte read."""
    listed = list(entries)
    problems = check_sizes(files, listed)
    bad = {problem.path for problem in problems}
    return problems + check_bytes(files, [entry for entry in listed if entry["path"] not in bad])


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


def noted_losses(record: Record, problems: Iterable[Problem]) -> Record:
    """The record with its logs and metrics that have a problem noted as lost, and no longer among its files."""
    found = {problem.path: problem.problem for problem in problems}
    lost = [entry for entry in record.files if entry.get("outside_digest") and entry["path"] in found]
    files = tuple(entry for entry in record.files if entry not in lost)
    notes = [{**entry, "problem": found[entry["path"]], "noted": now()} for entry in lost]
    return dataclasses.replace(record, files=files, lost=(*record.lost, *notes))


def _with_what_came_back(files: Files, record: Record) -> Record:
    """The record with those of its lost files that are there again, as they were, among its files."""
    known = {entry["path"] for entry in record.files}
    back = [entry for entry in record.lost if entry["path"] not in known and not check_all(files, [entry])]
    plain = [{key: value for key, value in entry.items() if key not in ("problem", "noted")} for entry in back]
    lost = tuple(entry for entry in record.lost if entry not in back)
    return dataclasses.replace(record, files=(*record.files, *plain), lost=lost)


def _noted(files: Files, record: Record, problems: list[Problem]) -> Record:
    """The record with what a full verification found: damaged content, and logs or metrics that are lost, or back."""
    noted = _with_what_came_back(files, noted_losses(record, problems))
    lost = {entry["path"] for entry in record.files} - {entry["path"] for entry in noted.files}
    damage = tuple(dataclasses.asdict(problem) for problem in problems if problem.path not in lost)
    return dataclasses.replace(noted, damage=damage)


def _note(store: Store, record: Record, noted: Record) -> list[Problem]:
    """Write what was found into the record; what keeps us from it is one more problem."""
    if noted == record:
        return []
    try:
        with store.lock(record.target):  # where it was rebuilt meanwhile, nothing is written: the mark is not its own
            change_record(store, record, noted)
    except MarinError as error:
        return [Problem(RECORD, f"the result could not be noted: {error}")]
    return []
