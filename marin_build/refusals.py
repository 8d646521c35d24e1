"""What stops a run before it starts, as text for people: drift, sources without a pin, builders that are at work.

Each function returns an empty text where nothing stops the run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from marin_build.artifact.examine import State, Status
from marin_build.recipe.dependencies import closure, identity_dependencies, unresolved
from marin_build.recipe.load import RecipeBook
from marin_build.recipe.target import Target
from marin_build.runs import state_of


def drift(book: RecipeBook, statuses: Iterable[Status], forced: Collection[Target]) -> str:
    """Fixed versions that are, or were begun, of another recipe, unless they are forced.

    What drifted only because of something upstream is told of where the chain ends, with its root cause.
    """
    drifted = {
        status.target: status
        for status in statuses
        if state_of(status) is State.drifted and not status.target.follows_its_recipe and status.target not in forced
    }
    upstream = {member for target in drifted for member in closure(book, [target], identity_dependencies)[:-1]}
    return "\n".join(str(s.drift_error(book)) for target, s in drifted.items() if target not in upstream)


def unpinned(book: RecipeBook, targets: Iterable[Target]) -> str:
    """Targets whose sources may change under them."""
    found = {target: unresolved(book.load(target)) for target in targets}
    lines = [f"  {t}: {', '.join(fields)}\n    marin-build pin {t}" for t, fields in found.items() if fields]
    return "\n".join(["sources are not pinned, so nothing is built from them:", *lines]) if lines else ""


def leased(builders: Mapping[Target, object]) -> str:
    """Targets that somebody else is building, and who."""
    lines = [f"  {target}: {who}" for target, who in builders.items()]
    text = ["somebody else is building what would run:", *lines, "  to wait for it: --config wait=true"]
    return "\n".join(text) if lines else ""
