"""The optimizer: which parameters decay, by how much, and what the clip does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from marin_build.recipe.schema import AdamW, CosineSchedule
from marin_build.training.optimizer import decay_mask, make_optimizer


def recipe(**changes):
    values = dict(
        type="adamw",
        learning_rate=1e-2,
        beta1=0.9,
        beta2=0.95,
        epsilon=1e-8,
        weight_decay=0.5,
        no_weight_decay=["norms", "embeddings"],
        max_grad_norm=1.0,
        schedule=CosineSchedule(type="cosine", warmup_steps=0, min_lr_ratio=1.0),
    )
    return AdamW(**{**values, **changes})


def parameters():
    return {
        "embedding": jnp.ones((5, 4)),
        "layers": {"attention": {"query": jnp.ones((2, 4, 4))}, "attention_norm": {"scale": jnp.ones((2, 4))}},
        "final_norm": {"scale": jnp.ones(4)},
        "lm_head": jnp.ones((4, 5)),
    }


def update(recipe, gradients, parameters):
    optimizer = make_optimizer(recipe, steps=10)
    updates, _ = optimizer.update(gradients, optimizer.init(parameters), parameters)
    return optax.apply_updates(parameters, updates)


def decayed(no_weight_decay):
    """The parameters that change when every gradient is 0: only decay can move them."""
    before = parameters()
    after = update(recipe(no_weight_decay=no_weight_decay), jax.tree.map(jnp.zeros_like, before), before)
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), before, after)
    return {jax.tree_util.keystr(path, simple=True, separator="/") for path, m in jax.tree.leaves_with_path(moved) if m}


@pytest.mark.parametrize(
    ("no_weight_decay", "expected"),
    [
        (["norms", "embeddings"], {"layers/attention/query", "lm_head"}),
        (["norms", "embeddings", "lm_head"], {"layers/attention/query"}),
        (["embeddings"], {"layers/attention/query", "layers/attention_norm/scale", "final_norm/scale", "lm_head"}),
    ],
)
def test_only_the_groups_that_the_recipe_does_not_spare_decay(no_weight_decay, expected):
    assert decayed(no_weight_decay) == expected


def test_the_decay_is_decoupled_and_multiplied_by_the_learning_rate():
    before = parameters()
    after = update(recipe(), jax.tree.map(jnp.zeros_like, before), before)
    np.testing.assert_allclose(after["lm_head"], 1 - 1e-2 * 0.5, rtol=1e-6)


def test_gradients_above_the_norm_are_scaled_to_it_before_adam_sees_them():
    shapes = parameters()
    optimizer = make_optimizer(recipe(max_grad_norm=0.5), steps=10)
    _, state = optimizer.update(jax.tree.map(lambda p: 7 * p, shapes), optimizer.init(shapes), shapes)
    first_moment = optax.tree.get(state, "mu")
    np.testing.assert_allclose(optax.tree.norm(first_moment), 0.1 * 0.5, rtol=1e-5)


def test_gradients_below_the_norm_are_left_alone():
    shapes = parameters()
    optimizer = make_optimizer(recipe(max_grad_norm=1e6), steps=10)
    _, state = optimizer.update(shapes, optimizer.init(shapes), shapes)
    np.testing.assert_allclose(optax.tree.get(state, "mu")["lm_head"], 0.1, rtol=1e-6)


def test_without_a_maximum_nothing_is_clipped():
    shapes = parameters()
    optimizer = make_optimizer(recipe(max_grad_norm=None), steps=10)
    huge = jax.tree.map(lambda p: 1e4 * p, shapes)
    _, state = optimizer.update(huge, optimizer.init(shapes), shapes)
    np.testing.assert_allclose(optax.tree.get(state, "mu")["lm_head"], 1e3, rtol=1e-6)


def test_a_parameter_missing_from_the_table_is_found_at_once():
    with pytest.raises(AssertionError, match="adapter"):
        decay_mask({"adapter": jnp.ones(3)}, [])
