"""The data of a training, opened and checked before anything is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from marin_build.artifact.context import BuildContext, Dependency
from marin_build.data.foreign_cache import open_set
from marin_build.data.held_out import sign_of_held_out
from marin_build.data.loader import TrainingLoader, ValidationLoader
from marin_build.data.shards import TokenizedSet
from marin_build.data.tokenizer import LoadedTokenizer, load_tokenizer
from marin_build.errors import RequestError
from marin_build.recipe.mixture_needs import needs_of
from marin_build.recipe.mixture_schedule import schedule_of
from marin_build.recipe.schema import CheckpointRecipe
from marin_build.training.validation import parents


@dataclass(frozen=True)
class Inputs:
    training: Mapping[str, TokenizedSet]
    weights: Mapping[str, float]
    """Shares of the training sets in the run."""
    validation: Mapping[str, TokenizedSet]
    loader: TrainingLoader
    validation_loaders: Mapping[str, ValidationLoader]
    token_bytes: list[bytes]
    """The text of each id of the model, b"" for special tokens and for ids that no token has."""

    @property
    def byte_lengths(self) -> np.ndarray:
        """[V] int64."""
        return np.array([len(text) for text in self.token_bytes], np.int64)


def open_inputs(context: BuildContext, recipe: CheckpointRecipe, validation_batch_size: int) -> Inputs:
    """Open every token set of a recipe.

    Raises:
        RequestError: sets of another tokenizer, a vocabulary that is too small, sequences longer than the data, more
            epochs than a limit allows, or what cannot be measured.
        DamageError: a set whose files are not as its ledger says.
    """
    tokenizer = load_tokenizer(context.dependencies[recipe.data.tokenizer].folder)
    _check_vocabulary(recipe, tokenizer)
    training = {
        name: _open(context, recipe, f"data.train.{name}", component.target)
        for name, component in recipe.data.train.items()
    }
    _warn_of_held_out(context, recipe, training)
    sets = recipe.measure.validation.sets if recipe.measure.validation else {}
    validation = {
        name: _open(context, recipe, f"measure.validation.sets.{name}", target) for name, target in sets.items()
    }
    parents(validation)
    _check_masks(recipe, {f"data.train.{name}": token_set for name, token_set in training.items()})
    _check_masks(recipe, {f"measure.validation.sets.{name}": token_set for name, token_set in validation.items()})
    if recipe.measure.baselines and not validation:
        raise RequestError("measure.baselines needs validation sets to be scored on, and measure.validation has none")
    loader = _training_loader(recipe, training)
    _check_limits(recipe, training)
    unused = [b""] * (recipe.model.vocab_size - tokenizer.vocab_size)
    return Inputs(
        training=training,
        weights=_weights(recipe, loader),
        validation=validation,
        loader=loader,
        validation_loaders={
            name: _validation_loader(recipe, name, token_set, validation_batch_size)
            for name, token_set in validation.items()
        },
        token_bytes=tokenizer.token_bytes() + unused,
    )


def _check_vocabulary(recipe: CheckpointRecipe, tokenizer: LoadedTokenizer) -> None:
    if tokenizer.vocab_size > recipe.model.vocab_size:
        raise RequestError(
            f"model.vocab_size {recipe.model.vocab_size} is smaller than the vocabulary of data.tokenizer: "
            f"{recipe.data.tokenizer} has {tokenizer.vocab_size} ids\n"
            f"  needs at least {tokenizer.vocab_size}"
        )


def _open(context: BuildContext, recipe: CheckpointRecipe, field: str, target: str) -> TokenizedSet:
    dependency = context.dependencies[target]
    _check_tokenizer(recipe, context.dependencies[recipe.data.tokenizer], field, dependency)
    token_set = open_set(dependency.folder, dependency.record)
    if token_set.vocab_size > recipe.model.vocab_size:
        raise RequestError(
            f"{field}: {target} has ids up to {token_set.vocab_size - 1}, "
            f"model.vocab_size is {recipe.model.vocab_size}\n  needs at least {token_set.vocab_size}"
        )
    return token_set


def _warn_of_held_out(context: BuildContext, recipe: CheckpointRecipe, training: Mapping[str, TokenizedSet]) -> None:
    for name, component in recipe.data.train.items():
        record = context.dependencies[component.target].record
        if sign := sign_of_held_out(record.get("recipe", {}), training[name].ledger):
            context.logger.warning(f"data.train.{name}: {component.target} looks held out for measuring: {sign}")


def _check_tokenizer(recipe: CheckpointRecipe, tokenizer: Dependency, field: str, token_set: Dependency) -> None:
    """A set must hold ids of the tokenizer that the run names: the same bytes, whatever its name."""
    used = [entry for entry in token_set.record["dependencies"] if entry["name"].startswith("tokenizers/")]
    if not any(entry["digest"] == tokenizer.record["digest"] for entry in used):
        names = ", ".join(f"{entry['name']}/{entry['version']} of digest {entry['digest']}" for entry in used) or "none"
        raise RequestError(
            f"{field}: {token_set.target} was made with another tokenizer than data.tokenizer\n"
            f"  its tokenizer: {names}\n"
            f"  data.tokenizer: {recipe.data.tokenizer} of digest {tokenizer.record['digest']}\n"
            f"  name token sets of this tokenizer, or make this one again: snakemake -f {token_set.target}"
        )


def _check_masks(recipe: CheckpointRecipe, sets: Mapping[str, TokenizedSet]) -> None:
    """Sets of which only some tokens are trained on are conversations, and one must not see another."""
    for field, token_set in sets.items():
        if not token_set.has_loss_mask:
            continue
        if recipe.data.attention_across_documents:
            raise RequestError(
                f"{field} is chat data, and data.attention_across_documents is true: "
                "each conversation would see those before it\n  write attention_across_documents: false"
            )
        if recipe.measure.baselines:
            raise RequestError(
                f"measure.baselines: {', '.join(recipe.measure.baselines)} scores whole documents, and {field} is chat "
                "data, of which only some tokens count\n  write baselines: []"
            )


def _training_loader(recipe: CheckpointRecipe, training: Mapping[str, TokenizedSet]) -> TrainingLoader:
    return TrainingLoader(
        training,
        schedule_of(recipe),
        sequence_length=recipe.data.sequence_length,
        segments=not recipe.data.attention_across_documents,
    )


def _check_limits(recipe: CheckpointRecipe, training: Mapping[str, TokenizedSet]) -> None:
    needs = needs_of(recipe, {name: token_set.tokens for name, token_set in training.items()})
    if problems := [need.problem for need in needs if need.problem]:
        raise RequestError("\n".join(problems))


def _weights(recipe: CheckpointRecipe, loader: TrainingLoader) -> Mapping[str, float]:
    """The share of each set in the run: its weight, or with several stages what all of them draw from it."""
    if not recipe.data.stages:
        return {name: component.weight for name, component in recipe.data.train.items()}
    return dict.fromkeys(recipe.data.train, 0) | loader.sequences_seen(recipe.steps)


def _validation_loader(
    recipe: CheckpointRecipe, name: str, token_set: TokenizedSet, batch_size: int
) -> ValidationLoader:
    try:
        return ValidationLoader(
            token_set,
            sequence_length=recipe.data.sequence_length,
            batch_size=batch_size,
            segments=not recipe.data.attention_across_documents,
        )
    except RequestError as error:
        raise RequestError(f"measure.validation.sets.{name}: {error}") from None
