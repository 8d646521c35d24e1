"""Where arrays live: one table from logical axes to axes of the mesh, for parameters and activations alike.

The mesh has the axes `data` (batch is split, parameters repeated), `fsdp` (batch and parameters are split, parameters
are gathered at use) and `tensor` (heads, MLP and vocabulary are split). Its axes are of type Auto and it is always
the context's mesh (`jax.set_mesh`), on one device too. Activations are pinned at layer boundaries: left to
propagation alone XLA may split the embedding dimension instead of the batch, which was measured at 5 to 40 times the
memory.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from marin_build.model.parameters import parameter_at

BATCH_AXES = ("data", "fsdp")

MESH_AXES: dict[str, str | tuple[str, ...] | None] = {
    "batch": BATCH_AXES,
    "sequence": None,
    "layers": None,
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "table_vocab": "tensor",
    "table_embed": "fsdp",
}


def partition_spec(logical_axes: tuple[str | None, ...]) -> PartitionSpec:
    return PartitionSpec(*(MESH_AXES[axis] if axis else None for axis in logical_axes))


def constrain(x: jax.Array, logical_axes: tuple[str | None, ...]) -> jax.Array:
    """Pin `x` to the sharding of `logical_axes` on the context's mesh; without a mesh nothing happens."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(logical_axes))


def gathered(parameter: jax.Array, logical_axes: tuple[str | None, ...], dtype: jnp.dtype) -> jax.Array:
    """A parameter in the compute type, whole along what fsdp splits; cast first, so that half as much moves."""
    cast = constrain(parameter.astype(dtype), logical_axes)
    return constrain(cast, tuple(None if MESH_AXES.get(axis) == "fsdp" else axis for axis in logical_axes))


def batch_shards() -> int:
    """Parts that the context's mesh splits a batch into; 1 without a mesh."""
    sizes = jax.sharding.get_abstract_mesh().shape
    return sizes.get("data", 1) * sizes.get("fsdp", 1)


def parameter_shardings(tree: Any, mesh: Mesh) -> Any:
    """A tree of NamedShardings with the form of `tree`.

    `tree` holds parameters, or trees of their form (an optimizer's state), as arrays or ShapeDtypeStructs. What is no
    parameter, such as a step counter, is repeated on every device.
    """

    def sharding(key_path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        parameter = parameter_at(key_path)
        fits = parameter is not None and len(parameter.logical_axes) == len(leaf.shape)
        return NamedSharding(mesh, partition_spec(parameter.logical_axes) if fits else PartitionSpec())

    return jax.tree_util.tree_map_with_path(sharding, tree)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch [B, …] on its way to the devices."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))
