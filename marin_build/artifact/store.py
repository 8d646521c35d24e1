"""The store: folders `{prefix}/{name}/{version}`, and the few small files in them that decide what is true.

Everything small goes through this class, so another kind of store needs only these methods. Here is the local disk.
A small file is replaced atomically and durably: a reader sees the old bytes or the new ones, also after a power cut.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from marin_build.errors import LeasedError, MarinError, RequestError
from marin_build.recipe.target import Target

RECORD = ".artifact.json"
ATTEMPT = ".attempt.json"
LEASE = ".lease.json"
LOCK = ".lock"
REBUILD = ".rebuild"
ASIDE = ".aside"
LOGS = "logs"
TEMPORARY = ".tmp"
"""Ending of files that a writer has not finished; they are never part of an artifact."""

OWN_NAMES = frozenset({RECORD, ATTEMPT, LEASE, LOCK, REBUILD, ASIDE})
"""Top-level names of an artifact's folder that belong to the protocol and not to the artifact."""

LOCK_WAIT_SECONDS = 20.0
LOCK_POLL_SECONDS = 0.005

FULL = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG)


class Store:
    """The artifacts below one prefix on a local or shared disk."""

    def __init__(self, prefix: str | Path) -> None:
        if "://" in str(prefix):
            raise RequestError(
                f"prefix {str(prefix)!r}: object stores are not supported yet; needs a folder on a local or shared disk"
            )
        self.prefix = Path(prefix).expanduser().absolute()

    def folder(self, target: Target) -> Path:
        return self.prefix / target.name / target.version

    def read(self, target: Target, name: str) -> bytes | None:
        """The bytes of a small file, or None where there is none.

        Raises:
            MarinError: it is there but cannot be read.
        """
        path = f"{self.prefix}/{target}/{name}"
        try:
            with open(path, "rb", buffering=0) as file:
                return file.readall()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return None
            raise MarinError(f"{path}: cannot be read: {error.strerror}") from error

    def replace(self, target: Target, name: str, data: bytes) -> None:
        """Write a small file: all of it or nothing, and durable on return.

        Raises:
            RequestError: the folder cannot be written to.
            MarinError: the disk is full, or fails.
        """
        path = self.folder(target) / name
        with disk_errors(path, len(data)), _temporary(path, data) as temporary:
            os.replace(temporary, path)
            sync_folder(path.parent)

    def create(self, target: Target, name: str, data: bytes) -> bool:
        """Write a small file unless there is one: True for exactly one of any number of callers."""
        path = self.folder(target) / name
        with disk_errors(path, len(data)), _temporary(path, data) as temporary:
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            sync_folder(path.parent)
            return True

    def delete(self, target: Target, name: str) -> None:
        """Remove a small file, durably; nothing happens where there is none."""
        path = self.folder(target) / name
        with disk_errors(path, 0):
            try:
                os.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                return
            sync_folder(path.parent)

    @contextlib.contextmanager
    def lock(self, target: Target) -> Iterator[None]:
        """Hold the target's short-term lock: for reading, deciding and writing small files as one step.

        It is a kernel lock, so it ends with its process. The lease, not the lock, guards the long work.

        Raises:
            LeasedError: somebody else kept it for LOCK_WAIT_SECONDS.
        """
        path = self.folder(target) / LOCK
        with disk_errors(path, 0):
            make_folder(path.parent)
            descriptor = _locked(path, target)
        try:
            yield
        finally:
            # Unlinked while it is held: whoever waits for this inode sees that the path moved on, and opens it anew.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _locked(path: Path, target: Target) -> int:
    deadline = time.monotonic() + LOCK_WAIT_SECONDS
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise LeasedError(f"{target} is locked by another process: {path}\n  try again in a moment") from None
            time.sleep(LOCK_POLL_SECONDS)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _temporary(path: Path, data: bytes) -> Iterator[Path]:
    """A durable file beside `path` with these bytes; gone at the end unless it was renamed."""
    make_folder(path.parent)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        yield temporary
    finally:
        with contextlib.suppress(OSError):  # renamed, or never made
            os.unlink(temporary)


def make_folder(path: Path) -> None:
    """Make a folder and those above it; a folder that was made survives a power cut."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    sync_folder(path.parent)


def sweep(folder: Path) -> None:
    """Remove the small files that killed writers of this folder left unfinished."""
    for name in os.listdir(folder):
        if name.startswith(".") and name.endswith(TEMPORARY):
            (folder / name).unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Make what was created, renamed or removed in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_errors(path: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Say for people what the system says about `path`.

    Raises:
        RequestError: it cannot be written to.
        MarinError: the disk is full, or fails.
    """
    try:
        yield
    except OSError as error:
        raise disk_error(error, path, needed_bytes) from error


def disk_error(error: OSError, path: str | Path, needed_bytes: int | None = None) -> MarinError:
    """Say for people what the system said about a file: what failed, where, and how much space is missing."""
    place = str(error.filename or path)
    if error.errno in FULL:
        free, block = _free_bytes(Path(place))
        needed = f"{needed_bytes:,} bytes needed" if needed_bytes else f"at least {free + block:,} bytes needed"
        return MarinError(
            f"the disk is full: {place}: {needed}, {free:,} free\n"
            "  free some space and run the same command again: what was done is kept"
        )
    if error.errno in _UNWRITABLE:
        return RequestError(f"cannot write {place}: {error.strerror}")
    return MarinError(f"{place}: {error.strerror or error}")


def _free_bytes(path: Path) -> tuple[int, int]:
    """Bytes that this user may still write on the disk of `path`, and of how many it gives at least."""
    while not path.exists() and path != path.parent:
        path = path.parent
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize, status.f_frsize
