"""Causal attention with grouped queries and segments, behind one function with several backends.

    B batch   T tokens   H query heads   G key/value heads   R = H / G queries a group   K head dimension
    t queries of a block   s keys that a block can see

A query attends to itself and to earlier tokens of the same segment. All backends compute the same formula, with softmax
in float32: `reference` in plain form, all T × T scores at once, for tests; `block` in blocks of queries, on any device;
`cudnn` and `splash` by kernels of GPUs and TPUs (`kernels.py`).
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from marin_build.errors import RequestError
from marin_build.model import kernels

Backend = Literal["auto", "block", "cudnn", "splash", "reference"]
PLATFORM_OF_KERNEL = {"cudnn": "gpu", "splash": "tpu"}

BLOCK_ROWS = 64
"""Queries a block. Small tiles of scores stay in the cache of a CPU: there attention took 1.2 times as long at 128."""
UNROLLED_BLOCKS = 8
"""Spans of blocks that are compiled one by one; each reads only the keys up to its end. The blocks of a span are a
loop, so that compile time does not grow with T."""

HIDDEN = -1e30
"""Score of a key that may not be seen; finite, so that the rows of padding, which see nothing, are no NaN."""


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None, backend: Backend = "auto"
) -> jax.Array:
    """Attend [B, T, H, K] queries to [B, T, G, K] keys and values; returns [B, T, H, K].

    Args:
        segment_ids: [B, T] integers, or None where the whole row is one segment.
        backend: `auto` takes the kernel of the platform where it can run, else `block`.

    Raises:
        RequestError: the backend's kernel is of another platform.

    Source: Vaswani et al. 2017, equation 1; grouped queries: Ainslie et al. 2023.
    """
    if backend == "auto":
        backend = default_backend(query.shape[1], query.shape[3], query.dtype, segment_ids is not None)
    if PLATFORM_OF_KERNEL.get(backend, jax.default_backend()) != jax.default_backend():
        raise RequestError(
            f"attention backend {backend!r} needs a {PLATFORM_OF_KERNEL[backend]}; these devices are of the platform "
            f"{jax.default_backend()!r}\n  allowed here: auto, block"
        )
    return BACKENDS[backend](query, key, value, segment_ids)


def default_backend(tokens: int, head_dim: int, dtype: jnp.dtype, has_segments: bool) -> Backend:
    """The fastest backend that can run on this process's platform."""
    if jax.default_backend() == "tpu":
        return "splash"
    if jax.default_backend() == "gpu" and kernels.cudnn_can_run(tokens, head_dim, dtype, has_segments):
        return "cudnn"
    return "block"


def _reference(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """The plain formula."""
    repeats = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
    scores = jnp.einsum("bthk,bshk->bhts", query, key, preferred_element_type=jnp.float32) / query.shape[-1] ** 0.5
    visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    if segment_ids is not None:
        visible = visible & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    probabilities = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshk->bthk", probabilities.astype(value.dtype), value)


def _block(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Blocks of queries that read the keys up to their end; each is rematerialised, so no T × T array ever exists."""
    batch, tokens, heads, head_dim = query.shape
    groups = key.shape[2]
    query = query.reshape(batch, tokens, groups, heads // groups, head_dim).transpose(0, 2, 1, 3, 4)
    key, value = key.transpose(0, 2, 1, 3), value.transpose(0, 2, 1, 3)
    rows = BLOCK_ROWS * -(-tokens // (BLOCK_ROWS * UNROLLED_BLOCKS))
    mixed = []
    for start in range(0, tokens, rows):
        end = min(start + rows, tokens)
        segments = (None, None) if segment_ids is None else (segment_ids[:, start:end], segment_ids[:, :end])
        mixed.append(_span(query[:, :, start:end], key[:, :, :end], value[:, :, :end], *segments, start))
    return jnp.concatenate(mixed, axis=2).transpose(0, 2, 1, 3, 4).reshape(batch, tokens, heads, head_dim)


def _span(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_segments: jax.Array | None,
    key_segments: jax.Array | None,
    first_row: int,
) -> jax.Array:
    """Attention of the queries [B, G, rows, R, K] from `first_row` on, one block of BLOCK_ROWS at a time."""
    block = jax.checkpoint(_rows)
    rows = query.shape[2]
    if rows <= BLOCK_ROWS:
        return block(query, key, value, query_segments, key_segments, first_row)
    padding = -rows % BLOCK_ROWS

    def cut(x: jax.Array, axis: int) -> jax.Array:
        x = jnp.pad(x, [(0, padding if dimension == axis else 0) for dimension in range(x.ndim)])
        blocks = x.reshape(*x.shape[:axis], -1, BLOCK_ROWS, *x.shape[axis + 1 :])
        return jnp.moveaxis(blocks, axis, 0)

    starts = first_row + jnp.arange(0, rows, BLOCK_ROWS)
    segments = None if query_segments is None else cut(query_segments, 1)
    mixed = jax.lax.map(
        lambda part: block(part[0], key, value, part[1], key_segments, part[2]), (cut(query, 2), segments, starts)
    )
    return jnp.moveaxis(mixed, 0, 2).reshape(*query.shape[:2], rows + padding, *query.shape[3:])[:, :, :rows]


def _rows(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_segments: jax.Array | None,
    key_segments: jax.Array | None,
    first_row: jax.Array | int,
) -> jax.Array:
    """Attention of the queries [B, G, t, R, K] at positions `first_row`… to keys and values [B, G, s, K] at 0…

    The queries of a group are rows of one matrix product. Scores are exponentiated first and normalised after the
    product with the values, which spares a pass over them; the shift by the maximum changes nothing but the range.
    """
    batch, groups, rows, repeats, head_dim = query.shape
    product = partial(jnp.einsum, preferred_element_type=query.dtype)
    scores = product("bgnk,bgsk->bgns", query.reshape(batch, groups, rows * repeats, head_dim), key)
    scores = scores.reshape(batch, groups, rows, repeats, -1).astype(jnp.float32) * head_dim**-0.5
    visible = (first_row + jnp.arange(rows))[:, None, None] >= jnp.arange(key.shape[2])
    if query_segments is not None:
        visible = visible & (query_segments[:, None, :, None, None] == key_segments[:, None, None, None, :])
    scores = jnp.where(visible, scores, HIDDEN)
    exponentials = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    weights = exponentials.astype(value.dtype).reshape(batch, groups, rows * repeats, -1)
    mixed = product("bgns,bgsk->bgnk", weights, value).reshape(query.shape)
    return (mixed / exponentials.sum(axis=-1, keepdims=True)).astype(query.dtype)


BACKENDS = {"block": _block, "reference": _reference, "cudnn": kernels.cudnn, "splash": kernels.splash}
