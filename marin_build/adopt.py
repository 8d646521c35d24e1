"""Adoption: data that is there already becomes a finished artifact, where it lies.

Nothing is copied, and nothing is ever written there: the record names the place, and every file with size and hash.
The recipe says what it claims to be; the reader of its kind checks that it can be that.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from marin_build.artifact import mirror, provenance
from marin_build.artifact.attempt import now
from marin_build.artifact.commit import entry_of
from marin_build.artifact.context import Adopted, BuildResult
from marin_build.artifact.digest import hash_stream, list_files, root_digest
from marin_build.artifact.examine import Look
from marin_build.artifact.files import Files, external_files
from marin_build.artifact.lease import Terms, acquire
from marin_build.artifact.owner import user
from marin_build.artifact.publish import dependencies_of, refuse_unpinned
from marin_build.artifact.record import Record
from marin_build.artifact.store import LOGS, OWN_NAMES, RECORD, TEMPORARY, Store
from marin_build.build import BUILDERS
from marin_build.data.progress import Progress
from marin_build.errors import DamageError, LeasedError, MarinError, RequestError
from marin_build.recipe.dependencies import identity_dependencies, validation_sets
from marin_build.recipe.derived import refuse_derived
from marin_build.recipe.load import RecipeBook
from marin_build.recipe.target import Target
from marin_build.settings import Settings

PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".joblib", ".dill")
"""Endings of files that can run code when they are read."""


def adopt(
    store: Store, book: RecipeBook, settings: Settings, source: str, target: Target, reason: str, command: Sequence[str]
) -> Record:
    """Make the files below `source`, a folder or a URL, the finished artifact `target`.

    Raises:
        RequestError: it is no such folder, holds what no artifact can hold, is not what the recipe says, or `target`
            is finished or begun already.
        DamageError, DriftError: a dependency is damaged, or of another recipe; or a file cannot be read.
        LeasedError: somebody is building it.
    """
    logger = logging.getLogger("marin_build")
    refuse_derived(target, "adopt")
    if target.is_dev:
        raise RequestError(f"{target} is rebuilt whenever it is asked for; adopt a fixed version")
    refuse_unpinned(book, target)
    _refuse_what_is_there(store, target)
    look = Look(store, book)
    dependencies = dependencies_of(look, target)
    place, files, names = _opened(store, source)
    entries = _hashed(files, names, logger)
    draft = _draft(book, target, place, entries, dependencies)
    recipe, fingerprint = book.load(target), book.fingerprint(target)
    adopted = Adopted(target, recipe, fingerprint, store.fetch(draft), names, dependencies, place, store.fetch)
    try:
        content: BuildResult = import_module(BUILDERS[target.kind]).check_adopted(adopted)
    except DamageError as error:
        raise adopted.refused(error) from None
    lease = acquire(store, target, Terms(settings.lease_seconds), logger)
    try:
        with lease.committing():
            _refuse_what_is_there(store, target)
            record = _completed(draft, content, reason, {"token": lease.file.token}, book, command)
            if not store.create(target, RECORD, record.to_bytes()):
                raise LeasedError(f"{target} was finished by somebody else just now, and stays")
    finally:
        lease.release()
    mirror.write(record)
    return record


def _refuse_what_is_there(store: Store, target: Target) -> None:
    if store.read(target, RECORD) is not None:
        raise RequestError(
            f"{target} is there already, and stays\n  for other data make a new version: marin-build bump {target}"
        )
    if any(name.partition("/")[0] not in OWN_NAMES for name in store.listing(target)):
        raise RequestError(f"{target} is begun: files are in {store.shown(target)}\n  finish it: snakemake {target}")


# ---- the files -------------------------------------------------------------------------------------------------------


def _opened(store: Store, source: str) -> tuple[str, Files, list[str]]:
    """The place in full, and the names of its files, sorted."""
    source = source.removeprefix("file://")
    if "://" in source:
        place = source.rstrip("/")
        _refuse_inside(place, store.shown(Target("raw", "dev"))[: -len("/raw/dev")])
        files = external_files(place)
        names = sorted(files.list())
    else:
        place = os.path.abspath(os.path.expanduser(source))
        if os.path.realpath(place) != place:
            raise RequestError(f"{place} leads through a link; name the folder itself: {os.path.realpath(place)}")
        if not os.path.isdir(place):
            raise RequestError(f"{place} is no folder; adopt takes a folder, or a URL, with all files of the artifact")
        _refuse_inside(place, os.path.realpath(store.shown(Target("raw", "dev")))[: -len("/raw/dev")])
        try:
            files, names = external_files(place), list_files(Path(place))
        except MarinError as error:
            raise RequestError(str(error)) from None
    if not names:
        raise RequestError(f"{place} holds no file")
    for name in names:
        if name.partition("/")[0] in OWN_NAMES or name.endswith(TEMPORARY):
            raise RequestError(f"{place}/{name}: the name belongs to no artifact; adopt a folder with its files alone")
        if name.endswith(PICKLES):
            raise RequestError(f"{place}/{name} is a pickle, which can run code when it is read; adopt no such file")
    return place, files, names


def _refuse_inside(place: str, prefix: str) -> None:
    if place == prefix or place.startswith(f"{prefix}/"):
        raise RequestError(
            f"{place} is in the prefix {prefix}, where artifacts are made and removed; move it elsewhere"
        )


def _hashed(files: Files, names: Sequence[str], logger: logging.Logger) -> list[dict[str, Any]]:
    sizes = files.sizes(names)
    total = sum(size for size in sizes.values() if isinstance(size, int))
    entries = []
    with Progress(logger, "hashing", total) as progress:
        for name in names:
            size, digest = hash_stream(lambda name=name: files.open(name), f"{files.shown}/{name}")
            progress.add(size)
            if _is_pickle(files, name):
                raise RequestError(f"{files.shown}/{name} is a pickle, which can run code; adopt no such file")
            entries.append({"path": name, "bytes": size, "xxh3_128": digest})
    return entries


def _is_pickle(files: Files, name: str) -> bool:
    with files.open(name) as file:
        start = file.read(2) or b""
    return len(start) == 2 and start[0] == 0x80 and 2 <= start[1] <= 5


# ---- the record ------------------------------------------------------------------------------------------------------


def _draft(
    book: RecipeBook, target: Target, place: str, entries: list[dict[str, Any]], dependencies: Mapping[str, Record]
) -> Record:
    recipe = book.load(target)
    return Record(
        name=target.name,
        version=target.version,
        kind=target.kind,
        fingerprint=book.fingerprint(target),
        digest=root_digest(entries),
        recipe=book.identity(target),
        dependencies=tuple(entry_of(dependencies[text].to_dict()) for text in identity_dependencies(recipe)),
        measured=tuple(entry_of(dependencies[text].to_dict()) for text in validation_sets(recipe)),
        files=tuple(entries),
        external=place,
    )


def _completed(
    draft: Record, content: BuildResult, reason: str, more: Mapping[str, Any], book: RecipeBook, command: Sequence[str]
) -> Record:
    def is_outside(path: str) -> bool:
        return path in content.outside_digest or path.startswith(f"{LOGS}/")

    files = tuple({**entry, "outside_digest": True} if is_outside(entry["path"]) else entry for entry in draft.files)
    digest = content.digest or root_digest([entry for entry in files if not entry.get("outside_digest")])
    found = {
        **provenance.circumstances(book.folder, list(command)),
        "adopted": {
            "reason": reason,
            "user": user(),
            "host": socket.gethostname(),
            "time": now(),
            **content.details,
        },
        "finished": now(),
        **more,
    }
    return dataclasses.replace(draft, files=files, digest=digest, metrics=dict(content.metrics), provenance=found)
