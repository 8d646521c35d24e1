"""Files below one folder of a bucket, and how one of them is brought to a local disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from io import RawIOBase
from pathlib import Path
from typing import Any

import xxhash

from marin_build.artifact.bucket import Bucket, at_once
from marin_build.artifact.digest import root_digest
from marin_build.artifact.files import Files, LocalFiles
from marin_build.artifact.pool import pooled
from marin_build.artifact.record import Record
from marin_build.artifact.store import LOGS, TEMPORARY, disk_errors, make_folder
from marin_build.errors import DamageError, MarinError

CHUNK_BYTES = 16 << 20
LISTED_FROM = 8
"""From this many files on, one listing is asked before each file."""
DOWNLOADS = 3
"""So often a file is downloaded that does not come out as recorded."""


class ObjectFiles(Files):
    """The objects below the folder `front` of a bucket, but for those of `entries` that lie in its pool."""

    def __init__(self, bucket: Bucket, front: str, entries: Iterable[Mapping[str, Any]] = ()) -> None:
        self._bucket, self._front, self._pooled = bucket, front, pooled(entries)
        self.shown = f"{bucket.shown}/{front}" if front else bucket.shown

    def key(self, name: str) -> str:
        return self._pooled.get(name) or (f"{self._front}/{name}" if self._front else name)

    def size(self, name: str) -> int | None:
        return self._bucket.size(self.key(name))

    def sizes(self, names: Sequence[str]) -> dict[str, int | MarinError | None]:
        """A listing may be stale: what it does not show is asked for by name."""
        found: dict[str, int | MarinError | None] = {}
        for listed in at_once(self._listed, self._by_folder(names)):
            found |= listed
        rest = [name for name in names if name not in found]
        if rest:
            found |= zip(rest, at_once(self._size_or_error, rest), strict=True)
        return {name: found[name] for name in names}

    def _by_folder(self, names: Sequence[str]) -> list[tuple[str, list[str]]]:
        """Folders that are worth a listing, each with the names whose objects it holds."""
        folders: dict[str, list[str]] = {}
        for name in names:
            folder = self._pooled[name].rpartition("/")[0] if name in self._pooled else self._front
            folders.setdefault(folder, []).append(name)
        return [(folder, inside) for folder, inside in folders.items() if len(inside) >= LISTED_FROM]

    def _listed(self, folder_and_names: tuple[str, list[str]]) -> dict[str, int]:
        folder, names = folder_and_names
        front, listed = f"{folder}/" if folder else "", self._bucket.listing(folder)
        keys = {name: self.key(name).removeprefix(front) for name in names}
        return {name: listed[key] for name, key in keys.items() if key in listed}

    def _size_or_error(self, name: str) -> int | MarinError | None:
        try:
            return self.size(name)
        except MarinError as error:
            return error

    def open(self, name: str) -> RawIOBase:
        size = self.size(name)
        if size is None:
            raise FileNotFoundError(2, os.strerror(2), f"{self.shown}/{name}")
        return _Reader(self._bucket, self.key(name), size)

    def list(self) -> dict[str, int]:
        return self._bucket.listing(self._front)

    def download(self, entry: Mapping[str, Any], path: Path) -> str | None:
        """Bring the file of `entry` to `path`, where it appears whole; what is wrong with it, or None.

        A file that is not as recorded is there nevertheless; one that is missing is not.
        """
        problem: str | None = None
        for _ in range(DOWNLOADS):
            try:
                seen = self._download(entry["path"], path)
            except FileNotFoundError:
                return "missing"
            if seen == (entry["bytes"], entry["xxh3_128"]):
                return None
            problem = (
                f"has {seen[0]:,} bytes of xxh3_128 {seen[1]} instead of {entry['bytes']:,} of {entry['xxh3_128']}"
            )
        return problem

    def _download(self, name: str, path: Path) -> tuple[int, str]:
        temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
        digest, count = xxhash.xxh3_128(), 0
        with disk_errors(path), self.open(name) as source:
            make_folder(path.parent)
            with open(temporary, "wb") as file:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    count += file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        return count, digest.hexdigest()


class _Reader(RawIOBase):
    """An object as a file; a part that comes back short is asked for again, and the end is where its size says."""

    def __init__(self, bucket: Bucket, key: str, size: int) -> None:
        self._bucket, self._key, self._size, self._at = bucket, key, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._size - self._at)
        if wanted <= 0:
            return 0
        data = self._bucket.read(self._key, self._at, wanted)
        if not data:
            raise OSError(5, f"the store gives nothing from byte {self._at:,} of {self._size:,}")
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def fetched(files: Files, record: Record, cache: Path) -> Path:
    """A folder in `cache` with the files of a record, without its logs; those that are there already are kept.

    Each was compared with the record when it came; what is there is looked at by its size.

    Raises:
        DamageError: one is missing in the store, or is not as recorded.
    """
    assert isinstance(files, ObjectFiles)
    entries = [entry for entry in record.files if not entry["path"].startswith(f"{LOGS}/")]
    folder = cache / root_digest(entries)
    here = LocalFiles(folder).sizes([entry["path"] for entry in entries])
    missing = [entry for entry in entries if here[entry["path"]] != entry["bytes"]]
    for entry, problem in zip(missing, at_once(lambda e: files.download(e, folder / e["path"]), missing), strict=True):
        if problem and entry.get("outside_digest"):
            continue  # what it tells of its making is no reason to stop
        if problem:
            (folder / entry["path"]).unlink(missing_ok=True)
            raise DamageError(
                f"{record.target} is damaged: {files.shown}/{entry['path']}: {problem}\n  snakemake {record.target}"
            )
    folder.mkdir(parents=True, exist_ok=True)
    return folder
