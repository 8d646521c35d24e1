"""Notes of the digests of files that were found to be the pinned ones, so that the next job need not hash them all.

A note proves itself: the digests in it give the pinned one. That a file still has the bytes is seen when it is read,
which compares them again; a file that was written since, or has another size, makes its note worth nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marin_build.artifact.strict_json import parse_object
from marin_build.data.durable import json_bytes, write_whole
from marin_build.data.places import Place, size_of
from marin_build.errors import MarinError

MIN_BYTES = 256 << 20
"""Less is hashed in a moment."""


def noted(cache: str, pinned: str, found: Sequence[tuple[str, Place]]) -> list[str] | None:
    """The digest of each file, of an earlier job; None: there is no note for these files."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        note = parse_object(_path(cache, pinned).read_bytes())
        if note["files"] == _seen(found):
            return [str(digest) for digest in note["digests"]]
    return None


def note(cache: str, pinned: str, found: Sequence[tuple[str, Place]], digests: Sequence[str]) -> None:
    """Keep the digests, where that is worth it and can be done."""
    if sum(size_of(place) for _, place in found) < MIN_BYTES:
        return
    with contextlib.suppress(MarinError):
        write_whole(_path(cache, pinned), json_bytes({"files": _seen(found), "digests": list(digests)}))


def _seen(found: Sequence[tuple[str, Place]]) -> list[Any]:
    return [[name, str(place), size_of(place), _written(place)] for name, place in found]


def _written(place: Place) -> int | None:
    """When a file on a disk was last written; stores keep no such thing for all."""
    return place.stat().st_mtime_ns if isinstance(place, Path) else None


def _path(cache: str, pinned: str) -> Path:
    return Path(os.path.expanduser(cache)) / "pins" / f"{pinned}.json"
