"""What a recipe needs: the artifacts that shape its bytes, and those it is only measured on.

A fixed version is a promise, so it may need fixed versions only. Only the recipes of a closure are ever read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from marin_build.errors import RecipeError
from marin_build.recipe.consistency import check_run
from marin_build.recipe.fields import UNRESOLVED
from marin_build.recipe.schema import (
    CheckpointRecipe,
    EncoderCheckRecipe,
    PartRecipe,
    Recipe,
    TokenizedRecipe,
    TokenizerRecipe,
    TrainedTokenizer,
)
from marin_build.recipe.sources import ArtifactSource
from marin_build.recipe.target import Target, parse_target

if TYPE_CHECKING:
    from marin_build.recipe.load import RecipeBook


def identity_dependencies(recipe: Recipe) -> tuple[str, ...]:
    """Targets that the artifact is made from, in the recipe's order; their fingerprints are part of its own."""
    if isinstance(recipe, PartRecipe):
        return identity_dependencies(recipe.set)
    if isinstance(recipe, EncoderCheckRecipe):
        return (recipe.of,)
    named: list[str] = []
    if isinstance(recipe, TokenizerRecipe) and isinstance(recipe.tokenizer, TrainedTokenizer):
        named += [text.target for text in recipe.tokenizer.text]
    if isinstance(recipe, TokenizedRecipe):
        named.append(recipe.tokenizer)
        named += [recipe.source.target] if isinstance(recipe.source, ArtifactSource) else []
    if isinstance(recipe, CheckpointRecipe):
        named.append(recipe.data.tokenizer)
        named += [component.target for component in recipe.data.train.values()]
    return tuple(dict.fromkeys(named))


def validation_sets(recipe: Recipe) -> tuple[str, ...]:
    """Targets that the artifact is only measured on: they are built before it, but are no part of its identity."""
    if isinstance(recipe, CheckpointRecipe) and recipe.measure.validation:
        return tuple(dict.fromkeys(recipe.measure.validation.sets.values()))
    return ()


def needs(recipe: Recipe) -> tuple[str, ...]:
    """Every target that its recipe names, all finished before it is built; `RecipeBook.needs` knows of derived ones."""
    return tuple(dict.fromkeys(identity_dependencies(recipe) + validation_sets(recipe)))


def unresolved(recipe: Recipe) -> list[str]:
    """Field paths of what is still `unresolved`, digests, revisions, files: such a recipe can be planned, not built."""

    def walk(value: Any, path: str) -> Iterator[str]:
        if isinstance(value, dict):
            for key, item in value.items():
                here = f"{path}.{key}" if path else key
                if (key in ("digest", "revision") and item == UNRESOLVED) or (key == "files" and UNRESOLVED in item):
                    yield here
                yield from walk(item, here)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                yield from walk(item, f"{path}[{index}]")

    return list(walk(recipe.model_dump(exclude={"measure", "execution"}), ""))


def closure(
    book: RecipeBook, targets: Iterable[Target], edges: Callable[[Recipe], tuple[str, ...]] | None = None
) -> list[Target]:
    """`targets` and all that they need, each once, dependencies first; `edges` follows other needs than those.

    Raises:
        RecipeError: a recipe that is missing, wrong or at odds with another, a fixed version that needs a `dev` one, or
            a cycle.
    """

    def needed(target: Target) -> tuple[str, ...]:
        return edges(book.load(target)) if edges else book.needs(target)

    done: dict[Target, None] = {}
    for root in targets:
        chain: dict[Target, Iterator[Target]] = {} if root in done else {root: _dependencies(book, root, needed)}
        while chain:
            target, rest = next(reversed(chain.items()))
            dependency = next(rest, None)
            if dependency is None:
                check_run(book, target, needed(target))
                done[target] = None
                del chain[target]
            elif dependency in chain:
                raise _cycle(book, [*chain, dependency])
            elif dependency not in done:
                chain[dependency] = _dependencies(book, dependency, needed)
    return list(done)


def _dependencies(book: RecipeBook, target: Target, needed: Callable[[Target], tuple[str, ...]]) -> Iterator[Target]:
    for text in needed(target):
        dependency = parse_target(text)
        if dependency.is_dev and not target.is_dev:
            raise RecipeError(
                f"{book.where(target, text)}: a fixed version may not need a dev one, seen {text!r}\n"
                f"  make a fixed one with `marin-build bump {text}` and name that, or build {target.name}/dev instead"
            )
        if not book.exists(dependency):
            raise RecipeError(
                f"{book.where(target, text)}: {text!r} has no recipe: {book.shown(dependency)} does not exist\n"
                f"  needed by {target}\n{book.suggest(text)}\n  marin-build new {text} writes one to start from"
            )
        yield dependency


def _cycle(book: RecipeBook, chain: list[Target]) -> RecipeError:
    cycle = chain[chain.index(chain[-1]) :]
    lines = [f"  {book.where(a, str(b))}: {a} needs {b}" for a, b in pairwise(cycle)]
    return RecipeError("\n".join([f"recipes need each other in a cycle: {' → '.join(map(str, cycle))}", *lines]))
