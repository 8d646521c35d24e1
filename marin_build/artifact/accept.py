"""Accept drift: keep a finished artifact although its recipe changed, as built from the recipe of now.

The record remembers what it was built from, and who accepted the change, when and why.
"""

from __future__ import annotations

import dataclasses
import socket
from typing import TYPE_CHECKING, Any

from marin_build.artifact import mirror
from marin_build.artifact.attempt import now
from marin_build.artifact.cause import causes, shown_changes
from marin_build.artifact.examine import Look
from marin_build.artifact.lease import holder
from marin_build.artifact.owner import user
from marin_build.artifact.record import Record, change_record, entry_target, read_record
from marin_build.artifact.store import Store
from marin_build.errors import LeasedError, RequestError
from marin_build.recipe.dependencies import identity_dependencies
from marin_build.recipe.target import Target, parse_target

if TYPE_CHECKING:
    from marin_build.recipe.load import RecipeBook


def accept(store: Store, book: RecipeBook, target: Target, reason: str) -> list[str]:
    """Rewrite the record of `target` to the recipe of now, and say in lines what was accepted.

    Raises:
        RequestError: it is not finished, has not drifted, a dependency has drifted itself, or names other dependencies.
        LeasedError: somebody is building it.
        DamageError: its record is damaged.
    """
    if not reason.strip():
        raise RequestError(f"{target}: accepting a change needs a reason: --reason '…'")
    if owner := holder(store, target):
        raise LeasedError(f"{target} is being built by {owner}: nothing was accepted")
    if read_record(store, target) is None:  # so that no lock is left where nothing is
        raise _not_finished(target)
    with store.lock(target):
        record = read_record(store, target)
        if record is None:
            raise _not_finished(target)
        changes = shown_changes(target, causes(book, Look(store, book).record, target, record))
        if not changes:
            raise RequestError(f"{target}: nothing to accept: it was built from the recipe that is there")
        accepted = _accepted(store, book, record, reason.strip())
        if not change_record(store, record, accepted):
            raise LeasedError(f"{target} was changed by somebody else just now: nothing was accepted; try again")
    mirror.write(accepted)
    return [f"accepted for {target}: {reason.strip()}", *(f"  {change}" for change in changes)]


def _not_finished(target: Target) -> RequestError:
    return RequestError(f"{target}: nothing to accept: it is not finished\n  snakemake {target}")


def _accepted(store: Store, book: RecipeBook, record: Record, reason: str) -> Record:
    target = record.target
    memory = {
        "reason": reason,
        "user": user(),
        "host": socket.gethostname(),
        "time": now(),
        "fingerprint": record.fingerprint,
        "recipe": record.recipe,
        "dependencies": record.dependencies,
    }
    return dataclasses.replace(
        record,
        fingerprint=book.fingerprint(target),
        recipe=book.identity(target),
        dependencies=_dependencies(store, book, record),
        accepted=(*record.accepted, memory),
    )


def _dependencies(store: Store, book: RecipeBook, record: Record) -> tuple[dict[str, Any], ...]:
    """The recorded dependencies with their fingerprints of now; their digests stay, for those bytes were used."""
    used = {entry_target(entry): entry for entry in record.dependencies}
    needed = [parse_target(text) for text in identity_dependencies(book.load(record.target))]
    look = Look(store, book)
    for target in needed:
        if target not in used:
            raise RequestError(
                f"{record.target} was not made from {target}, which its recipe names now: that cannot be accepted\n"
                f"  snakemake -f {record.target}  builds it anew"
            )
        upstream = look.record(target)
        if upstream is not None and upstream.fingerprint != book.fingerprint(target):
            raise RequestError(
                f"{record.target}: its dependency {target} has drifted itself; accept or rebuild that first\n"
                f"  marin-build accept {target} --reason '…'"
            )
    return tuple({**used[target], "fingerprint": book.fingerprint(target)} for target in needed)
