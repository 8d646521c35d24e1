"""What must agree between recipes, found before any work.

One tokenizer a run, a vocabulary that holds its ids, and conversations that do not see each other.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import TYPE_CHECKING

from marin_build.errors import RecipeError
from marin_build.recipe.document import Path, dotted
from marin_build.recipe.schema import CheckpointRecipe, TokenizedRecipe, TokenizerRecipe
from marin_build.recipe.sources import Chat
from marin_build.recipe.target import Target, parse_target

if TYPE_CHECKING:
    from marin_build.recipe.load import RecipeBook


def check_run(book: RecipeBook, target: Target, among: Container[str]) -> None:
    """Compare a run with those of its token sets and tokenizers that are `among` the targets to look at.

    Raises:
        RecipeError: with file and line, both values and what can be done.
    """
    recipe = book.load(target)
    if not isinstance(recipe, CheckpointRecipe):
        return
    for path, text in _token_sets(recipe):
        tokens = book.load(parse_target(text)) if text in among else None
        if isinstance(tokens, TokenizedRecipe) and tokens.tokenizer != recipe.data.tokenizer:
            raise RecipeError(
                f"{_place(book, target, path)}: {text!r} is tokenized with {tokens.tokenizer}, "
                f"this run's data.tokenizer is {recipe.data.tokenizer}"
            )
        if isinstance(tokens, TokenizedRecipe) and isinstance(tokens.format, Chat):
            _check_chat(book, target, recipe, text)
    tokenizer = book.load(parse_target(recipe.data.tokenizer)) if recipe.data.tokenizer in among else None
    size = recipe.model.vocab_size
    if isinstance(tokenizer, TokenizerRecipe) and size < tokenizer.tokenizer.vocabulary_size:
        raise RecipeError(
            f"{_place(book, target, ('model', 'vocab_size'))}: needs at least {tokenizer.tokenizer.vocabulary_size}, "
            f"the ids of {recipe.data.tokenizer}, seen {size}"
        )


def _check_chat(book: RecipeBook, target: Target, recipe: CheckpointRecipe, text: str) -> None:
    if recipe.data.attention_across_documents:
        raise RecipeError(
            f"{_place(book, target, ('data', 'attention_across_documents'))}: needs false, seen true: {text} is chat "
            "data, and each conversation would see those before it"
        )
    if recipe.measure.baselines:
        raise RecipeError(
            f"{_place(book, target, ('measure', 'baselines'))}: needs [], seen {recipe.measure.baselines}: they score "
            f"all of a text, and of {text}, which is chat data, only some tokens count"
        )


def _token_sets(recipe: CheckpointRecipe) -> Iterator[tuple[Path, str]]:
    for name, component in recipe.data.train.items():
        yield ("data", "train", name, "target"), component.target
    if recipe.measure.validation:
        for name, text in recipe.measure.validation.sets.items():
            yield ("measure", "validation", "sets", name), text


def _place(book: RecipeBook, target: Target, path: Path) -> str:
    document = book.document(target)
    return f"{document.file}:{document.line(path)}: {dotted(path)}"
