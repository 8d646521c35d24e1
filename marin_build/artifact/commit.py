"""The commit: from a builder's files to a finished artifact, all of it or nothing.

Inputs and recipe unchanged → files hashed and on disk → record written last → a rebuild takes the old one's place.
Killed anywhere, a later attempt finds either unfinished work, a finished rebuild to put in place, or the artifact.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marin_build.artifact import provenance
from marin_build.artifact.attempt import Attempt, now
from marin_build.artifact.attempt_log import AttemptLog
from marin_build.artifact.cause import causes, drift_error
from marin_build.artifact.context import BuildContext, BuildResult
from marin_build.artifact.digest import list_files, root_digest
from marin_build.artifact.examine import Look
from marin_build.artifact.lease import Lease
from marin_build.artifact.record import Record, read_record
from marin_build.artifact.store import LOGS, OWN_NAMES, TEMPORARY, Store
from marin_build.artifact.verify import check_sizes
from marin_build.artifact.work import Work
from marin_build.errors import DamageError, DriftError, MarinError, NumericalError, RecipeError
from marin_build.recipe.dependencies import identity_dependencies, validation_sets
from marin_build.recipe.target import Target

if TYPE_CHECKING:
    from marin_build.recipe.load import RecipeBook

KEPT_REPLACED = 10
"""Builds of other recipes that a record remembers; they make the cause of drift downstream readable."""


@dataclass(frozen=True)
class Start:
    """What was noted when the attempt started."""

    attempt: Attempt
    old: Record | None
    """Record of the artifact that a rebuild replaces."""
    circumstances: Mapping[str, Any]
    code: Mapping[str, str]
    """Hash of each module of the package."""
    monotonic_seconds: float


def start(attempt: Attempt, old: Record | None, recipes: Path, command: Iterable[str]) -> Start:
    found = provenance.circumstances(recipes, list(command))
    return Start(attempt, old, found, provenance.code_hashes(), time.monotonic())


def commit(
    store: Store,
    book: RecipeBook,
    lease: Lease,
    context: BuildContext,
    begun: Start,
    result: BuildResult,
    work: Work,
    log: AttemptLog,
) -> Record:
    """Turn what the builder made into a finished artifact.

    Raises:
        LeasedError: another builder has taken over.
        DriftError: the recipe or a dependency was changed while it was built.
        DamageError: a dependency was damaged or removed while it was built.
        NumericalError: a metric is not a finite number.
        MarinError: the disk is full or fails, or the builder made nothing that can be kept.
    """
    lease.check()
    check_recipe_unchanged(book, Look(store, book), begun.attempt)
    check_inputs_unchanged(store, context)
    log.logger.info("writing the record of %s", context.target)
    log.close()
    files = _collect(work, result, log)
    record = _record(context, begun, result, work, files)
    log.sealed = True
    work.commit(lease, record, lambda: _housekeeping(result, log))
    return record


def check_recipe_unchanged(book: RecipeBook, look: Look, attempt: Attempt) -> None:
    """Raise DriftError unless the recipe files still say what they said at the start."""
    from marin_build.recipe.load import RecipeBook

    target, fresh = attempt.target, RecipeBook(book.folder, book.encoder)
    note = "it was edited during the build, so nothing was committed; what was made stays and resumes once restored"
    try:
        found = causes(fresh, look.record, target, attempt)
    except RecipeError as error:
        raise DriftError(f"drift: {target}: its recipe cannot be read any more: {error}\n  {note}") from error
    if found:
        raise DriftError(f"{drift_error(fresh, target, found, (), finished=False)}\n  {note}")


def check_inputs_unchanged(store: Store, context: BuildContext) -> None:
    """Raise unless every dependency still has the bytes that it had at the start."""
    identity = {text for text in identity_dependencies(context.recipe)}
    for text, dependency in context.dependencies.items():
        record = read_record(store, dependency.target)
        if record is None:
            raise DamageError(f"{context.target}: its dependency {text} was removed during the build")
        if problems := check_sizes(store.files(record), record.content):
            raise DamageError(f"{context.target}: its dependency {text} was damaged during the build: {problems[0]}")
        if record.digest != dependency.record["digest"]:
            kind = DriftError if text in identity else MarinError
            raise kind(
                f"{context.target}: its dependency {text} was rebuilt to other bytes during the build: "
                f"digest {dependency.record['digest']} -> {record.digest}\n  nothing was committed"
            )


def _collect(work: Work, result: BuildResult, log: AttemptLog) -> list[dict[str, Any]]:
    """Entries of all files of the artifact and of this attempt's log; on return bytes and names are durable.

    Logs of earlier attempts are not listed: a builder that was paused and replaced may still wake and write to its own.
    """
    _remove_temporary(work.folder)
    is_unlisted, is_outside = _among(result.unlisted), _among((*result.outside_digest, f"{LOGS}/"))
    names = [name for name in _made(work, result) if not is_unlisted(name)]
    entries = work.collect(names, log.path.name)
    return [{**entry, "outside_digest": True} if is_outside(entry["path"]) else entry for entry in entries]


def _remove_temporary(folder: Path) -> None:
    """Remove what killed writers left below a folder in which nobody writes any more."""
    for base, _, names in os.walk(folder):
        for name in names:
            if name.endswith(TEMPORARY):
                os.unlink(os.path.join(base, name))


def _made(work: Work, result: BuildResult) -> list[str]:
    """What a builder made in its folder, without what somebody else put there.

    Raises:
        MarinError: it made nothing, a link, or something under a name that belongs to the protocol.
    """
    if work.logs.parent != work.folder and (work.folder / LOGS).exists():
        raise MarinError(f"{work.folder / LOGS}: the name is reserved for the logs of attempts")
    names = sorted({*list_files(work.folder, skip=OWN_NAMES | {LOGS}), *work.elsewhere()})
    if result.made is not None:
        names = list(filter(_among(result.made), names))
    if not names:
        raise MarinError(f"{work.folder}: the builder made no file")
    return names


def _among(patterns: Iterable[str]) -> Callable[[str], bool]:
    """Whether a name is one of the files in `patterns`, or below one of its folders, which end in '/'."""
    files = frozenset(patterns)
    folders = tuple(pattern for pattern in files if pattern.endswith("/"))
    return lambda name: name in files or name.startswith(folders)


def _record(
    context: BuildContext, begun: Start, result: BuildResult, work: Work, files: list[dict[str, Any]]
) -> Record:
    target, attempt = context.target, begun.attempt
    content = [entry for entry in files if not entry.get("outside_digest")]
    if not content:
        raise MarinError(f"{target}: the builder made no file that counts as content")
    digest = result.digest or root_digest(content)
    return Record(
        name=target.name,
        version=target.version,
        kind=target.kind,
        fingerprint=attempt.fingerprint,
        digest=digest,
        recipe=attempt.recipe,
        dependencies=attempt.dependencies,
        measured=tuple(entry_of(context.dependencies[text].record) for text in validation_sets(context.recipe)),
        files=tuple(files),
        folder=work.place,
        metrics={**_metrics_before(attempt, digest), **{n: _metric(target, n, v) for n, v in result.metrics.items()}},
        provenance=_provenance(begun, result),
        replaced=_replaced(begun),
        lost=tuple(attempt.repairs.get("lost", ())) if attempt.repairs else (),
    )


def entry_of(dependency: Mapping[str, Any]) -> dict[str, Any]:
    """What a record says of a dependency, given its record."""
    return {key: dependency[key] for key in ("name", "version", "fingerprint", "digest")}


def _metrics_before(attempt: Attempt, digest: str) -> Mapping[str, Any]:
    """What was measured on these very bytes before they were repaired; a repair may have nothing left to measure."""
    if attempt.repairs and attempt.repairs["digest"] == digest:
        metrics: Mapping[str, Any] = attempt.repairs["metrics"]
        return metrics
    return {}


def _metric(target: Target, name: str, value: Any) -> Any:
    plain = value.item() if hasattr(value, "item") else value
    if isinstance(plain, float) and not math.isfinite(plain):
        raise NumericalError(f"{target}: the metric {name} is {plain}: nothing was committed")
    return plain


def _provenance(begun: Start, result: BuildResult) -> dict[str, Any]:
    attempt = begun.attempt
    attempts = [*attempt.earlier, attempt.brief()]
    return {
        **result.details,
        **begun.circumstances,
        "packages": provenance.package_versions(),
        "code": provenance.code(begun.code),
        "attempt": attempt.id,
        "token": attempt.token,
        "run": attempt.run,
        "forced": attempt.forced,
        "started": attempts[0]["started"],
        "finished": now(),
        "seconds": round(time.monotonic() - begun.monotonic_seconds, 3),
        "attempts": attempts,
    }


def _replaced(begun: Start) -> tuple[Mapping[str, Any], ...]:
    old = begun.old
    if old is None:
        return ()
    memory = {key: getattr(old, key) for key in ("fingerprint", "digest", "recipe", "dependencies")}
    remembered = (*old.replaced, memory) if old.fingerprint != begun.attempt.fingerprint else old.replaced
    return remembered[-KEPT_REPLACED:]


def _housekeeping(result: BuildResult, log: AttemptLog) -> None:
    """The artifact is whole by now: what fails here leaves files too many, and is said aloud."""
    if result.after_record is not None:
        try:
            result.after_record()
        except Exception:
            log.logger.warning("tidying up failed; files that no record names stay", exc_info=True)
