"""Why an artifact is not what its recipe says: the root cause first, field by field, and what helps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from marin_build.artifact.record import Record, entry_target
from marin_build.errors import DriftError
from marin_build.recipe.dependencies import closure, identity_dependencies
from marin_build.recipe.drift import Change, compare
from marin_build.recipe.target import Target

if TYPE_CHECKING:
    from marin_build.recipe.load import RecipeBook

RecordOf = Callable[[Target], Record | None]
MAX_SHOWN = 40


class Made(Protocol):
    """What a record and an attempt both say of where bytes come from."""

    @property
    def fingerprint(self) -> str: ...
    @property
    def recipe(self) -> Mapping[str, Any]: ...
    @property
    def dependencies(self) -> tuple[Mapping[str, Any], ...]: ...


@dataclass(frozen=True)
class _Old:
    """A build that a record remembers."""

    fingerprint: str
    recipe: Mapping[str, Any]
    dependencies: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Cause:
    """One changed field, and the target whose recipe it is in."""

    target: Target
    change: Change


def causes(book: RecipeBook, record_of: RecordOf, target: Target, made: Made) -> tuple[Cause, ...]:
    """Every field in which the recipes of now differ from those that `made` was made from; dependencies come first.

    A dependency whose old recipe is known to nobody any more shows as its fingerprint.
    """
    if made.fingerprint == book.fingerprint(target):
        return ()
    found = tuple(_causes(book, record_of, target, made, {target}))
    return found or (Cause(target, Change("fingerprint", made.fingerprint, book.fingerprint(target))),)


def _causes(book: RecipeBook, record_of: RecordOf, target: Target, made: Made, seen: set[Target]) -> Iterator[Cause]:
    still_needed = identity_dependencies(book.load(target))
    for entry in made.dependencies:
        dependency, old = entry_target(entry), entry["fingerprint"]
        if str(dependency) not in still_needed or dependency in seen or book.fingerprint(dependency) == old:
            continue
        seen.add(dependency)
        if remembered := _remembered(record_of(dependency), old):
            yield from _causes(book, record_of, dependency, remembered, seen)
        else:
            yield Cause(dependency, Change("fingerprint", old, book.fingerprint(dependency)))
    yield from (Cause(target, change) for change in compare(made.recipe, book.identity(target)))


def _remembered(record: Record | None, fingerprint: str) -> Made | None:
    """The build with this fingerprint: the record's own, or one that it accepted or replaced."""
    if record is None or record.fingerprint == fingerprint:
        return record
    for entry in (*reversed(record.accepted), *reversed(record.replaced)):
        if entry["fingerprint"] == fingerprint:
            return _Old(fingerprint, entry["recipe"], tuple(entry["dependencies"]))
    return None


def shown_changes(target: Target, found: tuple[Cause, ...]) -> tuple[Change, ...]:
    """The changes, with the target written before each field that is in another recipe than that of `target`."""
    return tuple(
        cause.change
        if cause.target == target
        else dataclasses.replace(cause.change, field=f"{cause.target} {cause.change.field}")
        for cause in found
    )


def drifted_targets(book: RecipeBook, record_of: RecordOf, target: Target) -> tuple[Target, ...]:
    """`target` and everything it is made from, as far as their records are of other recipes; dependencies first."""
    members = closure(book, [target], identity_dependencies)
    records = {member: record_of(member) for member in members}
    return tuple(t for t in members if (record := records[t]) and record.fingerprint != book.fingerprint(t))


def drift_error(
    book: RecipeBook, target: Target, found: tuple[Cause, ...], drifted: tuple[Target, ...], *, finished: bool
) -> DriftError:
    """What to tell a user whose artifact, or unfinished work, is not of the recipe that is there now.

    `found` is not empty; `drifted` are the finished artifacts that drifted, in the order to deal with them.
    """
    changes = shown_changes(target, found)
    what = "it was built from another recipe" if finished else "its unfinished work is of another recipe"
    more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
    lines = [f"drift: {target}: {what}: {changes[0]}{more}"]
    lines += [f"  {change}" for change in changes[:MAX_SHOWN]] if more else []
    lines += [f"  and {len(changes) - MAX_SHOWN} more"] if len(changes) > MAX_SHOWN else []
    return DriftError("\n".join([*lines, *_what_helps(book, target, found[0].target, drifted, finished)]))


def _what_helps(
    book: RecipeBook, target: Target, root: Target, drifted: tuple[Target, ...], finished: bool
) -> list[str]:
    bumped = root if root in drifted else target
    also = "" if bumped == target else f", to be named in a new version of {target}"
    forced = dict.fromkeys((*drifted, target))
    old = "the old stays until the new is finished" if finished else "the unfinished work is dropped"
    return [
        "what helps:",
        f"  marin-build bump {bumped}  makes the changed recipe a new version{also}; then restore {book.shown(bumped)}",
        f"  snakemake -f {' '.join(map(str, forced))}  builds anew under the same version; {old}",
        *(f"  marin-build accept {one} --reason '…'  keeps it, as built from this recipe" for one in drifted),
    ]


def input_error(target: Target, changes: tuple[Change, ...], *, damaged: bool = False) -> DriftError:
    """What to tell a user whose unfinished work, or damaged artifact, was made from other bytes than its dependencies
    have now.
    """
    what = "it is damaged, and was built" if damaged else "its unfinished work is"
    does = "builds it anew, from the bytes of now" if damaged else "drops the unfinished work and starts anew"
    lines = [f"drift: {target}: {what} on other input bytes: {changes[0]}"]
    lines += [f"  {change}" for change in changes[1:]]
    return DriftError("\n".join([*lines, f"  snakemake -f {target}  {does}"]))
