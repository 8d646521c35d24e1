"""How the work on a token set is shared among jobs: into how many parts, and which of them are still to be made."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from marin_build.artifact.lease import holder
from marin_build.artifact.owner import Owner
from marin_build.artifact.record import read_record
from marin_build.artifact.store import Store
from marin_build.errors import DamageError
from marin_build.recipe.derived import part_target
from marin_build.recipe.load import RecipeBook
from marin_build.recipe.schema import Recipe, TokenizedRecipe, TokenizeExecution
from marin_build.recipe.target import Target
from marin_build.settings import Settings


def parts_of(recipe: Recipe, settings: Settings) -> int:
    """Jobs that share the work: as the setting says, or else the recipe for this platform."""
    if not isinstance(recipe, TokenizedRecipe):
        return 1
    blocks = recipe.execution
    said = blocks.get(settings.platform) or blocks.get("default") or TokenizeExecution()
    return settings.tokenize_parts or said.parts


def missing(store: Store, book: RecipeBook, of: Target, parts: int, *, forced: bool) -> list[Target]:
    """The parts that are not there for the recipe of now; all of them where the set is made from nothing.

    A part that is damaged counts as there: the build of the set makes again what it cannot take over.
    """
    every = [part_target(of, part, parts) for part in range(parts)]
    if forced:
        return every
    with ThreadPoolExecutor(store.parallel) as pool:
        found = list(pool.map(lambda part: _is_there(store, book, part), every))
    return [part for part, is_there in zip(every, found, strict=True) if not is_there]


def builders(store: Store, parts: Sequence[Target]) -> dict[Target, Owner]:
    """Which of these parts somebody is building now, and who."""
    with ThreadPoolExecutor(store.parallel) as pool:
        found = zip(parts, pool.map(lambda part: holder(store, part), parts), strict=True)
        return {part: owner for part, owner in found if owner is not None}


def _is_there(store: Store, book: RecipeBook, part: Target) -> bool:
    try:
        record = read_record(store, part)
    except DamageError:
        return False
    return record is not None and record.fingerprint == book.fingerprint(part)
