"""A local disk that actors share: every call of theirs that changes or reads names below the prefix is a step.

The calls are the real ones, on a folder in memory; they are intercepted where Python makes them. An audit hook of the
interpreter sees the same calls from below, so a call that goes around the interception fails the walk.
"""

from __future__ import annotations

import builtins
import fcntl
import hashlib
import io
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from explorer import Actor, Crashed, Process, attributes_replaced, current_actor

QUIET = frozenset({"stat", "lstat", "sync"})
"""Calls that are no step of their own: they happen together with the step before. Thorough walks pause before all."""

CALLS = (
    "open",
    "stat",
    "lstat",
    "listdir",
    "scandir",
    "mkdir",
    "rmdir",
    "unlink",
    "remove",
    "rename",
    "replace",
    "link",
)
EVENTS = frozenset(
    {"open", "os.listdir", "os.scandir", "os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link", "os.symlink"}
    | {"os.truncate", "os.chmod", "os.utime", "fcntl.flock", "fcntl.lockf", "os.chown"}
)

_real = {name: getattr(os, name) for name in CALLS}
_real_open, _real_fstat, _real_close, _real_flock = builtins.open, os.fstat, os.close, fcntl.flock


class _Entry:
    """A directory entry whose `stat` is seen; types come with the listing, as they do from the kernel."""

    def __init__(self, disk: Disk, entry: os.DirEntry[str], top: str) -> None:
        self.name, self.path, self._entry, self._disk, self._place = entry.name, entry.path, entry, disk, top
        self._folder = entry.is_dir(follow_symlinks=False)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._folder

    def is_symlink(self) -> bool:
        return self._entry.is_symlink()

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        label = f"{self._place}/{self.name}"
        return self._disk.step("lstat", label, lambda: self._entry.stat(follow_symlinks=follow_symlinks))


class _Listing(Iterator[_Entry]):
    """What `os.scandir` gives, in the order of the names."""

    def __init__(self, entries: list[_Entry]) -> None:
        self.names = [(entry.name, entry.is_dir()) for entry in entries]
        self._rest = iter(entries)

    def __next__(self) -> _Entry:
        return next(self._rest)

    def __enter__(self) -> _Listing:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    close = __exit__


