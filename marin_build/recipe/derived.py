"""Derived targets: artifacts whose recipe nobody writes, because it follows from the recipe of another.

    parts/<set>/<k>-of-<N>/<version>     share k of N of the work on tokenized/<set>/<version>

They are built, leased, recorded and verified like all others. One that is there for another recipe than now is built
anew when it is needed: nobody ever promised its bytes to anybody.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from marin_build.errors import RecipeError
from marin_build.recipe.schema import Measure, PartRecipe, TokenizedRecipe
from marin_build.recipe.target import Target

if TYPE_CHECKING:
    from marin_build.recipe.load import RecipeBook

_SHARE = re.compile(r"([0-9]{5})-of-([0-9]{5})")


def base_of(target: Target) -> Target:
    """The target whose recipe says what a derived one is.

    Raises:
        RecipeError: the name is none that can be derived.
    """
    set_name, _ = _split(target)
    return Target(f"tokenized/{set_name}", target.version)


def part_target(of: Target, part: int, parts: int) -> Target:
    """Share `part` of `parts`, from 0, of a token set."""
    return Target(f"parts/{of.name.partition('/')[2]}/{part:05d}-of-{parts:05d}", of.version)


def derive(book: RecipeBook, target: Target) -> PartRecipe:
    """The recipe of a derived target.

    Raises:
        RecipeError: the name is none that can be derived, or the recipe that it follows from is missing or wrong.
    """
    _, share = _split(target)
    part, parts = share
    base = base_of(target)
    recipe = book.load(base)
    assert isinstance(recipe, TokenizedRecipe)
    return PartRecipe(of=str(base), part=part, parts=parts, set=recipe.model_copy(update=_SAID_ONLY))


_SAID_ONLY: dict[str, object] = {"measure": Measure(), "execution": {}}
"""Of a set's recipe: no part of what a share of it is."""


def _split(target: Target) -> tuple[str, tuple[int, int]]:
    """The set's name without its kind, and the share: its number and of how many.

    Raises:
        RecipeError: the name is none of a share.
    """
    name, _, last = target.name.partition("/")[2].rpartition("/")
    found = _SHARE.fullmatch(last)
    part, parts = (int(found[1]), int(found[2])) if found else (0, 0)
    if not name or not part < parts:
        raise RecipeError(
            f"{target}: {last!r} is no share of the work on a token set\n"
            "  write it as parts/<set>/00000-of-00008/<version>, from 00000 up to one less than the number of parts"
        )
    return name, (part, parts)


def refuse_derived(target: Target, verb: str) -> None:
    """Raise RecipeError where `marin-build verb` was asked to write or change a recipe that nobody writes."""
    if target.is_derived:
        text = f"{target}: its recipe is not written, it follows from that of another"
        raise RecipeError(f"{text}\n  marin-build {verb} {base_of(target)}")
