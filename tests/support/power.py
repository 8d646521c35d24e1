"""A power cut, simulated: what would be on the disk if only what was synced, or part of the rest, had survived.

A file keeps the bytes of its last fsync; a folder keeps the names of its last fsync, or has those of the moment,
without their bytes. Files are told apart by inode, so that a renamed file keeps its bytes. Assumed: a rename is there
or not in both of its folders, as journaling file systems have it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from artifact_world import watched

Names = dict[str, tuple[int, bool]]
"""Name → inode, and whether it is a folder."""


class PowerMeter:
    """Follows what a process makes durable below one folder, and keeps the disk of every moment that differs."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self._bytes: dict[int, bytes] = {}
        self._names: dict[int, Names] = {}
        self.moments: list[Moment] = []
        for base, _, files in os.walk(top):  # what was there before is on the disk
            self._names[os.stat(base).st_ino] = names_in(base)
            self._bytes.update({(path := Path(base, name)).stat().st_ino: path.read_bytes() for name in files})
        self._keep()

    @contextmanager
    def watching(self) -> Iterator[None]:
        real = os.fsync

        def fsync(descriptor: int) -> None:
            real(descriptor)
            path, number = os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_ino
            if path.startswith(str(self.top)):
                if os.path.isdir(path):
                    self._names[number] = names_in(path)
                else:
                    self._bytes[number] = Path(path).read_bytes()
                self._keep()

        os.fsync = fsync
        try:
            with watched(self._see):
                yield
        finally:
            os.fsync = real
        self._keep()

    def _see(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name in ("rename", "replace", "link", "unlink", "mkdir", "rmdir"):
            self._keep()

    def _keep(self) -> None:
        moment = Moment(os.stat(self.top).st_ino, dict(self._bytes), dict(self._names), current(self.top))
        if not self.moments or moment != self.moments[-1]:
            self.moments.append(moment)


def names_in(folder: str | Path) -> Names:
    with os.scandir(folder) as entries:
        return {entry.name: (entry.inode(), entry.is_dir(follow_symlinks=False)) for entry in entries}


def current(top: Path) -> dict[int, Names]:
    return {os.stat(base).st_ino: names_in(base) for base, _, _ in os.walk(top)}


class Moment:
    """The durable bytes and names of one moment, and the names that were not durable yet."""

    def __init__(self, top: int, synced: dict[int, bytes], durable: dict[int, Names], now: dict[int, Names]) -> None:
        self.top, self.synced, self.durable, self.now = top, synced, durable, now

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Moment) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def restore(self, to: Path, *, keep_names: bool) -> None:
        """Write the disk after a cut into the folder `to`; names that were not synced are lost, or kept."""
        shutil.rmtree(to)
        self._folder(self.top, to, self.now if keep_names else self.durable)

    def _folder(self, number: int, to: Path, names: dict[int, Names]) -> None:
        to.mkdir()
        for name, (inode, is_folder) in names.get(number, {}).items():
            if is_folder:
                self._folder(inode, to / name, names)
            else:
                (to / name).write_bytes(self.synced.get(inode, b""))
