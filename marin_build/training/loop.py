"""The training loop: from a seed, or from the newest whole checkpoint, to the last step.

Step s means: after s updates. The batch of update s is a function of the recipe and s alone, so resuming is arithmetic:
restore the state of step r, cut metrics.jsonl back to r, go on with batch r. On one kind of machine a run that was
killed any number of times ends with the bits of one that was not.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from marin_build.artifact.context import BuildContext, BuildResult
from marin_build.errors import Stopped
from marin_build.model.counting import flops_per_token, parameter_count
from marin_build.model.sharding import batch_sharding
from marin_build.recipe.schema import CheckpointRecipe, Execution
from marin_build.training.baseline import FIT_BYTES, byte_bigram_bits_per_byte
from marin_build.training.cadence import Cadence
from marin_build.training.checkpoint import Checkpoints
from marin_build.training.execution import conditions, micro_batches
from marin_build.training.feed import Feed
from marin_build.training.history import History
from marin_build.training.inputs import Inputs
from marin_build.training.journal import METRICS, Journal
from marin_build.training.optimizer import make_optimizer
from marin_build.training.peak import find_peak
from marin_build.training.progress import Progress
from marin_build.training.schedule import make_schedule
from marin_build.training.state import TrainState, abstract_state, initial_state, state_digest
from marin_build.training.step import TrainStep, ValidationStep, make_train_step, make_validation_step
from marin_build.training.validation import Validator
from marin_build.training.watch import Watch

CHECKPOINTS = "checkpoints"
BIGRAM = "baseline/byte_bigram/bpb"
SECONDS_BETWEEN_LOOKS = 0.2

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """A training that was found possible."""

    context: BuildContext
    recipe: CheckpointRecipe
    execution: Execution
    inputs: Inputs
    mesh: jax.sharding.Mesh
    validation_batch_size: int


def train(run: Run) -> BuildResult:
    """Train to the last step of the recipe. The context's mesh must be `run.mesh` (`jax.set_mesh`).

    Raises:
        Stopped: a signal came; the state was saved, and the same call goes on from it.
        NumericalError: a loss or a gradient norm is not a number.
        DamageError: no committed checkpoint is whole, or what was written cannot be read back.
    """
    recipe, context = run.recipe, run.context
    cadence = Cadence.of(recipe, context.settings)
    optimizer = make_optimizer(recipe.optimizer, recipe.steps)
    learning_rate = make_schedule(recipe.optimizer, recipe.steps)
    graph, placed = abstract_state(recipe, run.execution, optimizer, run.mesh)

    with _open_checkpoints(run, cadence) as checkpoints:
        # ---- Begin: at the newest whole checkpoint, or at the seed ---------------------------------------------------
        restored = checkpoints.restore(placed)
        history = History.after(restored, conditions(run.execution, run.mesh))
        state = restored.state if restored else initial_state(recipe, run.execution, optimizer, placed)
        context.logger.info("%s at step %d of %d", "resuming" if restored else "starting", history.first, recipe.steps)

        # ---- Compile: a program that does not fit the devices stops here ---------------------------------------------
        steps = compile_steps(run, graph, optimizer, placed, history.first)
        progress = _make_progress(run, history.first)
        validator = _make_validator(run, steps.validation)

        with Journal(context, recipe, history.first, progress) as journal:
            # ---- Validate where we begin, unless a checkpoint says that it was done ----------------------------------
            if cadence.validates(history.first) and not history.was_scored(validator):
                journal.write(history.first, history.score(history.first, validator, state, progress))
            _raise_if_stopped(run, history.first)

            # ---- Train -----------------------------------------------------------------------------------------------
            watch = Watch(run.inputs.loader, context.logs)
            saved_at = time.monotonic()
            with open_feed(run) as feed:
                for step in range(history.first + 1, recipe.steps + 1):
                    state, measured = steps.train(state, feed.batch(step - 1))
                    watch.add(step, measured)

                    if cadence.writes(step):
                        line = watch.settle() | progress.measure(step)
                        line["train/learning_rate"] = float(learning_rate(step - 1))
                        line["train/tokens"] = step * tokens_per_step(recipe)
                        if cadence.validates(step):
                            line |= history.score(step, validator, state, progress)
                        journal.write(step, line)

                    stop, overdue = _decide(run, step, not checkpoints.busy and cadence.is_overdue(saved_at))
                    if stop or overdue or cadence.saves(step):
                        watch.settle()
                        journal.sync()
                        checkpoints.save(step, state, history.notes(progress))
                        saved_at = time.monotonic()
                    if stop:
                        checkpoints.wait()
                        _raise_stopped(run, step)

            # ---- Finish: read back what was written, and compare with what a bigram can do ---------------------------
            checkpoints.wait()
            checkpoints.check(recipe.steps, state)
            history.problems += checkpoints.set_damaged_aside(recipe.steps, state)
            if recipe.measure.baselines:
                journal.write(recipe.steps, {BIGRAM: _byte_bigram(run)})
            metrics = journal.final(recipe.steps)
        _summarize(run, metrics)
        return BuildResult(
            metrics=metrics,
            made=(METRICS, f"{CHECKPOINTS}/"),
            digest=state_digest(state),
            outside_digest=(METRICS,),
            details=_details(run, history, progress),
            unlisted=tuple(f"{CHECKPOINTS}/{name}" for name in checkpoints.not_kept()),
            after_record=checkpoints.remove_not_kept,
        )


# ---- phases ----------------------------------------------------------------------------------------------------------


def tokens_per_step(recipe: CheckpointRecipe) -> int:
    return recipe.global_batch_size * recipe.data.sequence_length


def _open_checkpoints(run: Run, cadence: Cadence) -> Checkpoints:
    return Checkpoints(
        run.context.folder / CHECKPOINTS,
        identity={"fingerprint": run.context.fingerprint, "data": run.inputs.loader.plan_digest},
        is_kept=cadence.keeps,
        must_resume=run.context.must_resume,
        check_lease=run.context.check_lease,
        keep=lambda names, dropped: _keep(run.context, names, dropped),
        logger=run.context.logger,
    )


def _keep(context: BuildContext, names: list[str], dropped: list[str]) -> None:
    """Let checkpoints last, with the metrics as they are now: all lines up to their steps are among them."""
    steps, gone = ([f"{CHECKPOINTS}/{name}" for name in some] for some in (names, dropped))
    context.keep([*steps, *([METRICS] if (context.folder / METRICS).exists() else [])], gone)


def open_feed(run: Run) -> Feed:
    recipe = run.recipe
    return Feed(
        run.inputs.loader,
        steps=recipe.steps,
        batch_size=recipe.global_batch_size,
        vocab_size=recipe.model.vocab_size,
        mesh=run.mesh,
    )


@dataclass(frozen=True)
class Steps:
    """The compiled functions."""

    train: TrainStep
    validation: ValidationStep


def compile_steps(
    run: Run, graph: nnx.GraphDef, optimizer: optax.GradientTransformation, placed: TrainState, first: int
) -> Steps:
    """Compile for the shapes of the run. A run that has only to finish compiles what it needs when it needs it."""
    started, recipe = time.monotonic(), run.recipe
    parts = micro_batches(recipe, run.execution)
    training = make_train_step(graph, optimizer, z_loss=recipe.z_loss, micro_batches=parts)
    validation = make_validation_step(graph)
    if first == recipe.steps:
        return Steps(training, validation)
    lowered = training.lower(placed, _batch_shapes(run, recipe.global_batch_size, masked=run.inputs.loader.is_masked))
    compiled = _unless_stopped(run, first, lowered.compile)
    if run.inputs.validation:
        shapes = _batch_shapes(run, run.validation_batch_size, masked=True)
        validation = _unless_stopped(run, first, validation.lower(placed.parameters, shapes).compile)
    memory = compiled.memory_analysis()
    run.context.logger.info(
        "compiled in %.1f s; a step needs %s MB a device beside %s MB of state and batch",
        time.monotonic() - started,
        f"{memory.temp_size_in_bytes / 1e6:,.0f}",
        f"{memory.argument_size_in_bytes / 1e6:,.0f}",
    )
    return Steps(compiled, validation)


def _unless_stopped(run: Run, first: int, compilation: Callable[[], T]) -> T:
    """Compile in a thread, while this one hears signals: Python hears none before a call of C returns.

    Raises:
        Stopped: a signal came. There is nothing to save, and the compilation is left behind.
    """
    if jax.process_count() > 1:
        return compilation()
    result: concurrent.futures.Future[T] = concurrent.futures.Future()

    def compile() -> None:
        try:
            result.set_result(compilation())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=compile, name="compilation", daemon=True).start()
    while not concurrent.futures.wait([result], SECONDS_BETWEEN_LOOKS).done:
        if run.context.stop_requested():
            atexit.register(_end_beside_a_compilation)
            _raise_stopped(run, first)
    return result.result()


def _end_beside_a_compilation() -> None:
    """End this process at once: a compilation cannot be stopped, and aborts when the interpreter is taken down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(Stopped.exit_code)


