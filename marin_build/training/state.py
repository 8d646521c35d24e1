"""What a training carries from step to step: parameters and the optimizer's state, as plain trees of arrays.

Nothing else is state: the data of a step follows from the seed and the step's number, and the model has no randomness
after its start.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
import xxhash
from flax import nnx

from marin_build.model.parameters import path_text
from marin_build.model.sharding import parameter_shardings
from marin_build.model.transformer import abstract, initialize
from marin_build.recipe.schema import CheckpointRecipe, Execution


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Trees of arrays, or of ShapeDtypeStructs with shardings."""

    parameters: Any
    """float32, nested dictionaries under the paths of `model.parameters`."""
    optimizer: Any
    """The state of the optax transformation."""


def model_options(recipe: CheckpointRecipe, execution: Execution) -> dict[str, Any]:
    return {
        "compute_dtype": recipe.precision.compute,
        "rematerialization": execution.rematerialization,
        "scan_layers": execution.scan_layers,
    }


def abstract_state(
    recipe: CheckpointRecipe, execution: Execution, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> tuple[nnx.GraphDef, TrainState]:
    """The model's graph, and the shapes, types and shardings of the state, without making any array."""
    graph, parameters = abstract(recipe.model, **model_options(recipe, execution))
    shapes = TrainState(parameters, jax.eval_shape(optimizer.init, parameters))

    def place(shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    return graph, jax.tree.map(place, shapes, parameter_shardings(shapes, mesh))


def initial_state(
    recipe: CheckpointRecipe, execution: Execution, optimizer: optax.GradientTransformation, placed: TrainState
) -> TrainState:
    """The state before the first step, each array made in its place on the context's mesh.

    Args:
        placed: shapes and shardings, from `abstract_state`.
    """
    _, parameters = initialize(recipe.model, seed=recipe.seed, **model_options(recipe, execution))
    shardings = jax.tree.map(lambda shape: shape.sharding, placed.optimizer)
    return TrainState(parameters, jax.jit(optimizer.init, out_shardings=shardings)(parameters))


def tensor_entries(state: TrainState) -> list[dict[str, Any]]:
    """Path, type, shape and xxh3_128 of each tensor, sorted by path; the same whatever the mesh.

    The hash covers the values in row-major order, little-endian. With several processes all must call this together.
    """
    leaves = [(path_text(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)]
    return [_tensor_entry(path, leaf) for path, leaf in sorted(leaves, key=lambda item: item[0])]


def state_digest(state: TrainState) -> str:
    """32 hex digits over (path, type, shape, bytes) of every tensor."""
    canonical = json.dumps(tensor_entries(state), sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(canonical.encode())


def _tensor_entry(path: str, leaf: Any) -> dict[str, Any]:
    values = _on_host(leaf)
    data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    digest = xxhash.xxh3_128_hexdigest(data.data)
    return {"path": path, "dtype": values.dtype.name, "shape": list(values.shape), "xxh3_128": digest}


def _on_host(leaf: Any) -> np.ndarray:
    """The whole tensor in this process's memory; one tensor at a time is all that is ever held."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        from jax.experimental import multihost_utils

        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf)
