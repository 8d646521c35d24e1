"""Content hashes: of one file, of many files, and the root that names a whole artifact.

xxh3 finds accidents, not attackers. The root covers (path, bytes, hash) of every file, in the order of the paths.
"""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import RawIOBase
from pathlib import Path
from typing import Any

import xxhash

from marin_build.artifact.bodies import NO_FILE_NAME, is_file_name
from marin_build.artifact.store import TEMPORARY
from marin_build.errors import MarinError

CHUNK_BYTES = 4 << 20
MAX_THREADS = 8
"""Hashing runs at memory speed, so more threads than this only queue for the disk."""


def hash_bytes(data: bytes) -> str:
    """32 hex digits, xxh3_128."""
    return xxhash.xxh3_128_hexdigest(data)


def body_checksum(body: Mapping[str, Any]) -> str:
    """Hash of a body as JSON with sorted keys and no spaces, so that it survives re-indentation."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hash_bytes(text.encode("utf-8", "surrogatepass"))


def hash_file(path: str | Path, *, sync: bool = False) -> tuple[int, str]:
    """(bytes, 32 hex digits of xxh3_128) of a file, in constant memory; with `sync`, it is durable on return.

    Raises:
        MarinError: it cannot be read, naming file and offset.
    """
    return hash_stream(lambda: open(path, "rb", buffering=0), str(path), sync=sync)


def hash_stream(open_file: Callable[[], RawIOBase], shown: str, *, sync: bool = False) -> tuple[int, str]:
    """As `hash_file`, of the file that `open_file` opens."""
    digest, count, buffer = xxhash.xxh3_128(), 0, _buffer()
    try:
        with open_file() as file:
            while read := file.readinto(buffer):
                digest.update(buffer[:read])
                count += read
            if sync:
                os.fsync(file.fileno())
    except OSError as error:
        raise MarinError(f"{shown}: cannot be read at byte {count:,}: {error.strerror or error}") from error
    return count, digest.hexdigest()


_of_thread = threading.local()


def _buffer() -> memoryview:
    """One for each thread: making a new one takes longer than to hash a small file."""
    if not hasattr(_of_thread, "buffer"):
        _of_thread.buffer = memoryview(bytearray(CHUNK_BYTES))
    found: memoryview = _of_thread.buffer
    return found


def file_entry(path: str | Path, *, below: str | Path | None = None, sync: bool = False) -> dict[str, Any]:
    """What a record says of a file: `path` (relative to the folder `below`, else the name), `bytes`, `xxh3_128`."""
    count, digest = hash_file(path, sync=sync)
    name = Path(path).relative_to(below).as_posix() if below is not None else Path(path).name
    return {"path": name, "bytes": count, "xxh3_128": digest}


def file_entries(folder: Path, names: Iterable[str], *, sync: bool = False) -> list[dict[str, Any]]:
    """An entry for each file of `folder` named by its relative path, in the order given; several are read at once."""

    def entry(name: str) -> dict[str, Any]:
        return file_entry(folder / name, below=folder, sync=sync)

    listed = list(names)
    threads = min(MAX_THREADS, len(listed), len(os.sched_getaffinity(0)))
    if threads < 2:
        return [entry(name) for name in listed]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(entry, listed))


def root_digest(entries: Iterable[Mapping[str, Any]]) -> str:
    """32 hex digits over path, bytes and hash of all `entries`, whatever their order."""
    lines = sorted((entry["path"], entry["bytes"], entry["xxh3_128"]) for entry in entries)
    return hash_bytes(json.dumps(lines, separators=(",", ":"), ensure_ascii=False).encode())


def list_files(folder: Path, *, skip: frozenset[str] = frozenset()) -> list[str]:
    """Relative paths of all files below `folder`, sorted; without unfinished `.tmp` files and the top-level `skip`.

    Raises:
        MarinError: something that is no plain file or folder, or a name that no record can hold.
    """
    return sorted(_walk(folder, "", skip))


def _walk(folder: Path, front: str, skip: frozenset[str]) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            name = f"{front}{entry.name}"
            if entry.name.endswith(TEMPORARY) or name in skip:
                continue
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                yield from _walk(Path(entry.path), f"{name}/", skip)
            elif not stat.S_ISREG(mode):
                raise MarinError(f"{entry.path}: is a link or a special file; an artifact holds plain files only")
            elif not is_file_name(name):
                raise MarinError(f"{entry.path!a}: {NO_FILE_NAME}")
            else:
                yield name
