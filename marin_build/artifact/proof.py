"""Does what was made come out again? A sample of a finished artifact is made anew, elsewhere, and compared to the bit.

What was found is kept in the record as a certificate, a difference too. That marks no file as damaged: its bytes are
those recorded, and it is the making that does not repeat. Nothing else in the artifact is touched, and no lease taken.
"""

from __future__ import annotations

import dataclasses
import logging
import random
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marin_build.artifact import provenance
from marin_build.artifact.attempt import now
from marin_build.artifact.attempt_log import terminal_logger
from marin_build.artifact.context import BuildContext, BuildResult, Dependency
from marin_build.artifact.digest import file_entries, list_files
from marin_build.artifact.examine import Look, State, Status
from marin_build.artifact.files import LocalFiles
from marin_build.artifact.owner import user
from marin_build.artifact.publish import disk_errors_explained, fetched, finished_dependency
from marin_build.artifact.record import Record, change_record, read_record
from marin_build.artifact.stop import StopSignals
from marin_build.artifact.store import LOGS, Store
from marin_build.artifact.verify import check_bytes
from marin_build.errors import DamageError, LeasedError, RequestError, Stopped
from marin_build.recipe.dependencies import identity_dependencies
from marin_build.recipe.target import Target, parse_target
from marin_build.settings import Settings

if TYPE_CHECKING:
    from marin_build.recipe.load import RecipeBook

BITS = "equal to the bit"
KEPT_CERTIFICATES = 20


@dataclass(frozen=True)
class Sample:
    """How much to make again, and which."""

    count: int
    seed: int

    def choose(self, names: Iterable[str]) -> list[str]:
        """`count` of the names, or all where there are fewer, sorted."""
        names = sorted(names)
        return sorted(random.Random(self.seed).sample(names, min(self.count, len(names))))


@dataclass(frozen=True)
class Made:
    """The finished artifact."""

    record: Record
    folder: Path

    def check(self, names: Iterable[str]) -> None:
        """Raise DamageError unless these files are as recorded: then it is no question whether they come out again."""
        wanted = set(names)
        entries = [entry for entry in self.record.files if entry["path"] in wanted]
        if problems := check_bytes(LocalFiles(self.folder), entries):
            target = self.record.target
            raise DamageError(f"{target} is damaged: {problems[0]}\n  marin-build verify --full {target}")

    def difference(self, folder: Path, names: Iterable[str]) -> str | None:
        """The first of the files in `folder` that is not as in the artifact, with both hashes."""
        recorded = {entry["path"]: entry for entry in self.record.files}
        for entry in file_entries(folder, names):
            path, old = entry["path"], recorded.get(entry["path"])
            if old is None:
                return f"{path} was made again and is not in the artifact"
            if (entry["bytes"], entry["xxh3_128"]) != (old["bytes"], old["xxh3_128"]):
                return f"{path} has xxh3_128 {entry['xxh3_128']} when made again and {old['xxh3_128']} in the artifact"
        return None


@dataclass(frozen=True)
class Finding:
    """What making a sample again showed."""

    what: str
    """For example `shards`."""
    checked: tuple[str, ...]
    difference: str | None = None
    """The first difference, with both hashes or numbers."""
    equal: str = BITS
    """How far it is equal where there is no difference."""


Remaker = Callable[[BuildContext, Made, Sample], Finding]
"""Makes a sample again below the folder of the context, where nothing is, and compares it with what was made."""


def whole(builder: Callable[[BuildContext], BuildResult]) -> Remaker:
    """For what is made quickly: all of it is made again."""

    def remake(context: BuildContext, made: Made, sample: Sample) -> Finding:
        content = [entry["path"] for entry in made.record.content]
        made.check(content)
        builder(context)
        names = list_files(context.folder, skip=frozenset({LOGS}))
        missing = sorted(set(content) - set(names))
        difference = f"{missing[0]} is in the artifact and was not made again" if missing else None
        return Finding("files", tuple(names), difference or made.difference(context.folder, names))

    return remake


