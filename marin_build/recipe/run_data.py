"""What a new run reads and is measured on: chosen from the recipes that stand there, by name or by size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from marin_build.errors import RecipeError
from marin_build.recipe.schema import CheckpointRecipe, TokenizedRecipe, TokenizerRecipe
from marin_build.recipe.target import Target, parse_target

if TYPE_CHECKING:
    from marin_build.recipe.load import RecipeBook

DEFAULT_VOCABULARY = 32768
VALIDATION_WORDS = ("validation", "valid", "val", "test", "eval", "heldout")


@dataclass(frozen=True)
class RunData:
    """The data of a new run, and a sentence on where it comes from."""

    tokenizer: str
    vocabulary_size: int
    train: Mapping[str, tuple[str, float]]
    """Target and weight by name."""
    validation: Mapping[str, str]
    mixture_block: int
    attention_across_documents: bool
    origin: str


def run_data(book: RecipeBook, target: Target, tokens: int) -> RunData:
    """The tokenized sets that carry the run's name; else those of a run that reads about `tokens`; else new names."""
    return _own_data(book, target) or _reference_data(book, target, tokens) or _no_data(target)


def words(target: Target) -> list[str]:
    """The parts of a name below its kind."""
    return target.name.split("/")[1:]


def newest(book: RecipeBook, target: Target, kind: str) -> list[Target]:
    """The newest version of each artifact of `kind` that `target` may need: a fixed one needs fixed ones."""
    usable = (known for known in book.targets() if known.kind == kind and (target.is_dev or not known.is_dev))
    return list({known.name: known for known in usable}.values())


def likest(book: RecipeBook, target: Target, kind: str) -> Target | None:
    """The artifact of `kind` that shares most words with the name of `target`, if any."""
    shared = {known: len(set(words(target)) & set(words(known))) for known in newest(book, target, kind)}
    best = max(shared, key=lambda known: shared[known], default=None)
    return best if best and shared[best] else None


def _own_data(book: RecipeBook, target: Target) -> RunData | None:
    own = words(target)[0]
    sets = [known for known in newest(book, target, "tokenized") if own in words(known)]
    measured = [known for known in sets if words(known)[-1] in VALIDATION_WORDS]
    trained = [known for known in sets if known not in measured]
    if not trained:
        return None
    first = book.load(trained[0])
    assert isinstance(first, TokenizedRecipe)
    names = {known: "/".join(word for word in words(known) if word != own) or own for known in sets}
    return RunData(
        first.tokenizer,
        _vocabulary_size(book, first.tokenizer),
        {names[known]: (str(known), 1.0) for known in trained},
        {names[known]: str(known) for known in measured},
        mixture_block=256,
        attention_across_documents=False,
        origin="Every set in the same share.",
    )


def _reference_data(book: RecipeBook, target: Target, tokens: int) -> RunData | None:
    """The data of the smallest run that reads at least `tokens`, or else of the largest."""
    runs = [run for known in newest(book, target, "checkpoints") if (run := _readable(book, known))]
    if not runs:
        return None
    enough = [run for run in runs if _tokens(run[1]) >= tokens]
    pick = min if enough else max
    known, recipe = pick(enough or runs, key=lambda run: _tokens(run[1]))
    times = tokens / _tokens(recipe)
    more = f", which reads {1 / times:.0%} of what this run does: check their token budgets" if times > 1 else ""
    return RunData(
        recipe.data.tokenizer,
        _vocabulary_size(book, recipe.data.tokenizer),
        {name: (component.target, component.weight) for name, component in recipe.data.train.items()},
        recipe.measure.validation.sets if recipe.measure.validation else {},
        recipe.data.mixture_block,
        recipe.data.attention_across_documents,
        f"As in {known}{more}.",
    )


def _readable(book: RecipeBook, target: Target) -> tuple[Target, CheckpointRecipe] | None:
    """A run to follow; one that is wrong, or on a missing tokenizer, is no example: its own build will say why."""
    try:
        recipe = book.load(target)
        assert isinstance(recipe, CheckpointRecipe)
        _vocabulary_size(book, recipe.data.tokenizer)
    except RecipeError:
        return None
    return target, recipe


def _tokens(recipe: CheckpointRecipe) -> int:
    return recipe.steps * recipe.global_batch_size * recipe.data.sequence_length


def _no_data(target: Target) -> RunData:
    own = words(target)[0]
    train, validation = (f"tokenized/{own}/{part}/{target.version}" for part in ("train", "validation"))
    return RunData(
        f"tokenizers/{own}/{target.version}",
        DEFAULT_VOCABULARY,
        {"train": (train, 1.0)},
        {"validation": validation},
        mixture_block=256,
        attention_across_documents=False,
        origin="These have no recipes yet: make them with `marin-build new`, or name others.",
    )


def _vocabulary_size(book: RecipeBook, tokenizer: str) -> int:
    recipe = book.load(parse_target(tokenizer))
    assert isinstance(recipe, TokenizerRecipe)
    return recipe.tokenizer.vocabulary_size
