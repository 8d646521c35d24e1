"""Cross-entropy against optax and automatic differentiation of the plain formula, and the memory it takes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.test_util import check_grads

from marin_build.training.loss import CHUNK_TOKENS, cross_entropy, default_chunk

BATCH, TOKENS, MODEL, VOCAB = 3, 10, 8, 17


def inputs(dtype=jnp.float32, scale=1.0):
    """Hidden states, output embedding, targets, and a mask that hides some tokens and one whole row."""
    random = np.random.default_rng(0)
    hidden = jnp.asarray(scale * random.normal(size=(BATCH, TOKENS, MODEL)), dtype)
    embedding = jnp.asarray(random.normal(size=(MODEL, VOCAB)), jnp.float32)
    targets = jnp.asarray(random.integers(0, VOCAB, (BATCH, TOKENS)), jnp.int32)
    mask = random.random((BATCH, TOKENS)) < 0.7
    mask[1] = False
    return hidden, embedding, targets, jnp.asarray(mask)


def plain(hidden, embedding, targets, mask, z_loss):
    """The formula with all logits at once."""
    logits = (hidden @ embedding.astype(hidden.dtype)).astype(jnp.float32)
    weights = jnp.ones(targets.shape) if mask is None else mask
    nats = (weights * optax.softmax_cross_entropy_with_integer_labels(logits, targets)).sum()
    return nats + z_loss * (weights * jnp.square(jax.nn.logsumexp(logits, axis=-1))).sum(), nats


def values_and_gradients(function, hidden, embedding, *rest, **options):
    scaled = lambda hidden, embedding: (3 * function(hidden, embedding, *rest, **options)[0],) * 2  # noqa: E731
    gradients, total = jax.grad(scaled, argnums=(0, 1), has_aux=True)(hidden, embedding)
    return total / 3, function(hidden, embedding, *rest, **options)[1], *gradients


@pytest.mark.parametrize("chunk", [1, 3, 5, 7, 10, 64, None])
@pytest.mark.parametrize(("masked", "z_loss"), [(False, 0.0), (True, 0.01)])
def test_values_and_gradients_equal_the_plain_formula_whatever_the_chunk(chunk, masked, z_loss):
    hidden, embedding, targets, mask = inputs()
    rest = (targets, mask if masked else None)
    expected = values_and_gradients(plain, hidden, embedding, *rest, z_loss=z_loss)
    seen = values_and_gradients(cross_entropy, hidden, embedding, *rest, z_loss=z_loss, chunk=chunk)
    for mine, theirs in zip(seen, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-6, atol=2e-6)


def test_values_are_the_same_with_and_without_gradients():
    hidden, embedding, *rest = inputs()
    function = functools.partial(cross_entropy, z_loss=0.01, chunk=4)
    (total, nats), _ = jax.vjp(lambda hidden, embedding: function(hidden, embedding, *rest), hidden, embedding)
    np.testing.assert_allclose((total, nats), function(hidden, embedding, *rest), rtol=1e-6)


def test_the_gradient_agrees_with_finite_differences():
    hidden, embedding, targets, mask = inputs()
    function = lambda hidden, embedding: cross_entropy(hidden, embedding, targets, mask, z_loss=0.01, chunk=4)[0]  # noqa: E731
    check_grads(function, (hidden, embedding), order=1, modes=["rev"], atol=0.02, rtol=0.02)


def test_the_measured_nats_carry_no_gradient():
    hidden, embedding, targets, mask = inputs()
    gradient = jax.grad(lambda hidden: cross_entropy(hidden, embedding, targets, mask, z_loss=0.0)[1])(hidden)
    np.testing.assert_array_equal(gradient, 0)


def test_masked_tokens_have_no_gradient_even_where_their_target_is_nonsense():
    hidden, embedding, targets, mask = inputs()
    nonsense = jnp.where(mask, targets, -100)
    expected = values_and_gradients(cross_entropy, hidden, embedding, targets, mask, z_loss=0.01, chunk=4)
    seen = values_and_gradients(cross_entropy, hidden, embedding, nonsense, mask, z_loss=0.01, chunk=4)
    for mine, theirs in zip(seen, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert (np.abs(seen[2]).max(-1) > 0).tolist() == mask.tolist()


def test_a_batch_that_is_masked_whole_is_zero_not_nan():
    hidden, embedding, targets, _ = inputs()
    for result in values_and_gradients(
        cross_entropy, hidden, embedding, targets, jnp.zeros(targets.shape, bool), z_loss=0.01
    ):
        np.testing.assert_array_equal(result, 0)


def test_logits_in_the_thousands_neither_overflow_nor_vanish():
    hidden, embedding, targets, mask = inputs(scale=2000.0)
    expected = plain(hidden, embedding, targets, mask, 0.0)
    np.testing.assert_allclose(cross_entropy(hidden, embedding, targets, mask, z_loss=0.0), expected, rtol=1e-6)


def test_a_nan_in_a_hidden_state_reaches_the_loss():
    hidden, embedding, targets, _ = inputs()
    total, nats = cross_entropy(hidden.at[0, 0, 0].set(jnp.nan), embedding, targets, z_loss=0.0)
    assert np.isnan(total)
    assert np.isnan(nats)


def test_bfloat16_states_give_sums_in_float32_and_gradients_in_their_own_types():
    hidden, embedding, targets, mask = inputs(dtype=jnp.bfloat16)
    total, _, of_hidden, of_embedding = values_and_gradients(
        cross_entropy, hidden, embedding, targets, mask, z_loss=0.01, chunk=4
    )
    assert (total.dtype, of_hidden.dtype, of_embedding.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    exact = values_and_gradients(plain, hidden.astype(jnp.float32), embedding, targets, mask, z_loss=0.01)
    np.testing.assert_allclose(total, exact[0], rtol=2e-3)  # the output embedding is cast: 8 bits
    for mine, theirs in ((of_hidden, exact[2]), (of_embedding, exact[3])):
        assert np.linalg.norm(mine.astype(jnp.float32) - theirs) < 0.01 * np.linalg.norm(theirs)


def test_the_default_chunk_fills_its_tokens_with_the_rows_at_hand():
    assert default_chunk(1) == CHUNK_TOKENS["cpu"]
    assert default_chunk(16) == CHUNK_TOKENS["cpu"] // 16
    assert default_chunk(10_000) == 1


def test_the_logits_of_a_batch_are_never_held_at_a_vocabulary_of_128256():
    batch, tokens, model, vocab = 2, 1024, 32, 128_256
    shapes = (
        jax.ShapeDtypeStruct((batch, tokens, model), jnp.float32),
        jax.ShapeDtypeStruct((model, vocab), jnp.float32),
        jax.ShapeDtypeStruct((batch, tokens), jnp.int32),
    )
    all_logits = 4 * batch * tokens * vocab

    def temporary_bytes(function):
        gradient = jax.jit(jax.value_and_grad(lambda *arrays: function(*arrays)[0], argnums=(0, 1)))
        return gradient.lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    assert temporary_bytes(lambda *arrays: plain(*arrays, None, 1e-4)) > all_logits
    for chunk in (128, 100):  # a divisor of T, and none
        assert temporary_bytes(functools.partial(cross_entropy, z_loss=1e-4, chunk=chunk)) < all_logits / 2
    assert temporary_bytes(functools.partial(cross_entropy, z_loss=1e-4, chunk=16)) < all_logits / 10
