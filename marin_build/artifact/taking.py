"""A file of one artifact as a file of another, on a disk: both names lead to the same bytes, which are there once.

A hard link where the file system has them between the two places, else a reflink (a copy that shares its blocks until
one is written), else a copy. Whichever it is: the bytes are hashed, the file appears whole, and nothing is written
through a name that is there already. Nobody may write into a finished file in place: every writer of this package
makes a new file and renames it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import FileIO, RawIOBase
from pathlib import Path
from typing import Any

from marin_build.artifact.digest import CHUNK_BYTES, MAX_THREADS, hash_file
from marin_build.artifact.files import Files, LocalFiles, first_link
from marin_build.artifact.store import TEMPORARY, disk_errors, make_folder
from marin_build.errors import MarinError

Entry = Mapping[str, Any]

FICLONE = 0x40049409
"""The request that makes a reflink (linux/fs.h)."""
_NO_LINK = (
    errno.EXDEV,  # on another file system, or another mount of it
    errno.EMLINK,  # it has as many names as the file system allows: ext4 65,000
    errno.EPERM,  # not ours (fs.protected_hardlinks), or a file system without hard links
    errno.EACCES,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
)


def take_files(
    donor: Files, entries: Iterable[Entry], folder: Path, go_on: Callable[[], None], *, link: bool
) -> set[str]:
    """Make the files of `entries` files of `folder`, under the same names; returns the names of those that now are.

    One that is missing, cannot be read or has other bytes is left out. A power cut may take the names away again: what
    commits the files makes names last. With `link`, hard links may be made: for what
    nobody else writes to. `go_on` is called before each file, and may raise.

    Raises:
        MarinError: the disk is full, or fails.
        RequestError: `folder` cannot be written to.
    """

    def take(entry: Entry) -> bool:
        go_on()
        return _take(donor, entry, folder, link=link)

    listed = list(entries)
    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
        return {entry["path"] for entry, is_taken in zip(listed, pool.map(take, listed), strict=True) if is_taken}


def _take(donor: Files, entry: Entry, folder: Path, *, link: bool) -> bool:
    """First under a name that is nobody's, where it is compared, so that what is taken is what was compared."""
    name, path = entry["path"], folder / entry["path"]
    temporary = path.parent / f".{secrets.token_hex(8)}{TEMPORARY}"
    with disk_errors(path, entry["bytes"]):
        make_folder(path.parent)
        try:
            if not (link and _linked(donor, name, temporary)) and not _copied(donor, name, temporary):
                return False
            if not _is(temporary, entry):
                return False
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)  # of nobody: the name is the file's
            os.replace(temporary, path)
            return True
        finally:
            temporary.unlink(missing_ok=True)  # it stays where both names were links to the same file already


def _is(path: Path, entry: Entry) -> bool:
    if path.stat().st_size != entry["bytes"]:
        return False
    try:
        return hash_file(path) == (entry["bytes"], entry["xxh3_128"])
    except MarinError:  # as unreadable under its other name
        return False


def _linked(donor: Files, name: str, temporary: Path) -> bool:
    """True when `temporary` is a further name of the donor's file; links on the way to it are followed by no link."""
    if not isinstance(donor, LocalFiles) or first_link(donor.folder, name):
        return False
    try:
        os.link(donor.folder / name, temporary, follow_symlinks=False)
    except OSError as error:
        if error.errno in (*_NO_LINK, errno.ENOENT, errno.ENOTDIR):
            return False
        raise OSError(error.errno, error.strerror, str(temporary)) from error
    if stat.S_ISREG(temporary.lstat().st_mode):
        return True
    temporary.unlink()
    return False


def _copied(donor: Files, name: str, temporary: Path) -> bool:
    """True when `temporary` is a copy, which shares its blocks where the file system can; False where nothing is to
    be read."""
    try:
        if donor.size(name) is None:
            return False
        source = donor.open(name)
    except (OSError, MarinError):
        return False
    with source, open(temporary, "xb", buffering=0) as copy:
        is_whole = isinstance(donor, LocalFiles) and _cloned(source.fileno(), copy.fileno())
        if not is_whole and not _poured(source, copy):
            return False
        os.fsync(copy.fileno())
        return True


def _poured(source: RawIOBase, copy: FileIO) -> bool:
    """Copy all bytes; False where they cannot be read."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while True:
        try:
            count = source.readinto(buffer)
        except (OSError, MarinError):
            return False
        if not count:
            return True
        view = buffer[:count]
        while view:
            view = view[copy.write(view) :]


def _cloned(source: int, copy: int) -> bool:
    try:
        fcntl.ioctl(copy, FICLONE, source)
    except OSError:
        return False
    return True
