"""The devices as a mesh with the axes (data, fsdp, tensor), with errors that say what does not fit before JAX does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType

from marin_build.errors import RequestError
from marin_build.recipe.schema import LlamaModel, Mesh

AXES = ("data", "fsdp", "tensor")


def make_mesh(mesh: Mesh, devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    """A JAX mesh over all of `devices`, with axes of type Auto.

    Raises:
        RequestError: the sizes do not multiply to the number of devices.
    """
    sizes = mesh_sizes(mesh, len(devices))
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def mesh_sizes(mesh: Mesh, devices: int) -> tuple[int, int, int]:
    """Sizes of (data, fsdp, tensor) on this many devices, with -1 replaced by what is left.

    Raises:
        RequestError: the sizes do not multiply to the number of devices.
    """
    given = {axis: getattr(mesh, axis) for axis in AXES}
    product = math.prod(size for size in given.values() if size != -1)
    shown = ", ".join(f"{axis}: {size}" for axis, size in given.items())
    if -1 in given.values() and devices % product == 0:
        return tuple(devices // product if size == -1 else size for size in given.values())
    if product == devices:
        return tuple(given.values())
    needs = f"a multiple of {product}" if -1 in given.values() else f"{product}"
    raise RequestError(
        f"execution.mesh {{{shown}}} does not fit {devices} device{'s' * (devices != 1)}: it needs {needs}\n"
        f"  state sizes whose product is {devices}, or -1 on one axis for all that are left,\n"
        f"  in the recipe's execution block or with --config mesh='{{data: 1, fsdp: {devices}, tensor: 1}}'"
    )


def check_model_fits(model: LlamaModel, mesh: jax.sharding.Mesh) -> None:
    """Check that every dimension that the mesh splits is divisible by its axis.

    Raises:
        RequestError: names the model's field, the axis and both numbers.
    """
    split = {
        "num_attention_heads": "tensor",
        "num_key_value_heads": "tensor",
        "intermediate_size": "tensor",
        "vocab_size": "tensor",
        "hidden_size": "fsdp",
    }
    for field, axis in split.items():
        value, size = getattr(model, field), mesh.shape[axis]
        if value % size:
            raise RequestError(
                f"model.{field} {value} is not divisible by the mesh axis {axis} of {size} devices\n"
                f"  choose execution.mesh with {axis} a divisor of {value}"
            )


def check_batch_fits(field: str, sequences: int, mesh: jax.sharding.Mesh) -> None:
    """Check that a batch splits evenly over the devices that share it.

    Raises:
        RequestError: names the field, the number of sequences and the devices.
    """
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    if sequences % shards:
        raise RequestError(
            f"{field} {sequences} is not divisible by the {shards} devices that share a batch "
            f"(mesh data {mesh.shape['data']} × fsdp {mesh.shape['fsdp']})\n"
            f"  choose a multiple of {shards}, or an execution.mesh whose data × fsdp divides {sequences}"
        )
