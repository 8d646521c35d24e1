"""The store: artifacts `{prefix}/{name}/{version}`, and the few small files of each that decide what is true.

All that builders and readers share goes through the class `Store`. `open_store` picks the kind: a folder on a local or
shared disk (`local_store.py`), or an object store. What differs between them is behind it: how small files are compared
and swapped, where an attempt works, and how its files become an artifact. A small file is replaced atomically and
durably: a reader sees the old bytes or the new ones.
"""

from __future__ import annotations

import contextlib
import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from marin_build.errors import MarinError, RequestError
from marin_build.recipe.target import Target
from marin_build.settings import OBJECT_CACHE

if TYPE_CHECKING:
    import logging

    from marin_build.artifact.attempt import Attempt
    from marin_build.artifact.files import Files
    from marin_build.artifact.pool import Pool
    from marin_build.artifact.record import Record
    from marin_build.artifact.work import Work

RECORD = ".artifact.json"
ATTEMPT = ".attempt.json"
LEASE = ".lease.json"
LOCK = ".lock"
NOTE = ".gc.json"
"""What housekeeping found that nobody needs, and since when."""
REBUILD = ".rebuild"
ASIDE = ".aside"
LOGS = "logs"
BUILDS = "builds"
"""On an object store: the folder of all builds of an artifact, each in one of its own."""
KEPT = ".kept"
"""On an object store: in the folder of a build, the lists of what it has kept so far."""
TEMPORARY = ".tmp"
"""Ending of files that a writer has not finished; they are never part of an artifact."""

OWN_NAMES = frozenset({RECORD, ATTEMPT, LEASE, LOCK, NOTE, REBUILD, ASIDE, KEPT})
"""Top-level names of an artifact's folder that belong to the protocol and not to the artifact."""

FULL = (errno.ENOSPC, errno.EDQUOT)
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENAMETOOLONG)


def open_store(prefix: str | Path, cache: str | Path = OBJECT_CACHE) -> Store:
    """The store of a prefix: a folder, or the URL of an object store, for example gs://bucket/artifacts.

    Raises:
        RequestError: a URL that no installed package understands, or one with a password in it.
    """
    if "://" in str(prefix) and not str(prefix).startswith("file://"):
        from marin_build.artifact.fsspec_bucket import open_bucket
        from marin_build.artifact.object_store import ObjectStore

        return ObjectStore(open_bucket(str(prefix)), cache)
    from marin_build.artifact.local_store import LocalStore

    return LocalStore(str(prefix).removeprefix("file://"), cache)


@dataclass(frozen=True)
class Held:
    """A file that takes room for a target, or shares that of another."""

    name: str
    """Relative to the target's folder; in the pool, the key of the object."""
    bytes: int
    key: Hashable
    """Tells what is there once, under however many names."""
    names: int = 1
    """How many names the bytes have, as far as the store knows by itself."""


