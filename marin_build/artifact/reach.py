"""What must stay: every target that a recipe, a pin, a live lease, or the record of one that must stay reaches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from marin_build.artifact.attempt import read_attempt
from marin_build.artifact.examine import Look, State
from marin_build.artifact.lease import holder
from marin_build.artifact.record import entry_target, read_record
from marin_build.artifact.store import Store
from marin_build.errors import DamageError, RecipeError, RequestError
from marin_build.recipe.dependencies import closure
from marin_build.recipe.derived import base_of
from marin_build.recipe.target import Target

if TYPE_CHECKING:
    from marin_build.recipe.load import RecipeBook


PARTS = "parts"
"""The kind of derived targets that are needed only until the set is finished whose work they share."""
LOOK_SECONDS = 10.0


def reachable(
    store: Store, book: RecipeBook, keep: Sequence[str], *, leased_by_us: Target | None = None
) -> set[Target]:
    """All recipes with what they need, what the globs `keep` match, what is being built, and what these were made from.

    Of derived targets, which no recipe file names, those that follow from a recipe that is there are needed; but parts
    of the work on a set only until that is finished.

    Raises:
        RecipeError: a recipe cannot be read, so nobody can know what it needs.
        RequestError: there is no recipe at all, or a record is of a newer version of the program.
    """
    here = store.targets()
    todo = _named(store, book, here)
    todo |= {target for target in here if is_kept(target, keep)}
    todo |= {target for target in here if target != leased_by_us and holder(store, target)}
    found: set[Target] = set()
    while todo:
        target = todo.pop()
        found.add(target)
        todo |= _made_from(store, target) - found
    return found


def is_kept(target: Target, keep: Sequence[str]) -> bool:
    """True when a pin names the target, or matches it as a glob; `*` matches '/' too."""
    return any(fnmatchcase(str(target), pattern) for pattern in keep)


def unmatched(store: Store, keep: Sequence[str]) -> list[str]:
    """Pins that name nothing that is there: mistyped, perhaps."""
    here = store.targets() if keep else []
    return [pattern for pattern in keep if not any(is_kept(target, [pattern]) for target in here)]


def _named(store: Store, book: RecipeBook, here: Sequence[Target]) -> set[Target]:
    named = book.targets()
    if not named:
        raise RequestError(
            f"gc: no recipe is below {book.folder}/, so nothing would be needed\n"
            "  run it where the recipes are, or set --config recipes=FOLDER"
        )
    linked = [target for target in here if book.exists(target)]  # below linked folders, which `targets` does not walk
    try:
        parts = Parts(store)
        needed = [target for target in linked if target.kind != PARTS or parts.is_needed(book, target)]
        return set(closure(book, dict.fromkeys([*named, *needed])))
    except RecipeError as error:
        note = "gc deletes nothing while a recipe cannot be read: nobody can know what it needs"
        raise RecipeError(f"{error}\n  {note}") from None


class Parts:
    """Which parts of the work on token sets are needed: no record is ever made from one, so each is judged alone.

    They come by the thousand, so what is known of their set is asked anew every LOOK_SECONDS only.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._needed: dict[Target, tuple[float, bool]] = {}
        """By set: when it was looked at, and whether it needs its parts."""

    def is_needed(self, book: RecipeBook, part: Target) -> bool:
        """Whether the set may still take it over: its recipe is there, and it is not finished, or is being built.

        Raises:
            RecipeError: a recipe cannot be read.
        """
        if not book.exists(part):
            return False
        base, now = base_of(part), time.monotonic()
        looked, is_needed = self._needed.get(base, (-LOOK_SECONDS, True))
        if now - looked >= LOOK_SECONDS:
            state = Look(self._store, book).judge(base).state
            is_needed = state is not State.finished or holder(self._store, base) is not None
            self._needed[base] = now, is_needed
        return is_needed


def _made_from(store: Store, target: Target) -> set[Target]:
    """What the record and the unfinished attempt of a target say that it was made from, or measured on."""
    attempt = read_attempt(store, target)
    entries = list(attempt.dependencies) if attempt else []
    try:
        record = read_record(store, target)
    except DamageError:
        record = None
    if record is not None:
        entries += [*record.dependencies, *record.measured]
    return {entry_target(entry) for entry in entries}
