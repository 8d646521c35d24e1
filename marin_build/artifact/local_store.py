"""The store on a local or shared disk: an attempt works in the artifact's own folder.

A small file is written beside its place and renamed; a kernel lock makes reading, deciding and writing one step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from marin_build.artifact.attempt import Attempt, write_attempt
from marin_build.artifact.attempt_log import last_lines
from marin_build.artifact.files import (
    ADOPT,
    Files,
    LocalFiles,
    external_files,
    first_link,
    is_within,
    sizes_below,
    stats_below,
)
from marin_build.artifact.local_work import LocalWork, without_links
from marin_build.artifact.record import Record
from marin_build.artifact.store import (
    ASIDE,
    ATTEMPT,
    LOCK,
    LOGS,
    OWN_NAMES,
    REBUILD,
    RECORD,
    TEMPORARY,
    Held,
    Store,
    disk_errors,
    make_folder,
    sweep,
    sync_folder,
)
from marin_build.artifact.work import Work
from marin_build.artifact.workspace import (
    discard,
    has_files,
    is_half_moved,
    put_in_place,
    remove,
    set_aside,
    staged_record,
    work_names,
)
from marin_build.errors import DamageError, LeasedError, MarinError, RequestError
from marin_build.recipe.target import KINDS, Target, is_target, parse_target
from marin_build.settings import OBJECT_CACHE

MAX_PREFIX_BYTES = 3584
"""Linux takes paths of 4,095 bytes: this leaves 511 for the target and the names of its files."""
LOCK_WAIT_SECONDS = 20.0
LOCK_POLL_SECONDS = 0.005
MAX_SMALL_BYTES = 1 << 30
"""Of a small file: a record of a million files has a fifth of it."""


class LocalStore(Store):
    """The artifacts below one folder."""

    def __init__(self, prefix: str | Path, cache: str | Path = OBJECT_CACHE) -> None:
        self.prefix = Path(prefix).expanduser().absolute()
        if (size := len(os.fsencode(self.prefix))) > MAX_PREFIX_BYTES:
            raise RequestError(
                f"the prefix is a path of {size:,} bytes; at most {MAX_PREFIX_BYTES:,} leave room for names"
            )
        self.place = str(self.prefix)
        self._cache = Path(cache).expanduser().absolute()
        """Where files that an adopted artifact has elsewhere are brought."""
        self._held: set[tuple[int, int, Target]] = set()
        """Locks that are held, by process, thread and target."""

    def folder(self, target: Target) -> Path:
        return self.prefix / target.name / target.version

    def shown(self, target: Target, name: str = "") -> str:
        return str(self.folder(target) / name)

    # ---- small files -------------------------------------------------------------------------------------------------

    def read(self, target: Target, name: str) -> bytes | None:
        path = f"{self.prefix}/{target}/{name}"
        try:
            with open(path, "rb", buffering=0, opener=_no_link) as file:
                self._refuse_link_out(target, name)
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_SMALL_BYTES:
                    raise DamageError(f"{target} is damaged: {path} is no plain file, or too large")
                return file.readall()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except IsADirectoryError:
            return b""  # unreadable, like any other damage
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return None
            if error.errno == errno.ELOOP:
                raise DamageError(f"{target} is damaged: {path} is a link\n  put the file itself there") from None
            raise MarinError(f"{path}: cannot be read: {error.strerror}") from error

    def _refuse_link_out(self, target: Target, name: str = "") -> None:
        """Raise DamageError where a link leads from the folder of a target, or of a file in it, out of the prefix."""
        link = first_link(self.prefix, f"{target}/{name}".rpartition("/")[0])
        if link and not is_within(place := self.prefix / link, self.prefix):
            raise DamageError(
                f"{target} is damaged: {place} leads out of the prefix, to {os.path.realpath(place)}\n"
                f"  remove the link; {ADOPT}"
            )

    def replace(self, target: Target, name: str, data: bytes) -> None:
        path = self.folder(target) / name
        self._refuse_link_out(target, name)
        with disk_errors(path, len(data)), _temporary(path, data) as temporary:
            _set_folder_aside(path)
            os.replace(temporary, path)
            sync_folder(path.parent)

    def exchange(self, target: Target, name: str, expected: bytes | None, data: bytes | None) -> bool:
        with self.lock(target):
            if self.read(target, name) != expected:
                return False
            if data is None:
                self.delete(target, name)
            else:
                self.replace(target, name, data)
            return True

    def delete(self, target: Target, name: str) -> None:
        path = self.folder(target) / name
        self._refuse_link_out(target, name)
        with disk_errors(path, 0):
            _set_folder_aside(path)
            try:
                os.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                return
            sync_folder(path.parent)

    @contextlib.contextmanager
    def lock(self, target: Target) -> Iterator[None]:
        """Hold the target's lock; inside a block that holds it already, nothing happens.

        It is a kernel lock, so it ends with its process. The lease, not the lock, guards the long work.

        Raises:
            LeasedError: somebody else kept it for LOCK_WAIT_SECONDS.
        """
        key = (os.getpid(), threading.get_ident(), target)
        if key in self._held:
            yield
            return
        path = self.folder(target) / LOCK
        self._refuse_link_out(target)
        with disk_errors(path, 0):
            make_folder(path.parent)
            descriptor = _locked(path, target)
        self._held.add(key)
        try:
            yield
        finally:
            self._held.discard(key)
            # Unlinked while it is held: whoever waits for this inode sees that the path moved on, and opens it anew.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    # ---- finished artifacts ------------------------------------------------------------------------------------------

    def files(self, record: Record) -> Files:
        if record.external:
            return external_files(record.external)
        return LocalFiles(self.folder(record.target) / record.folder, self.prefix)

    def fetch(self, record: Record) -> Path:
        files = self.files(record)
        if isinstance(files, LocalFiles):
            return files.folder
        from marin_build.artifact.object_files import fetched

        return fetched(files, record, self._cache / "external" / str(record.target))

    def foreign(self, record: Record) -> list[str]:
        known = set() if record.external else {entry["path"] for entry in (*record.files, *record.lost)}
        skip = OWN_NAMES - {ASIDE} | {LOGS}
        return sorted(
            path
            for path in sizes_below(self.folder(record.target))
            if path not in known
            and path.partition("/")[0] not in skip
            and ("/" in path or not path.endswith(TEMPORARY))
        )

    # ---- unfinished ones ---------------------------------------------------------------------------------------------

    def has_work(self, target: Target, attempt: Attempt | None) -> bool:
        return has_files(self.folder(target) / (attempt.folder if attempt else "."))

    def has_rebuild(self, record: Record, attempt: Attempt) -> bool:
        is_begun = attempt.folder == REBUILD and attempt.id != record.provenance.get("attempt")
        return is_begun and (self.folder(record.target) / REBUILD).is_dir()

    def is_decided(self, target: Target) -> bool:
        return (self.folder(target) / REBUILD).is_dir() and staged_record(self, target) is not None

    def is_untidy(self, target: Target) -> bool:
        return is_half_moved(self, target)

    def settle(self, target: Target, sealed: str | None) -> None:
        with disk_errors(self.folder(target)):
            sweep(self.folder(target))
        put_in_place(self, target)

    def last_lines(self, attempt: Attempt, count: int) -> tuple[str, list[str]]:
        path = self.folder(attempt.target) / LOGS / f"{attempt.id}.log"
        return str(path), last_lines(path, count)

    # ---- attempts ----------------------------------------------------------------------------------------------------

    def resume(self, new: Attempt, there: Attempt) -> Work:
        return without_links(self._work(new, there.folder))

    def rebuild(self, new: Attempt) -> Work:
        """Build in `.rebuild`; the finished artifact stays."""
        self.delete(new.target, ATTEMPT)
        remove(self.folder(new.target) / REBUILD)
        return without_links(self._work(new, REBUILD))

    def start_anew(self, new: Attempt, logger: logging.Logger, *, keep: bool) -> Work:
        """Build in the folder itself. The attempt goes before its work: half-removed work belongs to no recipe."""
        target, main = new.target, self.folder(new.target)
        self.delete(target, ATTEMPT)
        self.delete(target, RECORD)
        remove(main / REBUILD)
        if not keep:
            discard(main)
        elif aside := set_aside(main, work_names(main)):
            logger.warning("%s: older work was moved to %s", target, aside)
        return without_links(self._work(new, "."))

    def repair(self, new: Attempt, there: Attempt | None, record: Record | None, bad: Iterable[str]) -> Work:
        """Make it unfinished again, without its damaged files, in the folder that it is in."""
        main = self.folder(new.target)
        work = self._work(new, there.folder if there and record is None else ".")
        set_aside(main, [name for name in bad if os.path.lexists(main / name)])
        if work.folder == main:
            self.delete(new.target, RECORD)
        return without_links(work)

    def _work(self, new: Attempt, folder: str) -> LocalWork:
        attempt = dataclasses.replace(new, folder=folder)
        write_attempt(self, attempt)
        make_folder(self.folder(new.target) / folder)
        return LocalWork(self, attempt)

    # ---- housekeeping ------------------------------------------------------------------------------------------------

    def named(self, kind: str | None = None) -> list[Target]:
        """The folders of artifacts themselves, which may hold many files, are not listed."""
        found, todo = [], [kind] if kind else list(KINDS)
        while todo:
            folder = todo.pop()
            if is_target(folder):
                found.append(parse_target(folder))
            elif not os.path.islink(self.prefix / folder):
                todo += [f"{folder}/{name}" for name in _folders_in(self.prefix / folder)]
        return sorted(found)

    def listing(self, target: Target) -> dict[str, int]:
        return sizes_below(self.folder(target))

    def held(self, target: Target) -> list[Held]:
        return [
            Held(name, seen.st_size, (seen.st_dev, seen.st_ino), seen.st_nlink)
            for name, seen in stats_below(self.folder(target))
        ]

    def remove(self, target: Target, names: Iterable[str]) -> None:
        self._refuse_link_out(target)
        for name in names:
            path = self.folder(target) / (first_link(self.folder(target), name) or name)
            with disk_errors(path):
                path.unlink(missing_ok=True)
                if path.parent.is_dir():
                    sync_folder(path.parent)
                with contextlib.suppress(OSError):  # not empty
                    for folder in path.relative_to(self.prefix).parents[:-1]:
                        (self.prefix / folder).rmdir()


def _folders_in(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:  # there is none, or it may not be read
        return []


def _no_link(path: str, flags: int) -> int:
    """Opens a file that is no link itself, and waits for nobody: a pipe is looked at, not listened to."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


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


def _set_folder_aside(path: Path) -> None:
    """Move a folder that lies where a small file belongs to `.aside`: it is nobody's."""
    if path.is_dir() and not path.is_symlink():
        set_aside(path.parent, [path.name])


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
