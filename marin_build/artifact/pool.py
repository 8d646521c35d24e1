"""The pool of an object store: files that several artifacts share, each there once.

    .pool/<first 2 digits>/<xxh3_128>-<bytes>

An entry of a record, or of what an attempt has kept, says `pool: true`; where the object lies follows from its digest
and size alone, so no entry can lead anywhere else. An object that is whole is never written over, and only housekeeping
removes one: when no record and no attempt of any target has named it for the grace period.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from marin_build.artifact.bucket import Bucket, at_once
from marin_build.artifact.store import NOTE

POOL = ".pool"

Entry = Mapping[str, Any]


def pool_key(entry: Entry) -> str:
    """The key of the object with the bytes of an entry, whose form was checked."""
    digest = entry["xxh3_128"]
    return f"{POOL}/{digest[:2]}/{digest}-{entry['bytes']}"


def pooled(entries: Iterable[Entry]) -> dict[str, str]:
    """By path, the keys of those of `entries` that lie in the pool."""
    return {entry["path"]: pool_key(entry) for entry in entries if entry.get("pool")}


class Pool:
    """The pool of a bucket, for housekeeping; names are keys without the first folder."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def listing(self) -> dict[str, int]:
        """Bytes of every object, by name."""
        return {name: size for name, size in self._bucket.listing(POOL).items() if name != NOTE}

    def remove(self, names: Iterable[str]) -> None:
        at_once(lambda name: self._bucket.delete(f"{POOL}/{name}"), names)

    def read_note(self) -> bytes | None:
        return self._bucket.get(f"{POOL}/{NOTE}")[0]

    def write_note(self, data: bytes | None) -> None:
        if data is None:
            self._bucket.delete(f"{POOL}/{NOTE}")
        else:
            self._bucket.put(f"{POOL}/{NOTE}", data)


def pool_names(entries: Iterable[Entry]) -> set[str]:
    """The names in the pool that `entries` refer to."""
    return {key.removeprefix(f"{POOL}/") for key in pooled(entries).values()}


def pool_bytes(name: str) -> int:
    """The size of the object of a name."""
    return int(name.rpartition("-")[2])
