"""How much room artifacts take, and how much of it they share with others.

Bytes are those of files, as records list them; how a file system stores them is its own affair. Shared are files that
have another name elsewhere (a hard link), or on an object store those in the pool that another artifact names. Copies
that share blocks (reflinks) look like files of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from marin_build.artifact.bucket import at_once
from marin_build.artifact.pool import pool_key
from marin_build.artifact.record import Record, read_record
from marin_build.artifact.store import Held, Store
from marin_build.errors import MarinError, RequestError
from marin_build.recipe.target import Target

Watch = Callable[[int, int], None]
"""Called with how many of how many artifacts were looked at."""


@dataclass(frozen=True)
class Usage:
    """The room that one artifact takes."""

    target: Target
    recorded: int
    """Bytes of the files that its record lists."""
    shared: int
    """Of these, bytes that another artifact has, too."""
    freed: int
    """Bytes that there would be less once it is removed."""
    other: int
    """Bytes of what its record does not list: unfinished work, what was replaced or set aside, logs of other attempts,
    the protocol's own files."""
    files: int
    external: str | None = None
    """Where the listed files lie instead, if it was adopted: then they take no room here."""
    problem: str | None = None
    """Why the record cannot be read."""

    @property
    def size(self) -> int:
        return self.other + (0 if self.external else self.recorded)

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": str(self.target),
            "name": self.target.name,
            "version": self.target.version,
            "recorded_bytes": self.recorded,
            "shared_bytes": self.shared,
            "freed_bytes": self.freed,
            "other_bytes": self.other,
            "files": self.files,
            "external": self.external,
            "problem": self.problem,
        }


@dataclass(frozen=True)
class Report:
    """What was found, the largest first."""

    usages: tuple[Usage, ...]
    size: int
    """Bytes of all of them together; what they share counts once."""
    freed: int
    """Bytes that there would be less once all of them are removed."""
    unnamed: int
    """Bytes in the pool that nothing names, of the whole store."""

    def to_dict(self) -> dict[str, Any]:
        total = {"bytes": self.size, "freed_bytes": self.freed, "unnamed_pool_bytes": self.unnamed}
        return {"artifacts": [usage.to_dict() for usage in self.usages], "total": total}


def selected(store: Store, patterns: Sequence[str]) -> list[Target]:
    """The targets that are there, as far as they are one of `patterns`, below it, or match it as a glob.

    Raises:
        RequestError: a pattern fits nothing that is there.
    """
    here = store.named()
    fits = {pattern: [target for target in here if _fits(target, pattern)] for pattern in patterns}
    for pattern, found in fits.items():
        if not found:
            names = ", ".join(sorted({target.name for target in here})[:20]) or "nothing"
            raise RequestError(f"{pattern!a} is nothing that is in {store.place}; there is: {names}")
    return sorted({target for found in fits.values() for target in found}) if patterns else here


def _fits(target: Target, pattern: str) -> bool:
    text = str(target)
    return text == pattern or text.startswith(f"{pattern.rstrip('/')}/") or fnmatchcase(text, pattern)


def measure(store: Store, targets: Sequence[Target], watch: Watch = lambda done, total: None) -> Report:
    """The room that `targets` take; what is not finished, or cannot be read, is measured as well."""
    named = _named_in_pool(store, watch)
    usages: list[Usage] = []
    seen: dict[Hashable, Held] = {}
    inside: Counter[Hashable] = Counter()
    for done, (usage, held) in enumerate(_each(store, targets, named), 1):
        watch(done, len(targets))
        if held:
            usages.append(usage)
        seen |= {file.key: file for file in held}
        inside.update(file.key for file in held)
    names = {key: named.get(key, file.names) for key, file in seen.items()}
    size = sum(file.bytes for file in seen.values())
    freed = sum(file.bytes for key, file in seen.items() if names[key] <= inside[key])
    unnamed = sum(size for name, size in store.pool.listing().items() if name not in named) if store.pool else 0
    ordered = sorted(usages, key=lambda usage: (-usage.size, usage.target))
    return Report(tuple(ordered), size, freed, unnamed)


def _named_in_pool(store: Store, watch: Watch) -> Counter[Hashable]:
    """How many artifacts of the whole store name each object of the pool; what cannot be read names none."""

    def names(target: Target) -> set[str]:
        try:
            return store.pool_names_of(target)
        except MarinError:
            return set()

    named: Counter[Hashable] = Counter()
    if store.pool is not None:
        here = store.named()
        for start in range(0, len(here), 256):
            watch(start, len(here))
            named.update(name for found in at_once(names, here[start : start + 256]) for name in found)
    return named


def _each(store: Store, targets: Sequence[Target], named: Counter[Hashable]) -> Iterable[tuple[Usage, list[Held]]]:
    step = 64 if store.parallel > 1 else 1
    for start in range(0, len(targets), step):
        yield from at_once(lambda target: _measured(store, target, named), targets[start : start + step])


def _measured(store: Store, target: Target, named: Mapping[Hashable, int]) -> tuple[Usage, list[Held]]:
    record, problem = _record(store, target)
    held = store.held(target)
    inside, names = Counter(f.key for f in held), {f.key: named.get(f.key, f.names) for f in held}
    front = "" if record is None or record.folder == "." else f"{record.folder}/"
    listed = record.files if record else ()
    places = {pool_key(entry) if entry.get("pool") else f"{front}{entry['path']}" for entry in listed}
    own = {} if record is None or record.external else {f.key: f for f in held if f.name in places}
    rest = {f.key: f for f in held if f.key not in own}
    every = own | rest
    usage = Usage(
        target=target,
        recorded=sum(entry["bytes"] for entry in listed),
        shared=sum(f.bytes for key, f in own.items() if names[key] > inside[key]),
        freed=sum(f.bytes for key, f in every.items() if names[key] <= inside[key]),
        other=sum(f.bytes for f in rest.values()),
        files=len(listed),
        external=record.external if record else None,
        problem=problem,
    )
    return usage, held


def _record(store: Store, target: Target) -> tuple[Record | None, str | None]:
    try:
        return read_record(store, target), None
    except MarinError as error:
        return None, str(error).splitlines()[0]
