"""Builds `checkpoints/…`: everything that can be wrong is found before anything is compiled, then the loop runs."""

from __future__ import annotations

import jax
from orbax.checkpoint import v1 as orbax

from marin_build.artifact.context import Adopted, BuildContext, BuildResult
from marin_build.model.counting import parameter_count
from marin_build.recipe.schema import CheckpointRecipe
from marin_build.settings import Settings
from marin_build.training.checkpoint import first_problem, load_state
from marin_build.training.execution import choose_execution, micro_batches, use_compilation_cache
from marin_build.training.inputs import open_inputs
from marin_build.training.journal import METRICS
from marin_build.training.loop import CHECKPOINTS, Run, tokens_per_step, train
from marin_build.training.mesh import check_batch_fits, check_model_fits, make_mesh
from marin_build.training.metrics import read_metrics
from marin_build.training.optimizer import make_optimizer
from marin_build.training.state import abstract_state, state_digest


def build(context: BuildContext) -> BuildResult:
    """Train the model of `context.recipe` into `context.folder`, or go on training it.

    Raises:
        RequestError: sizes, data or devices that do not fit each other; what an accelerator cannot run.
        DamageError: damaged data, or no whole checkpoint where some were committed.
        Stopped, NumericalError: see `loop.train`.
    """
    run = prepare(context)
    _announce(run)
    use_compilation_cache(context.settings.compilation_cache)
    with jax.set_mesh(run.mesh):
        return train(run)


def prepare(context: BuildContext) -> Run:
    """Open the data and the devices, and check that recipe, data and devices fit."""
    recipe = context.recipe
    assert isinstance(recipe, CheckpointRecipe)
    execution = choose_execution(recipe, context.settings)
    validation_batch_size = execution.validation_batch_size or recipe.global_batch_size
    mesh = make_mesh(execution.mesh, jax.devices())
    check_model_fits(recipe.model, mesh)
    check_batch_fits("global_batch_size", recipe.global_batch_size, mesh)
    check_batch_fits("micro_batch_size", recipe.global_batch_size // micro_batches(recipe, execution), mesh)
    check_batch_fits("validation_batch_size", validation_batch_size, mesh)
    inputs = open_inputs(context, recipe, validation_batch_size)
    return Run(context, recipe, execution, inputs, mesh, validation_batch_size)


def _announce(run: Run) -> None:
    recipe, log = run.recipe, run.context.logger
    shape = " × ".join(f"{axis} {size}" for axis, size in run.mesh.shape.items())
    log.info(
        "%s parameters, %s tokens in %s steps of %s, on %d %s (%s)",
        f"{parameter_count(recipe.model):,}",
        f"{recipe.steps * tokens_per_step(recipe):,}",
        f"{recipe.steps:,}",
        f"{tokens_per_step(recipe):,}",
        run.mesh.size,
        run.mesh.devices.flat[0].device_kind,
        shape,
    )
    for line in run.inputs.loader.report(recipe.steps).splitlines():
        log.info("data: %s", line)


def check_adopted(adopted: Adopted) -> BuildResult:
    """Checkpoints whose files are as their manifests say, the last one with the state that the recipe ends with."""
    recipe = adopted.recipe
    assert isinstance(recipe, CheckpointRecipe)
    folder = adopted.folder / CHECKPOINTS
    steps = sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())
    if recipe.steps not in steps:
        raise adopted.refused(f"{CHECKPOINTS}/{recipe.steps}, the last step of its recipe, is missing; it has {steps}")
    for step in steps:
        if problem := first_problem(folder / str(step)):
            raise adopted.refused(f"{CHECKPOINTS}/{step}: {problem}")
    metadata = orbax.checkpointables_metadata(folder / str(recipe.steps)).custom_metadata
    made_from = metadata["identity"]["fingerprint"]
    if made_from != adopted.fingerprint:
        raise adopted.refused(f"it was trained from another recipe: fingerprint {made_from}, not {adopted.fingerprint}")
    mesh = make_mesh(choose_execution(recipe, Settings()).mesh, jax.devices())
    optimizer = make_optimizer(recipe.optimizer, recipe.steps)
    with jax.set_mesh(mesh):
        _, placed = abstract_state(recipe, choose_execution(recipe, Settings()), optimizer, mesh)
        digest = state_digest(load_state(folder / str(recipe.steps), placed))
    if digest != metadata["state_digest"]:
        raise adopted.refused("the state read back is not the state that was saved")
    lines = read_metrics(adopted.folder / METRICS) if METRICS in adopted.files else []
    last = lines[-1] if lines and lines[-1].get("step") == recipe.steps else {}
    metrics = {name: value for name, value in last.items() if name != "step"}
    return BuildResult(metrics=metrics, digest=digest, outside_digest=(METRICS,))
