"""Attention kernels of accelerators, reached through JAX's public functions, and when each can be used.

    B batch   T tokens   H query heads   G key/value heads   K head dimension

`cudnn` is NVIDIA's fused attention, `splash` a Pallas kernel for TPUs that skips what the causal mask hides. Their
modules are imported when they are first used, since importing them is slow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from marin_build.model.sharding import partition_spec

SPLASH_TILES = (512, 256, 128)
"""Tile edges in order of preference; the kernel needs one that divides the (padded) number of tokens."""


def cudnn_can_run(tokens: int, head_dim: int, dtype: jnp.dtype, has_segments: bool) -> bool:
    """Whether cuDNN has a kernel for it: 16-bit types, head dimensions that are multiples of 8 up to 128."""
    sixteen_bits = dtype in (jnp.bfloat16, jnp.float16)
    return sixteen_bits and head_dim % 8 == 0 and head_dim <= 128 and not (has_segments and tokens % 2)


def cudnn(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """cuDNN's attention. With segments it is given their mask [B, 1, T, T], once for all heads."""
    mask = None if segment_ids is None else segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True, implementation="cudnn")


def splash(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None, interpret: bool = False
) -> jax.Array:
    """The TPU kernel, on each device's rows and heads; `interpret` runs it on a CPU, slowly, for tests."""
    tokens = query.shape[1]
    scaled = (query.astype(jnp.float32) * query.shape[-1] ** -0.5).astype(query.dtype)
    arrays = [_padded(x) for x in (scaled, key, value)] + [segment_ids if segment_ids is None else _padded(segment_ids)]
    return _on_each_device(partial(_splash_rows, interpret=interpret), segment_ids is not None)(*arrays)[:, :tokens]


def _padded(x: jax.Array) -> jax.Array:
    """Tokens (axis 1) padded to the smallest tile; causality hides what is added at the end."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % SPLASH_TILES[-1])] + [(0, 0)] * (x.ndim - 2))


def _on_each_device(function: Callable[..., jax.Array], has_segments: bool) -> Callable[..., jax.Array]:
    """The function on each device's part of the batch and the heads: XLA cannot split a kernel by itself."""
    if jax.sharding.get_abstract_mesh().empty:
        return function
    heads = partition_spec(("batch", None, "heads", None))
    segments = partition_spec(("batch", None)) if has_segments else PartitionSpec()
    return jax.shard_map(function, in_specs=(heads, heads, heads, segments), out_specs=heads, check_vma=False)


def _splash_rows(
    query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None, interpret: bool
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu import splash_attention as library

    tokens, heads = query.shape[1:3]
    tile = next(size for size in SPLASH_TILES if tokens % size == 0)
    parts = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    kernel = library.make_splash_mha(
        library.MultiHeadMask([library.CausalMask((tokens, tokens))] * heads),
        block_sizes=library.BlockSizes(**{f"block_{part}": tile for part in parts}),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )

    def row(query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array | None) -> jax.Array:
        return kernel(query, key, value, None if ids is None else library.SegmentIds(q=ids, kv=ids))

    heads_first = (x.transpose(0, 2, 1, 3) for x in (query, key, value))
    return jax.vmap(row)(*heads_first, segment_ids).transpose(0, 2, 1, 3)