def prove(
    store: Store, book: RecipeBook, target: Target, settings: Settings, remake: Remaker, sample: Sample
) -> dict[str, Any]:
    """Make a sample of `target` again, and return the certificate that its record now has.

    Raises:
        RequestError: it, or something that it is made from, is not finished or has other bytes now; a useless sample.
        DriftError: its recipe changed.
        DamageError: it, or something that it is made from, is damaged: then nothing is certified.
        LeasedError: it was rebuilt meanwhile.
        Stopped: a signal came; nothing was noted.
    """
    look, code = Look(store, book), provenance.code_hashes()
    record = _finished(look, look.judge(target))
    recipe = book.load(target)
    inputs = {text: finished_dependency(look, target, parse_target(text)) for text in identity_dependencies(recipe)}
    with (
        StopSignals() as signals,
        tempfile.TemporaryDirectory(prefix="marin_rebuild_") as folder,
        disk_errors_explained(Path(folder)),
    ):
        context = BuildContext(
            target=target,
            recipe=recipe,
            fingerprint=record.fingerprint,
            folder=Path(folder),
            logs=Path(folder) / LOGS,
            dependencies=fetched(store, inputs),
            settings=settings,
            logger=_quiet(),
            stop_requested=signals.requested,
            check_lease=lambda: None,
        )
        try:
            finding = remake(context, Made(record, store.fetch(record)), sample)
        except Stopped:
            raise Stopped(f"{target}: making it again was stopped, and nothing was noted") from None
    if finding.difference:
        _blame(store, target, inputs, context.dependencies)
    certificate = _certificate(finding, sample, code)
    _add(store, record, certificate)
    return certificate


def _finished(look: Look, status: Status) -> Record:
    record, target = status.record, status.target
    if status.state is State.drifted and record is not None:
        raise status.drift_error(look.book)
    if status.state is State.damaged:
        raise DamageError(f"{target} is damaged: {status.reasons[0]}\n  marin-build verify --full {target}")
    if status.state is not State.finished or record is None:
        raise RequestError(f"{target} cannot be made again and compared: {'; '.join(status.reasons)}")
    return record


def _quiet() -> logging.Logger:
    """Only what is wrong is told: the builders' own lines would look like a build."""
    logger = terminal_logger()
    logger.setLevel(logging.WARNING)
    return logger


def _blame(store: Store, target: Target, inputs: Mapping[str, Record], dependencies: Mapping[str, Dependency]) -> None:
    """Raise DamageError where the reason of a difference is damage in what the artifact is made from."""
    for text, record in inputs.items():
        if problems := check_bytes(LocalFiles(dependencies[text].folder), record.content):
            raise DamageError(
                f"{target}: its dependency {text} is damaged: {problems[0]}\n  marin-build verify --full {text}"
            )


def _certificate(finding: Finding, sample: Sample, code: Mapping[str, str]) -> dict[str, Any]:
    return {
        "kind": "rebuild",
        "what": finding.what,
        "checked": list(finding.checked),
        "seed": sample.seed,
        "equal": None if finding.difference else finding.equal,
        "difference": finding.difference,
        "time": now(),
        "user": user(),
        "host": socket.gethostname(),
        "code": provenance.code(code)["digest"],
        "packages": provenance.package_versions(),
    }


def _add(store: Store, record: Record, certificate: Mapping[str, Any]) -> None:
    """Add the certificate to the record as it is now, if it is still of the same build."""
    with store.lock(record.target):
        present = read_record(store, record.target)
        if present is not None and present.provenance.get("attempt") == record.provenance.get("attempt"):
            certificates = (*present.certificates, certificate)[-KEPT_CERTIFICATES:]
            if change_record(store, present, dataclasses.replace(present, certificates=certificates)):
                return
    raise LeasedError(f"{record.target} was changed by somebody else just now: nothing was noted; try again")
