"""The files of a finished artifact, wherever they lie: in its folder, in a build of an object store, or outside."""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Sequence
from io import RawIOBase
from pathlib import Path

from marin_build.errors import MarinError


class Files(ABC):
    """Files below one place, by relative path."""

    shown: str
    """The place, for messages."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none.

        Raises:
            MarinError: there is something that is no plain file, or cannot be looked at.
        """

    def sizes(self, names: Sequence[str]) -> dict[str, int | MarinError | None]:
        """`size` of each of many, or its error."""
        found: dict[str, int | MarinError | None] = {}
        for name in names:
            try:
                found[name] = self.size(name)
            except MarinError as error:
                found[name] = error
        return found

    @abstractmethod
    def open(self, name: str) -> RawIOBase:
        """A file for reading from its start.

        Raises:
            OSError: it is not there or cannot be read.
        """

    @abstractmethod
    def list(self) -> dict[str, int]:
        """Bytes of every file below the place."""


class LocalFiles(Files):
    """A folder. Links are followed: who moves shards to another disk and leaves links has lost nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.shown = folder, str(folder)

    def size(self, name: str) -> int | None:
        try:
            seen = os.stat(f"{self.shown}/{name}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise MarinError(f"cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(seen.st_mode):
            raise MarinError("is not a plain file")
        return seen.st_size

    def open(self, name: str) -> RawIOBase:
        return open(f"{self.shown}/{name}", "rb", buffering=0)

    def list(self) -> dict[str, int]:
        return sizes_below(self.folder)


def sizes_below(folder: Path) -> dict[str, int]:
    """Bytes of every file below a folder, by relative path; nothing where there is no folder."""
    found: dict[str, int] = {}
    for base, _, names in os.walk(folder):
        front = "" if base == str(folder) else f"{os.path.relpath(base, folder)}/"
        found |= {f"{front}{name}": os.lstat(f"{base}/{name}").st_size for name in names}
    return found
