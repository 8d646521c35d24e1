"""Housekeeping of the pool: an object goes when nothing has named it for the grace period, and nothing does so now.

What names an object is a record, or what an attempt has kept: any attempt whose build is still there, whoever holds the
lease. While one of these cannot be read, nobody can know what it names, and the pool is left alone. See decision 0019
for what may still happen between the last look and the deletion.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from marin_build.artifact.bucket import at_once
from marin_build.artifact.lease import Sign, parse_lease
from marin_build.artifact.sightings import DAY, ages, note_bytes, parse_note, seen_now
from marin_build.artifact.store import LEASE, Store
from marin_build.errors import DamageError, MarinError
from marin_build.recipe.target import Target

REMOVED_AT_ONCE = 100
LOOK_SECONDS = 60.0
"""So long a look at what is named is good for deleting by it."""


@dataclass(frozen=True)
class Unneeded:
    """Objects of the pool that nothing names."""

    names: tuple[str, ...]
    bytes: int
    seconds: float
    due: bool


@dataclass(frozen=True)
class PoolSweeper:
    """One call of `marin-build gc`, as far as the pool is concerned."""

    store: Store
    grace_seconds: float
    logger: logging.Logger

    def look(self) -> list[Unneeded]:
        """What nothing names, apart by whether it is due; notes what is new, and forgets what is named again."""
        pool = self.store.pool
        listing = pool.listing() if pool else {}
        if pool is None or not listing:
            return []
        try:
            named = self._named()
        except DamageError as error:
            self.logger.warning("the files that artifacts share are left alone: %s", error)
            return []
        noted = parse_note(pool.read_note())
        seen = seen_now(sorted(listing.keys() - named), listing, noted)
        if seen != noted:
            try:
                pool.write_note(note_bytes(seen) if seen else None)
            except MarinError as error:
                self.logger.warning("what was found in the pool could not be noted: %s", error)
        return self._by_due(ages(seen), listing)

    def _by_due(self, seconds: dict[str, float], listing: dict[str, int]) -> list[Unneeded]:
        grace = self._grace_seconds()
        found = []
        for due in (True, False):
            if names := tuple(name for name, age in seconds.items() if (age >= grace) is due):
                size, oldest = sum(listing[name] for name in names), max(seconds[name] for name in names)
                found.append(Unneeded(names, size, oldest, due))
        return found

    def _grace_seconds(self) -> float:
        """At least a day while somebody builds: what nothing names may have been brought a moment ago."""
        return max(self.grace_seconds, DAY) if self._is_somebody_at_work() else self.grace_seconds

    def delete(self, names: Sequence[str]) -> str:
        """Delete those of `names` that still nothing names; what came of it."""
        pool = self.store.pool
        if pool is None or not names:
            return ""
        named, looked, kept = self._named_or_all(names), time.monotonic(), 0
        for start in range(0, len(names), REMOVED_AT_ONCE):
            if time.monotonic() - looked > LOOK_SECONDS:
                named, looked = self._named_or_all(names), time.monotonic()
            batch = [name for name in names[start : start + REMOVED_AT_ONCE] if name not in named]
            kept += len(names[start : start + REMOVED_AT_ONCE]) - len(batch)
            pool.remove(batch)
        listing, noted = pool.listing(), parse_note(pool.read_note())
        left = {name: sighting for name, sighting in noted.items() if name in listing}
        pool.write_note(note_bytes(left) if left else None)
        return f"deleted, but for {kept:,} files that are named again, or may be" if kept else "deleted"

    def _named_or_all(self, names: Sequence[str]) -> set[str]:
        """All of `names` where it cannot be known, or somebody has begun to build for whom the grace was too short."""
        try:
            named = self._named()
        except MarinError as error:
            self.logger.warning("the files that artifacts share are left alone: %s", error)
            return set(names)
        pool = self.store.pool
        assert pool is not None
        seconds = ages(parse_note(pool.read_note()))
        grace = self._grace_seconds()
        return named | {name for name in names if seconds.get(name, 0.0) < grace}

    def _named(self) -> set[str]:
        """The objects that a record, or an attempt, names.

        Raises:
            DamageError: one cannot be read.
            RequestError: a newer version of the program wrote a record.
        """
        return set().union(*at_once(self.store.pool_names_of, self.store.named()))

    def _is_somebody_at_work(self) -> bool:
        return any(at_once(self._is_leased, self.store.named()))

    def _is_leased(self, target: Target) -> bool:
        data = self.store.read(target, LEASE)
        lease = parse_lease(data)
        return data is not None and (lease is None or lease.sign() is not Sign.dead)
