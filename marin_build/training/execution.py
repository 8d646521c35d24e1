"""How a training runs on this machine: the recipe's execution block for the platform, overridden by settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
from pydantic import ValidationError

from marin_build.artifact.digest import hash_bytes
from marin_build.artifact.provenance import package_versions
from marin_build.errors import RequestError
from marin_build.recipe.schema import CheckpointRecipe, Execution, Mesh
from marin_build.settings import Settings

DEFAULT = "default"
COMPILERS = ("jax", "jaxlib", "flax", "optax")
"""Packages that decide what a step is compiled to."""


def choose_execution(recipe: CheckpointRecipe, settings: Settings) -> Execution:
    """The block of `execution:` for the platform, or `default`, or the defaults; settings override its fields.

    Raises:
        RequestError: the setting `mesh` is no mesh.
    """
    chosen = recipe.execution.get(settings.platform) or recipe.execution.get(DEFAULT) or Execution()
    changes: dict[str, object] = {"mesh": _mesh(settings.mesh)} if settings.mesh is not None else {}
    changes |= {
        name: value
        for name in ("micro_batch_size", "rematerialization")
        if (value := getattr(settings, name)) is not None
    }
    return chosen.model_copy(update=changes)


def _mesh(sizes: dict[str, int]) -> Mesh:
    try:
        return Mesh.model_validate(sizes)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in ("mesh", *first["loc"]))
        raise RequestError(
            f"setting {field}: {first['msg']}; seen {sizes}\n  needs sizes for data, fsdp and tensor, -1 on at most one"
        ) from None


def micro_batches(recipe: CheckpointRecipe, execution: Execution) -> int:
    """Into how many parts the global batch is cut.

    Raises:
        RequestError: the micro-batch does not divide the global batch.
    """
    size = execution.micro_batch_size or recipe.global_batch_size
    if recipe.global_batch_size % size:
        divisors = [n for n in range(1, recipe.global_batch_size + 1) if recipe.global_batch_size % n == 0]
        raise RequestError(
            f"micro_batch_size {size} does not divide global_batch_size {recipe.global_batch_size}\n"
            f"  needs one of {', '.join(map(str, divisors))}"
        )
    return recipe.global_batch_size // size


def conditions(execution: Execution, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """What decides the bits of a step besides recipe and data: the devices, how they are used, and the compiler."""
    device = mesh.devices.flat[0]
    return {
        "device": _cpu_type() if device.platform == "cpu" else device.device_kind,
        "processes": jax.process_count(),
        "mesh": dict(mesh.shape),
        "execution": execution.model_dump(mode="json", exclude={"mesh"}),
        "packages": {name: found for name, found in package_versions().items() if name in COMPILERS},
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def use_compilation_cache(folder: str | None) -> None:
    """Keep compiled programs from run to run; JAX_COMPILATION_CACHE_DIR, if set, wins. A cache that fails only warns.

    On CPUs the entries hold machine code, so each type of CPU has its own folder.
    """
    if folder is None or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    path = Path(folder).expanduser() / (_cpu_type() if jax.default_backend() == "cpu" else jax.default_backend())
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _cpu_type() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "cpu"
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"cpu-{hash_bytes(flags.encode())[:8]}"
