"""Cross-entropy over the vocabulary that never holds the logits of a whole batch.

    B batch   T tokens   t tokens of a chunk   D model   V vocabulary   S parts of the batch on the mesh

The sequence is cut in chunks, and the logits of one chunk live at a time. The gradients are made in the same pass as
the loss, so the matrix product with the vocabulary is not repeated in the backward pass. Chunks lie along the
sequence, not along batch × sequence, so that the batch keeps its sharding. The gradient of the output embedding is
summed apart in each part of the batch, and over the parts once at the end, not once a chunk.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from marin_build.model.layers import whole_precision
from marin_build.model.sharding import batch_shards, constrain, gathered

CHUNK_TOKENS = {"cpu": 512}
CHUNK_TOKENS_OF_ACCELERATORS = 2048
"""Tokens a chunk and device. Their logits of 128,256 ids take 0.26 and 1.05 GB in float32. A chunk costs one pass over
the summed gradient of the output embedding, which accelerators notice and CPUs, whose caches are small, do not."""


class _Chunk(NamedTuple):
    hidden: jax.Array
    """[S, B / S, t, D]"""
    targets: jax.Array
    """[S, B / S, t]"""
    weights: jax.Array
    """[S, B / S, t] float32: 1 where the token counts, else 0."""


def cross_entropy(
    hidden: jax.Array,
    output_embedding: jax.Array,
    targets: jax.Array,
    mask: jax.Array | None = None,
    *,
    z_loss: float,
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sums over the unmasked tokens: (cross-entropy + z_loss × logsumexp², cross-entropy), in nats and float32.

    The first carries the gradient to `hidden` and `output_embedding`; the second is a measurement and carries none.

    Args:
        hidden: [B, T, D] in the compute type.
        output_embedding: [D, V] float32; cast to the compute type where it is used.
        targets: [B, T] ids.
        mask: [B, T], False where a token does not count; None: all count.
        z_loss: weight of logsumexp², which keeps the logits from drifting.
        chunk: tokens a row whose logits live at once; it need not divide T. None: `default_chunk`.

    Source: z-loss: Chowdhery et al. 2022 (PaLM), section 5.
    """
    weights = jnp.ones(targets.shape, jnp.float32) if mask is None else mask.astype(jnp.float32)
    chunk = min(chunk or default_chunk(hidden.shape[0]), hidden.shape[1])
    return _fused(hidden, output_embedding, targets, weights, z_loss, chunk)


def default_chunk(batch_size: int) -> int:
    """Tokens a row whose logits live at once: CHUNK_TOKENS over the rows of a device, at least 1."""
    rows = -(-batch_size // batch_shards())
    return max(1, CHUNK_TOKENS.get(jax.default_backend(), CHUNK_TOKENS_OF_ACCELERATORS) // rows)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _fused(hidden, output_embedding, targets, weights, z_loss, chunk):
    embedding = gathered(output_embedding, ("embed", "vocab"), hidden.dtype)

    def body(sums, part):
        total, nats, _ = _chunk_loss(part, embedding, z_loss)
        return (sums[0] + total, sums[1] + nats), None

    with whole_precision(hidden.dtype):
        sums, _ = jax.lax.scan(body, (jnp.float32(0), jnp.float32(0)), _chunks(hidden, targets, weights, chunk))
    return sums


def _fused_forward(hidden, output_embedding, targets, weights, z_loss, chunk):
    embedding = gathered(output_embedding, ("embed", "vocab"), hidden.dtype)
    parts = _chunks(hidden, targets, weights, chunk)

    def body(carry, part):
        total, nats, embedding_gradient = carry
        chunk_total, chunk_nats, logits_gradient = _chunk_loss(part, embedding, z_loss)
        embedding_gradient += jnp.einsum(
            "sbtd,sbtv->sdv", part.hidden, logits_gradient, preferred_element_type=jnp.float32
        )
        hidden_gradient = jnp.einsum("sbtv,dv->sbtd", logits_gradient, embedding)
        carry = (total + chunk_total, nats + chunk_nats, constrain(embedding_gradient, ("batch", None, "vocab")))
        return carry, constrain(hidden_gradient, ("batch", None, None, None))

    shape = (parts.hidden.shape[1], *output_embedding.shape)
    start = (jnp.float32(0), jnp.float32(0), constrain(jnp.zeros(shape, jnp.float32), ("batch", None, "vocab")))
    with whole_precision(hidden.dtype):
        (total, nats, embedding_gradient), hidden_gradient = jax.lax.scan(body, start, parts)
    embedding_gradient = constrain(embedding_gradient.sum(0), ("embed", "vocab")).astype(output_embedding.dtype)
    return (total, nats), (_unchunk(hidden_gradient, hidden.shape), embedding_gradient)


def _fused_backward(z_loss, chunk, residuals, cotangents):
    hidden_gradient, embedding_gradient = residuals
    scale, _ = cotangents
    return hidden_gradient * scale.astype(hidden_gradient.dtype), embedding_gradient * scale, None, None


_fused.defvjp(_fused_forward, _fused_backward)


def _chunk_loss(part: _Chunk, embedding: jax.Array, z_loss: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Both sums of a chunk, and the gradient of the first to its logits in the compute type.

    With p = softmax(logits) and L = logsumexp(logits), the gradient of L - logits[target] + z L² is
    p (1 + 2 z L) - onehot(target).
    """
    logits = jnp.einsum("sbtd,dv->sbtv", part.hidden, embedding, preferred_element_type=jnp.float32)
    logits = constrain(logits, ("batch", None, None, "vocab"))
    highest = logits.max(axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - highest)
    normalizer = exponentials.sum(axis=-1, keepdims=True)
    logsumexp = highest + jnp.log(normalizer)
    is_target = part.targets[..., None] == jnp.arange(logits.shape[-1])
    target_logit = jnp.where(is_target, logits, 0).sum(axis=-1)
    nats = (part.weights * (logsumexp[..., 0] - target_logit)).sum()
    total = nats + z_loss * (part.weights * jnp.square(logsumexp[..., 0])).sum()
    gradient = exponentials * ((1 + 2 * z_loss * logsumexp) / normalizer) - is_target
    return total, nats, (gradient * part.weights[..., None]).astype(part.hidden.dtype)


def _chunks(hidden: jax.Array, targets: jax.Array, weights: jax.Array, chunk: int) -> _Chunk:
    """Chunks on a new leading axis for the scan; the last is padded with tokens of weight 0."""
    batch, tokens = targets.shape
    padding = -tokens % chunk
    shards = batch_shards()

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(shards, batch // shards, (tokens + padding) // chunk, chunk, *x.shape[2:])
        return constrain(jnp.moveaxis(x, 2, 0), (None, "batch") + (None,) * (x.ndim - 2))

    return _Chunk(cut(hidden), cut(targets), cut(weights))


def _unchunk(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Undo `_chunks` for [chunks, S, B / S, t, D]."""
    batch, tokens, size = shape
    return constrain(jnp.moveaxis(x, 0, 2).reshape(batch, -1, size)[:, :tokens], ("batch", None, None))
