"""The layers of the Llama family: RMS norm, rotary embedding, attention, SwiGLU MLP.

    B batch   T tokens   D model   H query heads   G key/value heads   K head dimension   F MLP

Parameters are float32 and cast where they are used; norms and the rotary embedding are computed in float32. Matrices
are [input, output] and drawn from normal(0, initializer_range), all of them, as in Hugging Face; scales of norms
start at 1.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import jax
import jax.numpy as jnp
from flax import nnx

from marin_build.model.attention import Backend, attention
from marin_build.recipe.schema import Llama3RopeScaling, LlamaModel


def whole_precision(dtype: jnp.dtype) -> AbstractContextManager[object]:
    """Within it float32 matrices are multiplied in float32; by default accelerators keep 8 to 11 bits of each entry."""
    return jax.default_matmul_precision("float32") if dtype == jnp.float32 else nullcontext()


def normal_matrix(rngs: nnx.Rngs, shape: tuple[int, ...], initializer_range: float) -> nnx.Param:
    """A float32 parameter from normal(0, initializer_range)."""
    return nnx.Param(initializer_range * jax.random.normal(rngs.params(), shape, jnp.float32))


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x²) + epsilon) × scale, over the last dimension.

    Source: Zhang and Sennrich 2019, equation 4.
    """

    def __init__(self, size: int, epsilon: float):
        self.epsilon = epsilon
        self.scale = nnx.Param(jnp.ones((size,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.epsilon)
        return (x32 * inverse).astype(x.dtype) * self.scale[...].astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention with grouped queries and rotary positions."""

    def __init__(self, config: LlamaModel, *, backend: Backend = "auto", rngs: nnx.Rngs):
        self.head_dim = config.head_dim
        self.backend = backend
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.query = normal_matrix(rngs, (config.hidden_size, query_size), config.initializer_range)
        self.key = normal_matrix(rngs, (config.hidden_size, key_size), config.initializer_range)
        self.value = normal_matrix(rngs, (config.hidden_size, key_size), config.initializer_range)
        self.output = normal_matrix(rngs, (query_size, config.hidden_size), config.initializer_range)

    def __call__(self, x: jax.Array, rotary: tuple[jax.Array, jax.Array], segment_ids: jax.Array | None) -> jax.Array:
        """[B, T, D] → [B, T, D]."""

        def heads(weight: nnx.Param) -> jax.Array:
            return (x @ weight[...].astype(x.dtype)).reshape(*x.shape[:2], -1, self.head_dim)

        query, key = rotate(heads(self.query), rotary), rotate(heads(self.key), rotary)
        mixed = attention(query, key, heads(self.value), segment_ids, self.backend)
        return mixed.reshape(*x.shape[:2], -1) @ self.output[...].astype(x.dtype)


class MLP(nnx.Module):
    """SwiGLU: (silu(x @ gate) × (x @ up)) @ down.

    Source: Shazeer 2020, equation 6.
    """

    def __init__(self, config: LlamaModel, *, rngs: nnx.Rngs):
        inward = (config.hidden_size, config.intermediate_size)
        self.gate = normal_matrix(rngs, inward, config.initializer_range)
        self.up = normal_matrix(rngs, inward, config.initializer_range)
        self.down = normal_matrix(rngs, inward[::-1], config.initializer_range)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] → [B, T, D]."""
        gate, up = x @ self.gate[...].astype(x.dtype), x @ self.up[...].astype(x.dtype)
        return (jax.nn.silu(gate) * up) @ self.down[...].astype(x.dtype)


class Layer(nnx.Module):
    """One residual layer: attention, then MLP, each behind its norm."""

    def __init__(self, config: LlamaModel, *, backend: Backend = "auto", rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, backend=backend, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x: jax.Array, rotary: tuple[jax.Array, jax.Array], segment_ids: jax.Array | None) -> jax.Array:
        """[B, T, D] → [B, T, D]."""
        x = x + self.attention(self.attention_norm(x), rotary, segment_ids)
        return x + self.mlp(self.mlp_norm(x))


def rotary_tables(config: LlamaModel, tokens: int) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine [T, K / 2] of position × frequency, float32.

    Positions count from the row's start even where it holds several documents: only differences enter the scores.

    Source: Su et al. 2021, equation 15.
    """
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequencies = config.rope_theta**-exponents
    if config.rope_scaling is not None:
        frequencies = _llama3_frequencies(frequencies, config.rope_scaling)
    angles = jnp.arange(tokens, dtype=jnp.float32)[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _llama3_frequencies(frequencies: jax.Array, scaling: Llama3RopeScaling) -> jax.Array:
    """Divide low frequencies by the factor, keep high ones, blend between.

    Source: `_compute_llama3_parameters` of transformers, which follows the reference code of Llama 3.1.
    """
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = jnp.clip(kept, 0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotate(x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the pairs (i, i + K / 2) of [B, T, heads, K] by their position's angles."""
    cosine, sine = (table[None, :, None, :] for table in rotary)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)
