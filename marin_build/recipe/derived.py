"""Derived targets: artifacts whose recipe nobody writes, because it follows from the recipe of another.

    parts/<set>/<k>-of-<N>/<version>          share k of N of the work on tokenized/<set>/<version>
    checks/encoder/<tokenizer>/<version>      whether the fast encoder gives the ids of the reference for that tokenizer

They are built, leased, recorded and verified like all others. One that is there for another recipe than now is built
anew when it is needed: nobody ever promised its bytes to anybody.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from marin_build.errors import RecipeError
from marin_build.recipe.schema import (
    BytesTokenizer,
    EncoderCheckRecipe,
    Measure,
    PartRecipe,
    Recipe,
    TokenizedRecipe,
    TokenizerRecipe,
)
from marin_build.recipe.target import Target, parse_target

if TYPE_CHECKING:
    from marin_build.recipe.load import RecipeBook

FAST_LIBRARY, REFERENCE_LIBRARY = "fastokens", "tokenizers"
_CHECKS = "checks/encoder/"
_SHARE = re.compile(r"([0-9]{5})-of-([0-9]{5})")


def base_of(target: Target) -> Target:
    """The target whose recipe says what a derived one is; any other is its own.

    Raises:
        RecipeError: the name is none that can be derived.
    """
    if not target.is_derived:
        return target
    if target.kind == "checks":
        return _checked(target)
    set_name, _ = _split(target)
    return Target(f"tokenized/{set_name}", target.version)


def part_target(of: Target, part: int, parts: int) -> Target:
    """Share `part` of `parts`, from 0, of a token set."""
    return Target(f"parts/{of.name.partition('/')[2]}/{part:05d}-of-{parts:05d}", of.version)


def check_target(tokenizer: Target) -> Target:
    """The comparison of encoders for a tokenizer."""
    return Target(f"{_CHECKS}{tokenizer.name.partition('/')[2]}", tokenizer.version)


def encoder_checks(book: RecipeBook, recipe: Recipe) -> tuple[str, ...]:
    """The comparisons that tell which encoder a token set may use; none for a tokenizer of bytes, which needs none."""
    made = recipe.set if isinstance(recipe, PartRecipe) else recipe
    if not isinstance(made, TokenizedRecipe) or installed(FAST_LIBRARY) is None:
        return ()
    tokenizer = parse_target(made.tokenizer)
    if not book.exists(tokenizer):
        return ()  # who follows the recipe's own needs says so better
    wanted = book.load(tokenizer)
    is_bytes = isinstance(wanted, TokenizerRecipe) and isinstance(wanted.tokenizer, BytesTokenizer)
    return () if is_bytes else (str(check_target(tokenizer)),)


@cache
def installed(library: str) -> str | None:
    """Its version, without importing it."""
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def derive(book: RecipeBook, target: Target) -> PartRecipe | EncoderCheckRecipe:
    """The recipe of a derived target.

    Raises:
        RecipeError: the name is none that can be derived, or the recipe that it follows from is missing or wrong.
    """
    base = base_of(target)
    recipe = book.load(base)
    if target.kind == "checks":
        fast, reference = (f"{library} {installed(library)}" for library in (FAST_LIBRARY, REFERENCE_LIBRARY))
        return EncoderCheckRecipe(of=str(base), fast=fast, reference=reference)
    _, (part, parts) = _split(target)
    assert isinstance(recipe, TokenizedRecipe)
    return PartRecipe(of=str(base), part=part, parts=parts, set=recipe.model_copy(update=_SAID_ONLY))


_SAID_ONLY: dict[str, object] = {"measure": Measure(), "execution": {}}
"""Of a set's recipe: no part of what a share of it is."""


def _checked(target: Target) -> Target:
    """The tokenizer whose encoders are compared.

    Raises:
        RecipeError: the name is none of a comparison.
    """
    name = target.name.removeprefix(_CHECKS)
    if name == target.name or not name:
        raise RecipeError(
            f"{target}: {target.name!r} is no check\n  write it as {_CHECKS}<tokenizer>/<version>, for example "
            f"{_CHECKS}quickstart/2026.06.28"
        )
    return Target(f"tokenizers/{name}", target.version)


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
