"""Housekeeping: find what nobody needs any more, remember since when, and delete it once it has been so long enough.

What is needed is decided by recipes, pins, records and leases, never by a clock. The grace period only gives people
time to object: what is found is noted in `.gc.json` of its artifact (`sightings.py`), and what is needed again is
forgotten there.

An artifact is deleted under its lease, after a second look, record first: no reader ever sees a record without bytes.
What artifacts of an object store share is deleted last, see `pool_gc.py`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from marin_build.artifact import mirror
from marin_build.artifact.attempt import Attempt, read_attempt
from marin_build.artifact.examine import Look
from marin_build.artifact.lease import Lease, Terms, acquire, holder
from marin_build.artifact.pool import POOL
from marin_build.artifact.pool_gc import PoolSweeper, Unneeded
from marin_build.artifact.reach import PARTS, Parts, is_kept, reachable
from marin_build.artifact.record import Record, read_record
from marin_build.artifact.sightings import Sighting, ages, note_bytes, parse_note, seen_now
from marin_build.artifact.store import (
    ASIDE,
    ATTEMPT,
    BUILDS,
    KEPT,
    LEASE,
    LOCK,
    LOGS,
    NOTE,
    REBUILD,
    RECORD,
    TEMPORARY,
    Store,
)
from marin_build.errors import DamageError, LeasedError, MarinError, RecipeError
from marin_build.recipe.load import RecipeBook
from marin_build.recipe.target import Target
from marin_build.settings import Settings

REMOVED_AT_ONCE = 100
"""Files between two looks at the lease."""

ALL_OR_NOTHING = frozenset({"artifact", "unfinished work", "abandoned rebuild"})
"""What is one thing: its time begins with its newest file."""

Groups = dict[tuple[str, str], list[str]]
"""Names of files by (what they are, why they are not needed)."""


@dataclass(frozen=True)
class Item:
    """Files of one artifact that are not needed, for one reason."""

    target: Target | None
    """None: they lie in the pool."""
    what: str
    why: str
    names: tuple[str, ...]
    bytes: int
    seconds: float
    """Since they were first seen so."""
    due: bool
    outcome: str = ""
    """After a deletion: `deleted`, or why not."""

    @property
    def place(self) -> str:
        return str(self.target or POOL)

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "target": self.place, "names": list(self.names)}


@dataclass(frozen=True)
class Sweeper:
    """One call of `marin-build gc`."""

    store: Store
    settings: Settings
    grace_seconds: float
    logger: logging.Logger

    @cached_property
    def parts(self) -> Parts:
        return Parts(self.store)

    def look(self) -> list[Item]:
        """Everything that is not needed; notes what is new, and forgets what is needed again.

        Raises:
            RecipeError, RequestError: what is needed cannot be known; see `reachable`.
        """
        book = self._book()
        needed = reachable(self.store, book, self.settings.keep)
        look = Look(self.store, book)
        found = [item for target in self.store.targets() for item in self._items(look, target, target in needed)]
        return found + [_shared(unneeded) for unneeded in self._pool.look()]

    def delete(self, items: Sequence[Item]) -> list[Item]:
        """Delete those of `items` that are due and still not needed; the same items, with their outcome."""
        due: dict[Target, list[Item]] = {}
        for item in items:
            if item.due and item.target:
                due.setdefault(item.target, []).append(item)
        outcomes: dict[Target | None, str] = {target: self._delete(target, found) for target, found in due.items()}
        outcomes[None] = self._pool.delete([name for i in items if i.due and i.target is None for name in i.names])
        return [dataclasses.replace(i, outcome=outcomes[i.target]) if i.due else i for i in items]

    @property
    def _pool(self) -> PoolSweeper:
        return PoolSweeper(self.store, self.grace_seconds, self.logger)

    def _book(self) -> RecipeBook:
        return RecipeBook(self.settings.recipes, self.settings.encoder)

    def _items(self, look: Look, target: Target, is_needed: bool) -> Iterator[Item]:
        listing = self.store.listing(target)
        groups = _unneeded(look, target, listing) if is_needed else _all_of(target, listing)
        seconds = self._ages(target, groups, listing)
        for (what, why), names in groups.items():
            if what in ALL_OR_NOTHING:
                youngest = min(seconds[name] for name in names)
                seconds |= dict.fromkeys(names, youngest)
            for due in (True, False):
                chosen = [name for name in names if (seconds[name] >= self.grace_seconds) is due]
                if chosen:
                    size = sum(listing[name] for name in chosen)
                    yield Item(target, what, why, tuple(chosen), size, max(seconds[name] for name in chosen), due)

    def _ages(self, target: Target, groups: Groups, listing: Mapping[str, int]) -> dict[str, float]:
        """Seconds since each file was first seen not to be needed, as it is now; new ones are noted."""
        noted = parse_note(self.store.read(target, NOTE))
        seen = seen_now((name for names in groups.values() for name in names), listing, noted)
        if seen != noted:
            try:
                _write_note(self.store, target, seen)
            except MarinError as error:
                self.logger.warning("%s: what was found could not be noted: %s", target, error)
        return ages(seen)

    # ---- deleting ----------------------------------------------------------------------------------------------------

    def _delete(self, target: Target, items: Sequence[Item]) -> str:
        try:
            lease = acquire(self.store, target, Terms(self.settings.lease_seconds), self.logger)
        except MarinError as error:
            return f"kept: {str(error).splitlines()[0]}"
        try:
            whole = self._delete_leased(target, items, lease)
        except MarinError as error:
            return f"kept, at least in part: {str(error).splitlines()[0]}"
        finally:
            lease.release()
        if whole:
            self.store.remove(target, [NOTE])
            mirror.remove(target)
        return "deleted"

    def _is_needed(self, book: RecipeBook, target: Target) -> bool:
        """Of one target that we hold. Parts come by the thousand, and nothing else has to be asked for them."""
        if target.kind == PARTS:
            return is_kept(target, self.settings.keep) or self.parts.is_needed(book, target)
        return target in reachable(self.store, book, self.settings.keep, leased_by_us=target)

    def _delete_leased(self, target: Target, items: Sequence[Item], lease: Lease) -> bool:
        """Delete what is still not needed; True when nothing of the artifact is left.

        Raises:
            MarinError: it is needed again, or the lease was lost, or the store fails.
        """
        seen = {name: self.store.read(target, name) for name in (RECORD, ATTEMPT)}
        book = self._book()
        needed = self._is_needed(book, target)
        listing = self.store.listing(target)
        groups = _unneeded(Look(self.store, book), target, listing, ours=True) if needed else _all_of(target, listing)
        still = {name for names in groups.values() for name in names}
        names = [name for item in items for name in item.names if name in still]
        if not names and (needed or set(listing) - NEVER):
            raise LeasedError("it is needed again, or others lie there now")
        for name in (RECORD, ATTEMPT):
            if name in names:
                with lease.committing():
                    if not self.store.exchange(target, name, seen[name], None):
                        raise LeasedError("somebody else has changed it just now")
        rest = sorted(set(names) - {RECORD, ATTEMPT} - NEVER)
        for start in range(0, len(rest), REMOVED_AT_ONCE):
            lease.check()
            self.store.remove(target, rest[start : start + REMOVED_AT_ONCE])
        noted = parse_note(self.store.read(target, NOTE))
        _write_note(self.store, target, {name: seen for name, seen in noted.items() if name not in names})
        return not needed


def _shared(unneeded: Unneeded) -> Item:
    why = "no record and no unfinished work names it"
    return Item(None, "shared files", why, unneeded.names, unneeded.bytes, unneeded.seconds, unneeded.due)


def _write_note(store: Store, target: Target, seen: Mapping[str, Sighting]) -> None:
    if seen:
        store.replace(target, NOTE, note_bytes(seen))
    else:
        store.delete(target, NOTE)


# ---- what is not needed ----------------------------------------------------------------------------------------------

NEVER = frozenset({LEASE, LOCK, NOTE})
PROTOCOL = NEVER | {RECORD, ATTEMPT, LOGS}


def _all_of(target: Target, listing: Mapping[str, int]) -> Groups:
    names = sorted(name for name in listing if name not in NEVER) or sorted(listing)  # the rest of a killed deletion
    is_part = target.kind == PARTS
    why = "its set is finished, or has no recipe" if is_part else "no recipe, pin or needed record names it"
    return {("artifact", why): names} if names else {}


def _unneeded(look: Look, target: Target, listing: Mapping[str, int], *, ours: bool = False) -> Groups:
    """The files of an artifact that is needed which nothing needs. Where somebody is at work, or something has to be
    repaired or put in place first, nothing is said. Logs stay.
    """
    store = look.store
    if (not ours and holder(store, target)) or store.is_decided(target) or store.is_untidy(target):
        return {}
    try:
        record = read_record(store, target)
    except DamageError:
        return {}
    attempt = read_attempt(store, target)
    if record is None and attempt is None:
        return {}  # of unknown origin: it may be the only copy of something whose record was lost
    work = attempt if attempt and _is_unfinished(store, record, attempt) else None
    resumes = work is not None and _may_resume(look, work)
    recorded = _recorded(record)
    groups: Groups = {}
    for name in sorted(listing):
        if _is_protocol(name, record) or name in recorded:
            continue
        if work is not None and _is_of(name, work):
            if not resumes:
                why = "its recipe or what it is made from is another now, so that no build resumes it"
                groups.setdefault(("unfinished work", why), [ATTEMPT]).append(name)
        else:
            groups.setdefault(_described(name, record), []).append(name)
    return groups


def _is_unfinished(store: Store, record: Record | None, attempt: Attempt) -> bool:
    """True for what a build can go on with: of what is missing, beside what is finished, or to mend what is damaged."""
    if record is None or store.has_rebuild(record, attempt):
        return True
    return attempt.repairs is not None and attempt.token > record.provenance.get("token", 0)


def _may_resume(look: Look, work: Attempt) -> bool:
    """Work that is pinned, or was leased a moment ago, may have no recipe: then nobody can know."""
    try:
        return look.can_resume(work)
    except RecipeError:
        return True


def _is_protocol(name: str, record: Record | None) -> bool:
    """True for the small files and logs of an artifact; in an object store those of each build are in its folder."""
    first, *rest = name.split("/")
    if first != BUILDS or len(rest) < 2:
        return first in PROTOCOL
    is_of_record = record is not None and record.folder == f"{BUILDS}/{rest[0]}"
    return rest[1] == LOGS or (is_of_record and rest[1] in (RECORD, KEPT))


def _recorded(record: Record | None) -> set[str]:
    if record is None or record.external:
        return set()
    front = "" if record.folder == "." else f"{record.folder}/"
    return {f"{front}{entry['path']}" for entry in (*record.files, *record.lost) if not entry.get("pool")}


def _is_of(name: str, attempt: Attempt) -> bool:
    """True for a file where an attempt works."""
    if attempt.folder == ".":
        return name.partition("/")[0] not in (ASIDE, REBUILD, BUILDS)
    return name.startswith(f"{attempt.folder}/")


def _described(name: str, record: Record | None) -> tuple[str, str]:
    first = name.partition("/")[0]
    if first == ASIDE:
        return "set aside", "a build moved it out of its way"
    if first == REBUILD:
        return "abandoned rebuild", "no build resumes it"
    if first == BUILDS:
        return "replaced build", "another build has taken its place"
    if name.endswith(TEMPORARY):
        return "unfinished file", "its writer is gone"
    return "foreign file", "no record names it"
