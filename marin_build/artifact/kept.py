"""What an attempt on an object store has kept: a chain of small lists, `.kept/00000000.json`, `00000001.json`, …

Each list says what was added and what was let go since the one before, and is written after the objects that it names;
no listing of the store is asked. Only the attempt itself writes them, so whoever takes over reads a chain that ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any

from marin_build.artifact.bodies import check, kept_entry
from marin_build.artifact.bucket import THREADS, Bucket, at_once
from marin_build.artifact.digest import body_checksum
from marin_build.artifact.store import KEPT
from marin_build.errors import DamageError

Entries = dict[str, Mapping[str, Any]]


def chain_key(folder: str, number: int) -> str:
    return f"{folder}/{KEPT}/{number:08d}.json"


def write_link(
    bucket: Bucket, folder: str, number: int, added: Iterable[Mapping[str, Any]], gone: Iterable[str]
) -> None:
    body = {"files": [dict(entry) for entry in added], "gone": sorted(gone)}
    bucket.put(chain_key(folder, number), json.dumps({**body, "checksum": body_checksum(body)}).encode())


def is_begun(bucket: Bucket, folder: str) -> bool:
    return bucket.size(chain_key(folder, 0)) is not None


def read_chain(bucket: Bucket, folder: str, listed: int = 0) -> Entries:
    """The entries of the files that an attempt kept, by path.

    Raises:
        DamageError: fewer lists than are `listed` can be read.
    """
    kept: Entries = {}
    for first in count(0, THREADS):
        numbers = range(first, first + THREADS)
        for number, data in enumerate(at_once(lambda number: bucket.get(chain_key(folder, number))[0], numbers), first):
            link = _link(data)
            if link is None and number < listed:
                raise DamageError(f"{bucket.shown}/{chain_key(folder, number)} cannot be read")
            if link is None:
                return kept
            for path in link["gone"]:
                kept.pop(path, None)
            kept |= {entry["path"]: entry for entry in link["files"] if _is_plain(entry)}
    raise AssertionError("unreachable")


def _is_plain(entry: Mapping[str, Any]) -> bool:
    """Whether it leads nowhere but into the folder of its build, or into the pool."""
    try:
        check(kept_entry, entry)
    except ValueError:
        return False
    return True


def _link(data: bytes | None) -> dict[str, Any] | None:
    """What a list says; None for what is no list: the chain ends before it."""
    try:
        body = json.loads(data or b"null")
        checksum = body.pop("checksum")
        return body if checksum == body_checksum(body) else None
    except (ValueError, AttributeError, KeyError):
        return None