class Disk:
    """The folder `prefix`, as `initial` was when this was made."""

    def __init__(self, prefix: Path, initial: Path, *, thorough: bool = False) -> None:
        self.prefix, self._initial, self._thorough = str(prefix), initial, thorough
        self._descriptors: dict[int, tuple[Process, str]] = {}
        self._held: set[int] = set()
        self._inside = 0

    # ---- what the explorer asks ----------------------------------------------------------------------------------

    def reset(self) -> None:
        for descriptor in list(self._descriptors):
            self._forget(descriptor)
            _real_close(descriptor)
        shutil.rmtree(self.prefix, ignore_errors=True)
        shutil.copytree(self._initial, self.prefix)

    def state(self) -> bytes:
        digest = hashlib.blake2b(digest_size=16)
        for path, content in self._walk(self.prefix):
            digest.update(repr((path.removeprefix(self.prefix), content)).encode())
        digest.update(repr(self._locks()).encode())
        return digest.digest()

    def crash(self, process: Process) -> None:
        for descriptor, (owner, _) in self._descriptors.items():
            if owner is process:
                _real_flock(descriptor, fcntl.LOCK_UN)
                self._held.discard(descriptor)

    def wake(self, actor: Actor) -> Callable[[], bool]:
        """When a sleeping actor has a reason to look again: the lock it wants is free, or the leases changed."""
        if actor.blocked_on is not None:
            path, actor.blocked_on = actor.blocked_on, None
            actor.observed = actor.before_lock
            return lambda: not self._is_locked(path)
        leases, living = self._leases(), self._living(actor)
        return lambda: (leases, living) != (self._leases(), self._living(actor))

    def _living(self, actor: Actor) -> list[str]:
        return [process.name for process in actor.run.processes.values() if process.alive]

    def _leases(self) -> list[tuple[str, bytes]]:
        return [(path, content) for path, content in self._walk(self.prefix) if path.endswith(".lease.json")]

    def _walk(self, top: str) -> Iterator[tuple[str, bytes]]:
        with _real["scandir"](top) as entries:
            found = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
        for name, is_folder in found:
            path = f"{top}/{name}"
            if is_folder:
                yield path, b"/"
                yield from self._walk(path)
            elif name != ".lock":
                yield path, _bytes(path)

    def _locks(self) -> list[tuple[str, int, bool]]:
        """Who has which lock file open, whether it is the one that the path names now, and who holds it."""
        numbers: dict[int, int] = {}
        found = []
        for descriptor, (process, path) in self._descriptors.items():
            if process.alive and path.endswith("/.lock"):
                inode = _real_fstat(descriptor).st_ino
                number = 0 if inode == _inode(path) else numbers.setdefault(inode, len(numbers) + 1)
                found.append((process.name, number, descriptor in self._held))
        return sorted(found)

    def _is_locked(self, path: str) -> bool:
        inode = _inode(path)
        return inode is not None and any(_real_fstat(descriptor).st_ino == inode for descriptor in self._held)

    # ---- interception ----------------------------------------------------------------------------------------------

    @contextmanager
    def intercepted(self) -> Iterator[None]:
        """While entered, calls of actors go through `step`."""
        calls = [(os, name, self._watching(name)) for name in CALLS if name != "open"]
        own = [
            (os, "open", self._os_open),
            (os, "close", self._close),
            (os, "fstat", self._fstat),
            (builtins, "open", self._open),
            (io, "open", self._open),
            (fcntl, "flock", self._flock),
        ]
        _audit_with(self._guard)
        try:
            with attributes_replaced(*calls, *own):
                yield
        finally:
            _audit_with(None)
            self.reset()

    def step(self, call: str, label: str, act: Callable[[], Any]) -> Any:
        """One call of an actor, with the pause before it and what it saw."""
        actor = current_actor()
        if actor is None:
            return act()
        if call in QUIET and not self._thorough:
            if actor.run.over or not actor.process.alive:
                raise Crashed
        else:
            actor.pause(f"{call} {label}")
        self._inside += 1
        try:
            result = act()
        except OSError as error:
            actor.note(call, label, error.errno)
            raise
        finally:
            self._inside -= 1
        actor.note(call, label, self._seen(actor, result))
        return result

    def _guard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and not self._inside and (actor := current_actor()) and not actor.run.over:
            place = str(arguments[0])
            if event.startswith("fcntl") or place.startswith(self.prefix):
                actor.run.violation = f"{actor.name}: {event} {place} goes around the explorer"

    def _seen(self, actor: Actor, result: Any) -> object:
        if isinstance(result, os.stat_result):
            same = [n for n, d in enumerate(self._own(actor)) if _real_fstat(d).st_ino == result.st_ino]
            return stat.S_IFMT(result.st_mode), result.st_size if stat.S_ISREG(result.st_mode) else 0, same
        if isinstance(result, _Listing):
            return result.names
        if isinstance(result, io.IOBase):
            return hashlib.blake2b(_content(result.fileno()), digest_size=8).hexdigest() if result.readable() else ""
        return "" if isinstance(result, int) else result

    def _own(self, actor: Actor) -> list[int]:
        return [descriptor for descriptor, (process, _) in self._descriptors.items() if process is actor.process]

    def _place(self, path: Any, dir_fd: int | None = None) -> str | None:
        """`path` as an absolute one; None where it is not below the prefix."""
        if isinstance(path, int):
            return self._descriptors[path][1] if path in self._descriptors else None
        text = os.fspath(path)
        if isinstance(text, bytes):
            return None
        if dir_fd is not None and not text.startswith("/"):
            top = self._place(dir_fd)
            return None if top is None else f"{top}/{text}"
        return text if text.startswith(f"{self.prefix}/") or text == self.prefix else None

    def _watching(self, name: str) -> Callable[..., Any]:
        real = _real[name]

        def call(*arguments: Any, **options: Any) -> Any:
            actor = current_actor()
            path = self._place(arguments[0] if arguments else ".", options.get("dir_fd"))
            if actor is None or path is None:
                return real(*arguments, **options)
            label = self._short(path)
            kind = name
            if name in ("rename", "replace", "link"):
                label += f" -> {self._short(str(arguments[1]))}"
            elif name in ("unlink", "remove") and path.endswith(".tmp"):
                kind = "sync"
            act = (lambda: self._scandir(*arguments)) if name == "scandir" else (lambda: real(*arguments, **options))
            result = self.step(kind, label, act)
            return sorted(result) if name == "listdir" else result

        return call

    def _scandir(self, path: Any = ".") -> _Listing:
        place = self._short(self._place(path) or "")
        with _real["scandir"](path) as entries:
            found = sorted(entries, key=lambda entry: str(entry.name))
            return _Listing([_Entry(self, entry, place) for entry in found])

    def _os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        actor, place = current_actor(), self._place(path, dir_fd)
        if actor is None or place is None or self._inside:  # inside: the `opener` of a call that is a step already
            return int(_real["open"](path, flags, mode, dir_fd=dir_fd))
        if place.endswith("/.lock"):
            actor.observed = actor.before_lock
        quiet = flags & os.O_DIRECTORY or dir_fd is not None
        kind = "sync" if quiet else "open"
        descriptor = int(self.step(kind, self._short(place), lambda: _real["open"](path, flags, mode, dir_fd=dir_fd)))
        self._descriptors[descriptor] = (actor.process, place)
        return descriptor

    def _open(self, path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        place = None if isinstance(path, int) else self._place(path)
        if current_actor() is None or place is None:
            return _real_open(path, mode, *arguments, **options)
        quiet = place.endswith(".log") and "r" not in mode
        kind = "sync" if quiet else "read" if "r" in mode else "open"
        return self.step(kind, self._short(place), lambda: _real_open(path, mode, *arguments, **options))

    def _fstat(self, descriptor: int) -> os.stat_result:
        actor, result = current_actor(), _real_fstat(descriptor)
        if actor is not None and descriptor in self._descriptors:
            actor.note("fstat", self._seen(actor, result))
        return result

    def _close(self, descriptor: int) -> None:
        self._forget(descriptor)
        _real_close(descriptor)

    def _forget(self, descriptor: int) -> None:
        self._descriptors.pop(descriptor, None)
        self._held.discard(descriptor)

    def _flock(self, descriptor: int, operation: int) -> None:
        actor = current_actor()
        if actor is None or descriptor not in self._descriptors:
            return _real_flock(descriptor, operation)
        path = self._descriptors[descriptor][1]
        call = "unlock" if operation & fcntl.LOCK_UN else "lock"
        try:
            self.step(call, self._short(path), lambda: _real_flock(descriptor, operation))
        except BlockingIOError:
            actor.blocked_on = path
            raise
        if call == "lock":
            self._held.add(descriptor)
        else:
            self._held.discard(descriptor)
        return None

    def _short(self, path: str) -> str:
        return path.removeprefix(self.prefix).lstrip("/") or "."


def _bytes(path: str) -> bytes:
    descriptor = _real["open"](path, os.O_RDONLY)
    try:
        return _content(descriptor)
    finally:
        _real_close(descriptor)


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, _real_fstat(descriptor).st_size, 0)


def _inode(path: str) -> int | None:
    try:
        return int(_real["stat"](path).st_ino)
    except FileNotFoundError:
        return None


_auditor: Callable[[str, tuple[Any, ...]], None] | None = None
_is_hooked = False


def _audit_with(auditor: Callable[[str, tuple[Any, ...]], None] | None) -> None:
    """An audit hook stays for good, so there is one for all walks."""
    global _auditor, _is_hooked
    _auditor = auditor
    if not _is_hooked:
        _is_hooked = True
        sys.addaudithook(lambda event, arguments: _auditor(event, arguments) if _auditor else None)
