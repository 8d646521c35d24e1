"""The pool of an object store: files that several artifacts share, each there once.

    .pool/<first 2 digits>/<xxh3_128>-<bytes>

An entry of a record, or of what an attempt has kept, says `pool: true`; where the object lies follows from its digest
and size alone, so no entry can lead anywhere else. An object that is whole is never written over, and only housekeeping
removes one: when no record and no attempt of any target has named it for the grace period.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

POOL = ".pool"

Entry = Mapping[str, Any]


def pool_key(entry: Entry) -> str:
    """The key of the object with the bytes of an entry, whose form was checked."""
    digest = entry["xxh3_128"]
    return f"{POOL}/{digest[:2]}/{digest}-{entry['bytes']}"


def pooled(entries: Iterable[Entry]) -> dict[str, str]:
    """By path, the keys of those of `entries` that lie in the pool."""
    return {entry["path"]: pool_key(entry) for entry in entries if entry.get("pool")}
