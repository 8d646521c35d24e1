"""What a builder is given and what it gives back: the one interface between the truth and the work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marin_build.artifact.donors import none_is_there
from marin_build.artifact.record import Record
from marin_build.errors import RequestError
from marin_build.recipe.schema import Recipe
from marin_build.recipe.target import Target
from marin_build.settings import Settings


@dataclass(frozen=True)
class Dependency:
    """A finished artifact that a build reads."""

    target: Target
    folder: Path
    record: Mapping[str, Any]
    """Its record, as in `.artifact.json`."""


@dataclass(frozen=True)
class BuildContext:
    """One attempt at one target, with its lease held. A builder writes below `folder` and nowhere else."""

    target: Target
    recipe: Recipe
    fingerprint: str
    folder: Path
    """Where to write. What an earlier attempt of the same fingerprint left here is to be resumed."""
    logs: Path
    """Where to write what helps to explain a failure, beside the log of the attempt."""
    dependencies: Mapping[str, Dependency]
    """By target as written in the recipe; validation sets included."""
    settings: Settings
    logger: logging.Logger
    """Goes to the terminal and to `logs/<attempt>.log` of the artifact."""
    stop_requested: Callable[[], bool]
    """True after the first SIGTERM or Ctrl-C, or once the lease is lost: save and raise Stopped soon."""
    check_lease: Callable[[], None]
    """Raises LeasedError when another builder has taken over: call before committing anything."""
    keep: Callable[..., None] = lambda names, dropped=(), shared=False: None
    """`keep(names, dropped=(), shared=False)`: make finished files or folders last, by relative path, so that another
    machine could go on from them, and let others go. `shared` files may become files of other artifacts, too. On a
    disk nothing is to do. See `work.Work.keep`."""
    others: Callable[[str], Iterator[Record]] = lambda kind: iter(())
    """`others(kind)`: the records of all finished artifacts of a kind but this one, by name."""
    read: Callable[[Record, str], bytes] = none_is_there
    """`read(record, name)`: the bytes of a small file of a finished artifact. Raises DamageError where it is not as
    recorded."""
    take: Callable[[Record, Sequence[str]], set[str]] = lambda record, names: set()
    """`take(record, names)`: make files of another finished artifact files of this build, under the same names, without
    copying their bytes. Returns the names that now are; what is missing or not as recorded is left out. On a disk they
    lie in `folder` then, maybe as hard links, so never write into a file there: make a new one and rename it. On an
    object store they are taken by reference and do not lie in `folder`; `BuildResult.made` names them all the same."""
    forced: str | None = None
    """The id of the run that has it made from nothing although it was finished or begun; None: nobody does."""
    must_resume: bool = False
    """True when it was finished once and is being repaired: a checkpoint then never starts from nothing."""


@dataclass(frozen=True)
class Adopted:
    """Files that lie somewhere and are to become an artifact. The module of each kind has a function `check_adopted`,
    which reads them, writes nothing, and says in a BuildResult what they are."""

    target: Target
    recipe: Recipe
    fingerprint: str
    folder: Path
    """A local folder that holds them."""
    files: Sequence[str]
    """Their relative paths."""
    dependencies: Mapping[str, Record]
    """By target as written in the recipe."""
    place: str
    """Where they lie, for messages."""
    fetch: Callable[[Record], Path]
    """`fetch(record)`: a local folder with the files of a dependency."""

    def refused(self, problem: object) -> RequestError:
        return RequestError(f"{self.target}: {self.place} cannot be adopted: {problem}")


@dataclass(frozen=True)
class BuildResult:
    """What a builder made."""

    metrics: Mapping[str, float | int | str] = field(default_factory=dict)
    """The final value of each metric; goes into the record."""
    made: tuple[str, ...] | None = None
    """The files (relative paths, or folders ending in '/') that are the artifact. Whatever else lies in the folder is
    foreign: it stays there and is no part of it. None: everything."""
    digest: str | None = None
    """Content digest where the files' own bytes are not the content (checkpoints); None: a root over the files."""
    outside_digest: tuple[str, ...] = ()
    """Files (relative paths, or folders ending in '/') that are listed and verified but not part of the digest."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """More for the record's provenance, for example devices, resumed steps."""
    after_record: Callable[[], None] | None = None
    """Housekeeping once the record is written, for example removing rolling checkpoints. Files that it removes must
    not be listed: name them in `unlisted`."""
    unlisted: tuple[str, ...] = ()
    """Files or folders (ending in '/') that are left out of the record."""
