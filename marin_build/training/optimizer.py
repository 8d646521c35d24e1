"""AdamW as the recipe states it: clip by the global norm, Adam, decoupled decay by group, learning rate by step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import optax

from marin_build.model.parameters import parameter_at, path_text
from marin_build.recipe.schema import AdamW
from marin_build.training.schedule import make_schedule


def make_optimizer(recipe: AdamW, steps: int) -> optax.GradientTransformation:
    """Return the optimizer of a run of `steps` updates.

    The decay is multiplied by the learning rate: parameter -= rate × (adam + weight_decay × parameter). Clipping comes
    first, so that Adam's moments see the clipped gradient.

    Source: Loshchilov and Hutter 2019, algorithm 2; Pascanu et al. 2013 for the clip.
    """
    adamw = optax.adamw(
        make_schedule(recipe, steps),
        b1=recipe.beta1,
        b2=recipe.beta2,
        eps=recipe.epsilon,
        weight_decay=recipe.weight_decay,
        mask=lambda parameters: decay_mask(parameters, recipe.no_weight_decay),
    )
    if recipe.max_grad_norm is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(recipe.max_grad_norm), adamw)


def decay_mask(parameters: Any, no_weight_decay: Collection[str]) -> Any:
    """A tree of booleans with the form of `parameters`: True where the weight decays."""

    def decays(key_path: tuple[Any, ...], _: Any) -> bool:
        parameter = parameter_at(key_path)
        assert parameter is not None, f"{path_text(key_path)} is missing from the table of parameters"
        return parameter.group not in no_weight_decay

    return jax.tree_util.tree_map_with_path(decays, parameters)