class Store(ABC):
    """The artifacts below one prefix."""

    place: str
    """The prefix, for messages."""
    parallel = 1
    """How many small requests at once pay off."""
    fences_by_lock = True
    """Whether a look at the lease inside the lock is what guards a commit; else the exchange that seals it does."""

    # ---- small files -------------------------------------------------------------------------------------------------

    @abstractmethod
    def read(self, target: Target, name: str) -> bytes | None:
        """The bytes of a small file, or None where there is none.

        Raises:
            MarinError: it is there but cannot be read.
        """

    @abstractmethod
    def replace(self, target: Target, name: str, data: bytes) -> None:
        """Write a small file: all of it or nothing, and durable on return.

        Raises:
            RequestError: the folder cannot be written to.
            MarinError: the disk is full, or fails.
        """

    @abstractmethod
    def exchange(self, target: Target, name: str, expected: bytes | None, data: bytes | None) -> bool:
        """Write a small file if it is as `expected`, as one step; None stands for no file. False when it is not.

        Raises:
            RequestError, MarinError: see `replace`.
        """

    @abstractmethod
    def delete(self, target: Target, name: str) -> None:
        """Remove a small file, durably; nothing happens where there is none."""

    @abstractmethod
    def lock(self, target: Target) -> AbstractContextManager[None]:
        """Hold the target's short-term lock, where the store has one: several `exchange` inside are one step.

        Raises:
            LeasedError: somebody else kept it for too long.
        """

    def create(self, target: Target, name: str, data: bytes) -> bool:
        """Write a small file unless there is one: True for exactly one of any number of callers with bytes of their
        own."""
        return self.exchange(target, name, None, data)

    @abstractmethod
    def shown(self, target: Target, name: str = "") -> str:
        """Where an artifact, or a file of it, lies: for messages."""

    # ---- finished artifacts ------------------------------------------------------------------------------------------

    @abstractmethod
    def files(self, record: Record) -> Files:
        """The files that a record names, wherever they lie."""

    @abstractmethod
    def fetch(self, record: Record) -> Path:
        """A local folder that holds the files that a record names.

        Raises:
            DamageError: one is missing, or is not as recorded.
        """

    @abstractmethod
    def foreign(self, record: Record) -> list[str]:
        """Files in the artifact's own folder that the record does not name: relative paths, sorted."""

    # ---- unfinished ones ---------------------------------------------------------------------------------------------

    @abstractmethod
    def has_work(self, target: Target, attempt: Attempt | None) -> bool:
        """True when there is something that `attempt` made, or, where there is none, of unknown origin."""

    @abstractmethod
    def has_rebuild(self, record: Record, attempt: Attempt) -> bool:
        """True when `attempt` works beside the finished artifact of `record`, and has not taken its place."""

    @abstractmethod
    def is_decided(self, target: Target) -> bool:
        """True when a finished build waits to be put in place; `settle` does that."""

    @abstractmethod
    def is_untidy(self, target: Target) -> bool:
        """True when a builder was killed after its artifact was in place and before it had tidied up."""

    @abstractmethod
    def settle(self, target: Target, sealed: str | None) -> None:
        """Put a finished build in place whose builder did not come to it, and remove what killed writers left.

        For whoever is about to take the lease, inside the lock. `sealed` is the attempt that the lease of now says is
        finished. Every step can be repeated.
        """

    @abstractmethod
    def last_lines(self, attempt: Attempt, count: int) -> tuple[str, list[str]]:
        """Where the log of an attempt lies, for messages, and its last lines."""

    # ---- attempts ----------------------------------------------------------------------------------------------------
    # Each writes the attempt `new`, completed with its folder. The lease must be held.

    @abstractmethod
    def resume(self, new: Attempt, there: Attempt) -> Work:
        """Go on with the work of `there`."""

    @abstractmethod
    def rebuild(self, new: Attempt) -> Work:
        """Build from nothing; the finished artifact stays until the new one takes its place."""

    @abstractmethod
    def start_anew(self, new: Attempt, logger: logging.Logger, *, keep: bool) -> Work:
        """Build from nothing where nothing is finished; with `keep`, what is there is set aside, else dropped."""

    @abstractmethod
    def repair(self, new: Attempt, there: Attempt | None, record: Record | None, bad: Iterable[str]) -> Work:
        """Go on with the files of a damaged artifact, without those that are `bad`."""

    # ---- housekeeping ------------------------------------------------------------------------------------------------

    @abstractmethod
    def named(self, kind: str | None = None) -> list[Target]:
        """Every target, of one kind or of all, that has a folder, sorted by name; little may be left in some."""

    def targets(self) -> list[Target]:
        """Every target with a record, an attempt or files, sorted by name."""
        return [target for target in self.named() if self.listing(target)]

    @abstractmethod
    def listing(self, target: Target) -> dict[str, int]:
        """Bytes of every file below the folder of `target`, by relative path; those of the protocol included."""

    pool: Pool | None = None
    """What artifacts share, where the store keeps it apart."""

    def pool_names_of(self, target: Target) -> set[str]:
        """Names in the pool of all that the record and the attempts of a target name.

        Raises:
            DamageError: one of them cannot be read.
            RequestError: a newer version of the program wrote the record.
        """
        return set()

    @abstractmethod
    def held(self, target: Target) -> list[Held]:
        """Every file below the folder of `target`, and on an object store what it names in the pool, each once."""

    @abstractmethod
    def remove(self, target: Target, names: Iterable[str]) -> None:
        """Remove files below the folder of `target`, and the folders that this leaves empty."""


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