def _batch_shapes(run: Run, rows: int, masked: bool) -> dict[str, jax.ShapeDtypeStruct]:
    length, sharding = run.recipe.data.sequence_length, batch_sharding(run.mesh)
    shapes = {"tokens": jax.ShapeDtypeStruct((rows, length + 1), jnp.int32, sharding=sharding)}
    if not run.recipe.data.attention_across_documents:
        shapes["segment_ids"] = shapes["tokens"]
    if masked:
        shapes["mask"] = jax.ShapeDtypeStruct((rows, length), jnp.bool_, sharding=sharding)
    return shapes


def _make_validator(run: Run, step: ValidationStep) -> Validator:
    # Several processes must all go through a validation, so only one that is alone stops in its midst.
    alone = jax.process_count() == 1
    return Validator(
        loaders=run.inputs.validation_loaders,
        step=step,
        byte_lengths=run.inputs.byte_lengths,
        batch_size=run.validation_batch_size,
        mesh=run.mesh,
        stop_requested=run.context.stop_requested if alone else lambda: False,
    )


def _make_progress(run: Run, first: int) -> Progress:
    peak, logger = find_peak(run.mesh.devices.flatten()), run.context.logger
    origin = peak.origin if peak else f"unknown for {run.mesh.devices.flat[0].device_kind}, so no utilization is shown"
    logger.info("peak: %s", origin)
    return Progress(
        first=first,
        steps=run.recipe.steps,
        tokens_per_step=tokens_per_step(run.recipe),
        flops_per_token=flops_per_token(run.recipe.model, run.recipe.data.sequence_length),
        peak=peak,
        logger=logger,
    )


