"""When housekeeping first saw that nobody needs a file: the notes `.gc.json`, one for each artifact and for the pool.

Time counts by the clock since the machine started, which nobody sets; across machines or restarts, where only the time
of day is left, CLOCK_MARGIN_SECONDS of it do not count.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from marin_build.artifact.owner import boot_id

DAY = 86400.0
CLOCK_MARGIN_SECONDS = 4 * DAY
"""Two clocks that are each wrong by two days, in opposite directions."""


@dataclass(frozen=True)
class Sighting:
    """When a file was first seen not to be needed, by two clocks, and its size then: what still grows is new."""

    boot: str
    boot_seconds: float
    wall_seconds: float
    bytes: int

    @classmethod
    def now(cls, size: int) -> Sighting:
        clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
        return cls(boot_id(), time.clock_gettime(clock), time.time(), size)

    def seconds_until(self, now: Sighting) -> float:
        if self.boot and self.boot == now.boot:
            return max(0.0, now.boot_seconds - self.boot_seconds)
        return max(0.0, now.wall_seconds - self.wall_seconds - CLOCK_MARGIN_SECONDS)


def seen_now(names: Iterable[str], listing: Mapping[str, int], noted: Mapping[str, Sighting]) -> dict[str, Sighting]:
    """A sighting of each file: the noted one where it still is as it was then, else a new one."""
    now, seen = Sighting.now(0), {}
    for name in names:
        old, size = noted.get(name), listing[name]
        seen[name] = old if old and old.bytes == size else dataclasses.replace(now, bytes=size)
    return seen


def ages(seen: Mapping[str, Sighting]) -> dict[str, float]:
    """Seconds since each."""
    now = Sighting.now(0)
    return {name: sighting.seconds_until(now) for name, sighting in seen.items()}


def parse_note(data: bytes | None) -> dict[str, Sighting]:
    """Sightings by file; nothing where the note is unreadable: then all are new."""
    found: dict[str, Sighting] = {}
    try:
        for entry in json.loads(data or b"[]"):
            stamp = str(entry["boot"]), float(entry["boot_seconds"]), float(entry["wall_seconds"])
            found |= {str(name): Sighting(*stamp, int(size)) for name, size in entry["files"].items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}
    return found


def note_bytes(seen: Mapping[str, Sighting]) -> bytes:
    """Files that were first seen together share one entry."""
    together: dict[tuple[str, float, float], dict[str, int]] = {}
    for name, sighting in seen.items():
        stamp = (sighting.boot, sighting.boot_seconds, sighting.wall_seconds)
        together.setdefault(stamp, {})[name] = sighting.bytes
    keys = ("boot", "boot_seconds", "wall_seconds", "files")
    body = [dict(zip(keys, (*stamp, files), strict=True)) for stamp, files in together.items()]
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
