"""Files that appear whole or not at all, under a name that a killed writer cannot spoil.

A file is written beside its place as `NAME.tmp`, made durable and then renamed. The name is fixed, so that the next
attempt finds what a killed one left. `shutil` and `Path.write_bytes` promise none of this.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from marin_build.artifact.store import TEMPORARY, disk_error, make_folder, sync_folder


def temporary_of(path: Path) -> Path:
    return path.with_name(path.name + TEMPORARY)


@contextlib.contextmanager
def explained(path: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn what the system says about writing `path` into an error for people.

    Raises:
        RequestError: the place cannot be written to.
        MarinError: the disk is full, or fails.
    """
    try:
        yield
    except OSError as error:
        raise disk_error(error, path, needed_bytes) from error


@contextlib.contextmanager
def writing(temporary: Path) -> Iterator[BinaryIO]:
    """A new file at `temporary`, durable at the end of the block.

    An older file of that name is unlinked, not overwritten: a writer of an earlier attempt that still lives keeps its
    own inode and cannot mix its bytes with ours.
    """
    make_folder(temporary.parent)
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    with open(temporary, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def commit(path: Path) -> None:
    """Give the finished temporary file of `path` its name, durably."""
    with explained(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)  # of nobody: the name is the file's
        os.replace(temporary_of(path), path)
        sync_folder(path.parent)


def write_whole(path: Path, data: bytes) -> None:
    """Write a small file: all of it or nothing.

    Raises:
        RequestError: the place cannot be written to.
        MarinError: the disk is full, or fails.
    """
    with explained(path, len(data)), writing(temporary_of(path)) as file:
        file.write(data)
    commit(path)


def json_bytes(value: Any, indent: int | None = None) -> bytes:
    """The same bytes for equal values: sorted keys, UTF-8, one newline at the end."""
    separators = (",", ":") if indent is None else None
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, indent=indent, separators=separators)
    return text.encode() + b"\n"


def remove(path: Path) -> None:
    """Remove a file that may not be there, durably."""
    with explained(path):
        try:
            path.unlink()
        except FileNotFoundError:
            return
        sync_folder(path.parent)