def _decide(run: Run, step: int, overdue: bool) -> tuple[bool, bool]:
    """(stop, a checkpoint is overdue). Several processes decide together, every few steps."""
    mine = (run.context.stop_requested(), overdue)
    if jax.process_count() == 1:
        return mine
    if step % run.context.settings.log_every_steps:
        return False, False
    from jax.experimental import multihost_utils

    stop, overdue = multihost_utils.process_allgather(np.array(mine)).any(axis=0)
    return bool(stop), bool(overdue)


def _raise_if_stopped(run: Run, step: int) -> None:
    if jax.process_count() == 1 and run.context.stop_requested():
        _raise_stopped(run, step)


def _raise_stopped(run: Run, step: int) -> NoReturn:
    target, steps = run.context.target, run.recipe.steps
    if step == 0:
        raise Stopped(
            f"{target} was stopped before its first step, so nothing was saved\n  the same command starts anew"
        )
    raise Stopped(
        f"{target} was stopped at step {step} of {steps}, which is saved\n  the same command goes on from there"
    )


# ---- the end ---------------------------------------------------------------------------------------------------------


def _byte_bigram(run: Run) -> float:
    inputs = run.inputs
    return byte_bigram_bits_per_byte(inputs.training, inputs.weights, inputs.validation, inputs.token_bytes)


def _summarize(run: Run, metrics: Mapping[str, float]) -> None:
    logger = run.context.logger
    if "eval/bpb" not in metrics:
        return
    logger.info("final validation: %.4f bits per byte, loss %.4f", metrics["eval/bpb"], metrics["eval/loss"])
    if BIGRAM in metrics:
        logger.info(
            "byte-bigram model on the same text: %.4f bits per byte (counted on up to %d MiB of the training text)",
            metrics[BIGRAM],
            FIT_BYTES >> 20,
        )


def _details(run: Run, history: History, progress: Progress) -> dict[str, Any]:
    """How it went, for the record's provenance."""
    devices = run.mesh.devices.flatten()
    return {
        "devices": {"kind": devices[0].device_kind, "platform": devices[0].platform, "count": len(devices)},
        "processes": jax.process_count(),
        "mesh": dict(run.mesh.shape),
        "execution": run.execution.model_dump(mode="json"),
        "parameters": parameter_count(run.recipe.model),
        "tokens": run.recipe.steps * tokens_per_step(run.recipe),
        "epochs": run.inputs.loader.epochs(run.recipe.steps),
        "resumed_at": list(history.resumed_at),
        "conditions": list(history.conditions),
        "checkpoint_problems": list(history.problems),
        "training_seconds": round(history.seconds + progress.seconds, 3),
    }
