"""Causal attention with grouped queries and segments, behind one function with several backends.

    B batch   T tokens   H query heads   G key/value heads   R = H / G queries a group   K head dimension

A query attends to itself and to earlier tokens of the same segment. The backends compute the same formula:
`reference` in plain form, with all T × T scores, for tests; `block` in blocks of queries that read only the keys
before their end, each rematerialised, so that scores of one block live at a time.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

Backend = Literal["block", "reference"]

BLOCK_ROWS = 128
"""Queries a block: small tiles of scores stay in cache."""


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None, backend: Backend = "block"
) -> jax.Array:
    """Attend [B, T, H, K] queries to [B, T, G, K] keys and values; returns [B, T, H, K].

    Args:
        segment_ids: [B, T] integers, or None where the whole row is one segment.

    Source: Vaswani et al. 2017, equation 1; grouped queries: Ainslie et al. 2023.
    """
    batch, tokens, heads, head_dim = query.shape
    groups = key.shape[2]
    grouped = query.reshape(batch, tokens, groups, heads // groups, head_dim)
    return BACKENDS[backend](grouped, key, value, segment_ids).reshape(query.shape)


def _reference(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    return _rows(query, key, value, segment_ids, segment_ids, 0)


def _block(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    tokens, blocks = query.shape[1], []
    for start in range(0, tokens, BLOCK_ROWS):
        end = min(start + BLOCK_ROWS, tokens)
        of_query, of_key = (None, None) if segment_ids is None else (segment_ids[:, start:end], segment_ids[:, :end])
        rows = jax.checkpoint(_rows, static_argnums=(5,))
        blocks.append(rows(query[:, start:end], key[:, :end], value[:, :end], of_query, of_key, start))
    return jnp.concatenate(blocks, axis=1)


def _rows(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    query_segments: jax.Array | None,
    key_segments: jax.Array | None,
    first_row: int,
) -> jax.Array:
    """Attention of the queries [B, t, G, R, K] at positions `first_row`… to the keys [B, s, G, K] at positions 0…"""
    scores = jnp.einsum("btgrk,bsgk->bgrts", query, key).astype(jnp.float32) * query.shape[-1] ** -0.5
    rows = first_row + jnp.arange(query.shape[1])
    visible = rows[:, None] >= jnp.arange(key.shape[1])[None, :]
    if query_segments is not None:
        same = query_segments[:, :, None] == key_segments[:, None, :]
        visible = (visible & same)[:, None, None]
    scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
    return jnp.einsum("bgrts,bsgk->btgrk", jax.nn.softmax(scores, axis=-1).astype(value.dtype), value)


BACKENDS = {"block": _block, "reference": _reference}
