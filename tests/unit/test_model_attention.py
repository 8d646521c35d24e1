"""Attention: each backend against the plain formula, and what may see what."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from marin_build.errors import RequestError
from marin_build.model import attention as module
from marin_build.model import kernels
from marin_build.model.attention import attention

CASES = {
    "one token": (2, 1, 2, 2, 8),
    "one block": (2, 64, 4, 4, 8),
    "a last block that is not full": (2, 150, 4, 4, 8),
    "grouped queries": (2, 130, 6, 2, 16),
    "one key head": (1, 70, 4, 1, 8),
    "loops within spans, the last not full": (1, 8 * 64 + 200, 2, 1, 4),
}


def inputs(batch, tokens, heads, groups, head_dim, dtype=jnp.float32):
    """Query, key, value, the weights of the output in a scalar, and segment ids that start at 1."""
    random = np.random.default_rng(0)
    arrays = [random.normal(size=(batch, tokens, count, head_dim)) for count in (heads, groups, groups, heads)]
    segments = 1 + np.cumsum(random.random((batch, tokens)) < 0.05, axis=1)
    return *(jnp.asarray(array, dtype) for array in arrays), jnp.asarray(segments, jnp.int32)


def value_and_gradients(backend, query, key, value, weights, segment_ids):
    def scalar(query, key, value):
        mixed = backend(query, key, value, segment_ids)
        return (mixed.astype(jnp.float32) * weights).sum(), mixed

    (_, mixed), gradients = jax.jit(jax.value_and_grad(scalar, argnums=(0, 1, 2), has_aux=True))(query, key, value)
    return mixed, *gradients


def assert_as_reference(backend, arrays, segment_ids, tolerance):
    """Output and gradients differ by at most `tolerance` of the largest value."""
    expected = value_and_gradients(functools.partial(attention, backend="reference"), *arrays, segment_ids)
    seen = value_and_gradients(backend, *arrays, segment_ids)
    for mine, theirs in zip(seen, expected, strict=True):
        mine, theirs = np.asarray(mine, np.float32), np.asarray(theirs, np.float32)
        np.testing.assert_allclose(mine, theirs, atol=tolerance * max(np.abs(theirs).max(), 1))


@pytest.mark.parametrize("has_segments", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_blocks_equal_the_plain_formula(case, has_segments):
    *arrays, segments = inputs(*CASES[case])
    backend = functools.partial(attention, backend="block")
    assert_as_reference(backend, arrays, segments if has_segments else None, tolerance=2e-6)


def test_blocks_equal_the_plain_formula_in_bfloat16():
    *arrays, segments = inputs(2, 150, 4, 2, 16, dtype=jnp.bfloat16)
    # bfloat16 keeps 8 bits: 0.4% a rounding, and a few of them add up.
    assert_as_reference(functools.partial(attention, backend="block"), arrays, segments, tolerance=2e-2)


@pytest.mark.parametrize("has_segments", [False, True])
def test_the_tpu_kernel_interpreted_equals_the_plain_formula(has_segments):
    *arrays, segments = inputs(2, 150, 4, 2, 64)
    backend = functools.partial(kernels.splash, interpret=True)
    assert_as_reference(backend, arrays, segments if has_segments else None, tolerance=2e-6)


@pytest.mark.parametrize("backend", ["block", "reference"])
def test_a_token_sees_itself_and_earlier_tokens_of_its_segment_only(backend):
    query, key, value, _, _ = inputs(1, 100, 2, 1, 8)
    segments = jnp.asarray(np.repeat([7, 3], [40, 60])[None])
    row = 70

    def mixed(value):
        return attention(query, key, value, segments, backend)[0, row].sum()

    seen = np.abs(jax.grad(mixed)(value)).sum((0, 2, 3)) > 0
    np.testing.assert_array_equal(seen, [40 <= token <= row for token in range(100)])


@pytest.mark.parametrize("has_segments", [False, True])
def test_memory_grows_with_the_tokens_not_with_their_square(has_segments):
    tokens, heads = 4096, 4
    *arrays, segments = inputs(1, tokens, heads, 2, 8)
    shapes = (*arrays, segments if has_segments else None)

    def temporary_bytes(backend):
        function = functools.partial(value_and_gradients, functools.partial(attention, backend=backend))
        return jax.jit(function).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    scores = 4 * heads * tokens * tokens
    assert temporary_bytes("reference") > scores
    assert temporary_bytes("block") < scores / 8


def test_rows_that_see_nothing_but_padding_make_no_nan():
    """Long rows are padded to whole blocks; the padding has segment 0, which no key has."""
    query, key, value, weights, _ = inputs(1, 8 * 64 + 1, 2, 1, 4)
    segments = jnp.ones(query.shape[:2], jnp.int32)
    for array in value_and_gradients(
        functools.partial(attention, backend="block"), query, key, value, weights, segments
    ):
        assert np.isfinite(array).all()


@pytest.mark.parametrize(("backend", "platform"), [("cudnn", "gpu"), ("splash", "tpu")])
def test_a_kernel_of_another_platform_is_refused_by_name(backend, platform, monkeypatch):
    monkeypatch.setattr(module.jax, "default_backend", lambda: "cpu")
    query, key, value, _, _ = inputs(1, 8, 2, 1, 8)
    with pytest.raises(RequestError, match=f"'{backend}' needs a {platform}.*'cpu'"):
        attention(query, key, value, None, backend)


@pytest.mark.parametrize(
    ("platform", "dtype", "head_dim", "tokens", "chosen"),
    [
        ("cpu", jnp.bfloat16, 64, 128, "block"),
        ("tpu", jnp.float32, 64, 128, "splash"),
        ("gpu", jnp.bfloat16, 64, 128, "cudnn"),
        ("gpu", jnp.float32, 64, 128, "block"),
        ("gpu", jnp.bfloat16, 256, 128, "block"),
        ("gpu", jnp.bfloat16, 12, 128, "block"),
        ("gpu", jnp.bfloat16, 64, 127, "block"),
    ],
)
def test_the_backend_follows_the_platform_where_its_kernel_can_run(
    platform, dtype, head_dim, tokens, chosen, monkeypatch
):
    monkeypatch.setattr(module.jax, "default_backend", lambda: platform)
    assert module.default_backend(tokens, head_dim, jnp.dtype(dtype), has_segments=True) == chosen


def test_cudnn_is_asked_for_causal_attention_within_segments(monkeypatch):
    """Its kernel cannot run here: the same call is checked with JAX's own formula in its place."""
    plain = jax.nn.dot_product_attention
    asked = []

    def stand_in(*arrays, implementation, **options):
        asked.append(implementation)
        return plain(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    *arrays, segments = inputs(2, 40, 4, 2, 8)
    for ids in (segments, None):
        assert_as_reference(kernels.cudnn, arrays, ids, tolerance=2e-6)
    assert set(asked) == {"cudnn"}
