"""Places of source files: on a disk of this machine, or in a store that fsspec knows; hub files are in `hub`.

Whoever reads a source file opens its place and sees bytes that can be read from anywhere in them.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Union, cast

import xxhash

from marin_build.artifact.fsspec_bucket import open_bucket
from marin_build.artifact.object_files import ObjectFiles
from marin_build.data.globs import WILDCARD, Glob
from marin_build.errors import MarinError, RequestError

STORED_BUFFER_BYTES = 8 << 20
"""Of a file in a store, asked for at once."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")


class Remote(Protocol):
    """A file that is not on a disk of this machine; may be sent to another process."""

    @property
    def name(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    def open(self) -> BinaryIO: ...


Place = Union[Path, Remote]


@dataclass(frozen=True)
class StoredFile:
    """An object below a prefix, such as gs://bucket/folder."""

    prefix: str
    key: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.prefix}/{self.key}"

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    def open(self) -> BinaryIO:
        """The object, asked for in large parts, each again where the trouble may pass.

        Raises:
            OSError: it is not there.
            MarinError: the store cannot be reached, or refuses.
        """
        return BufferedReader(_files(self.prefix).open(self.key), STORED_BUFFER_BYTES)


def is_url(text: str) -> bool:
    return bool(_URL.match(text)) and not text.startswith("file://")


def open_place(place: Place) -> BinaryIO:
    """A source file for reading; unbuffered where it is on a disk."""
    return cast(BinaryIO, open(place, "rb", buffering=0)) if isinstance(place, Path) else place.open()


def size_of(place: Place) -> int:
    if not isinstance(place, Path):
        return place.bytes
    try:
        return place.stat().st_size
    except OSError as error:
        raise unreadable(error, place, 0) from error


def unreadable(error: OSError, place: Place, at_byte: int) -> MarinError:
    """The error for a source file that the system will not read; a failing disk may get better, the rest will not."""
    kind = RequestError if isinstance(error, PermissionError | FileNotFoundError | IsADirectoryError) else MarinError
    return kind(f"source file {place} cannot be read at byte {at_byte:,}: {error.strerror or error}")


def hasher(digest: str, size: int) -> Any:
    """What computes a digest of this form: xxh3_128, or what hubs say of their files, SHA-256 or git's of a blob."""
    if len(digest) == 64:
        return hashlib.sha256()
    if len(digest) == 40:
        return hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    return xxhash.xxh3_128()


# ---- finding in stores -----------------------------------------------------------------------------------------------


def stored_matches(pattern: str) -> list[tuple[str, StoredFile]]:
    """(name below the fixed part, file) of the objects that a URL or a glob with one means, sorted by name.

    Raises:
        RequestError: the URL names no bucket, or no installed package understands it.
        MarinError: the store cannot be reached, or refuses.
    """
    fixed = WILDCARD.split(pattern, maxsplit=1)[0]
    prefix = fixed.rpartition("/")[0]
    if prefix.endswith("/") or "://" not in prefix:
        raise RequestError(f"source path {pattern!r} names no bucket without a glob; write PROTOCOL://BUCKET/FILES")
    rest = pattern[len(prefix) + 1 :]
    try:
        files = _files(prefix)
    except RequestError as error:
        raise RequestError(f"source path {pattern!r}: {error}") from None
    if fixed == pattern:
        size = files.size(rest)
        return [] if size is None else [(rest, StoredFile(prefix, rest, size))]
    glob = Glob(rest)
    listed = files.list().items()
    found = [(name, size) for name, size in listed if glob.matches(name) and not _is_hidden(name, rest)]
    return [(name, StoredFile(prefix, name, size)) for name, size in sorted(found)]


def _is_hidden(name: str, pattern: str) -> bool:
    """As on a disk: a name with a dot before it is meant only by a pattern with one; an empty name is a folder's."""
    return name.endswith("/") or (not pattern.startswith(".") and any(p.startswith(".") for p in name.split("/")))


@lru_cache(maxsize=32)
def _files(prefix: str) -> ObjectFiles:
    return ObjectFiles(open_bucket(prefix), "")
