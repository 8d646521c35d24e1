"""The files of a finished artifact, wherever they lie: in its folder, in a build of an object store, or outside."""

from __future__ import annotations

import contextlib
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
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
    """A folder. Links are followed as far as they stay `within` a folder; None: wherever they lead."""

    def __init__(self, folder: Path, within: Path | None = None) -> None:
        self.folder, self.shown = folder, str(folder)
        self._within = within
        self._inside = {""}
        """Folders and links that were found to be within it."""

    def size(self, name: str) -> int | None:
        path = f"{self.shown}/{name}"
        try:
            seen = os.lstat(path)
            self._refuse_link_out(name, stat.S_ISLNK(seen.st_mode))
            if stat.S_ISLNK(seen.st_mode):
                seen = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise MarinError(f"cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(seen.st_mode):
            raise MarinError("is not a plain file")
        return seen.st_size

    def open(self, name: str) -> RawIOBase:
        path = f"{self.shown}/{name}"
        self._refuse_link_out(name, os.path.islink(path))
        return open(path, "rb", buffering=0)

    def _refuse_link_out(self, name: str, is_link: bool) -> None:
        """Look where a file really lies: where its folder does, which is looked at once, or where the link leads."""
        place = name if is_link else name.rpartition("/")[0]
        if self._within is None or place in self._inside:
            return
        if first_link(self.folder, place) and not is_within(self.folder / name, self._within):
            raise MarinError(f"is a link out of the prefix, to {os.path.realpath(self.folder / name)}; {ADOPT}")
        self._inside.add(place)

    def list(self) -> dict[str, int]:
        return sizes_below(self.folder)


ADOPT = "data that lies elsewhere is taken in with: marin-build adopt"


def is_within(path: str | Path, folder: str | Path) -> bool:
    """Whether a path, once its links are followed, is that of `folder` or below it."""
    real, top = os.path.realpath(path), os.path.realpath(folder)
    return os.path.commonpath([real, top]) == top


def first_link(folder: Path, name: str) -> str | None:
    """The first part of a relative path below `folder` that is a link; None where none is."""
    path = ""
    for part in filter(None, name.split("/")):
        path = f"{path}/{part}" if path else part
        if os.path.islink(f"{folder}/{path}"):
            return path
    return None


def links_below(folder: Path, skip: frozenset[str]) -> Iterator[str]:
    """Relative paths of the links below a folder, without its top-level `skip`."""
    for base, folders, names in os.walk(folder):
        front = "" if base == str(folder) else f"{os.path.relpath(base, folder)}/"
        if not front:
            folders[:] = [name for name in folders if name not in skip]
        yield from (f"{front}{name}" for name in [*folders, *names] if os.path.islink(f"{base}/{name}"))


def sizes_below(folder: Path) -> dict[str, int]:
    """Bytes of every file below a folder, by relative path; nothing where there is no folder."""
    return {name: seen.st_size for name, seen in stats_below(folder)}


def stats_below(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """As `sizes_below`, all that the system says of each."""
    for base, _, names in os.walk(folder):
        front = "" if base == str(folder) else f"{os.path.relpath(base, folder)}/"
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # somebody removed it meanwhile
                yield f"{front}{name}", os.lstat(f"{base}/{name}")


def external_files(place: str) -> Files:
    """The files of an adopted artifact: in a folder, or below a URL."""
    if "://" not in place:
        return LocalFiles(Path(place))
    from marin_build.artifact.fsspec_bucket import open_bucket
    from marin_build.artifact.object_files import ObjectFiles

    return ObjectFiles(open_bucket(place), "")
