"""Makes some steps of a finished training again, from a state that it kept or from its seed, and compares the bits.

What the steps come to is compared with the lines of metrics.jsonl and with the digests of the states that were kept.
Steps have equal bits under equal conditions: devices, their use, compiler. Under others, numbers agree to a tolerance.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import optax

from marin_build.artifact.context import BuildContext
from marin_build.artifact.proof import Finding, Made, Sample
from marin_build.errors import RequestError, Stopped
from marin_build.recipe.schema import CheckpointMeasure, CheckpointRecipe, Execution
from marin_build.training.build import prepare
from marin_build.training.checkpoint import load_state, saved_with
from marin_build.training.execution import DEFAULT, conditions, use_compilation_cache
from marin_build.training.journal import METRICS
from marin_build.training.loop import CHECKPOINTS, Run, compile_steps, open_feed
from marin_build.training.metrics import read_metrics
from marin_build.training.optimizer import make_optimizer
from marin_build.training.state import TrainState, abstract_state, initial_state, state_digest

STATE = "digest of the state"
TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2}
"""Relative difference of loss and norms on other devices: sums come in another order, and Adam amplifies that."""


@dataclass(frozen=True)
class Compared:
    """One thing that a step came to."""

    step: int
    name: str
    again: float | str
    recorded: float | str
    distance: float
    """Relative: of numbers, or for a state of its parameters."""

    def __str__(self) -> str:
        return f"step {self.step}: {self.name} is {self.again} when made again and {self.recorded} in the artifact"


@dataclass(frozen=True)
class Kept:
    """What a finished training says of its steps."""

    made: Made
    states: tuple[int, ...]
    """Steps whose state was kept, rising; the last step is the last of them."""
    lines: Mapping[int, Mapping[str, Any]]
    """By step, the lines of metrics.jsonl that tell of an update."""

    @classmethod
    def of(cls, made: Made) -> Kept:
        made.check([METRICS])
        parts = [entry["path"].split("/") for entry in made.record.files]
        states = {int(part[1]) for part in parts if part[0] == CHECKPOINTS and part[1].isdecimal()}
        lines = read_metrics(made.folder / METRICS) if [METRICS] in parts else []  # else they were lost since
        return cls(made, tuple(sorted(states)), {line["step"]: line for line in lines if "train/loss" in line})

    def digest(self, step: int) -> str:
        """Digest of the state that was kept; that of the last step is the artifact's own."""
        if step == self.states[-1]:
            return self.made.record.digest
        return saved_with(self.made.folder / CHECKPOINTS / str(step))["state_digest"]

    def state(self, step: int, placed: TrainState) -> TrainState:
        """The state that was kept, on the devices."""
        return load_state((self.made.folder / CHECKPOINTS / str(step)).absolute(), placed)

    def check(self, steps: Collection[int]) -> None:
        """Raise DamageError unless the files of the states kept at `steps` are as recorded."""
        fronts = tuple(f"{CHECKPOINTS}/{step}/" for step in self.states if step in steps)
        self.made.check(e["path"] for e in self.made.record.files if e["path"].startswith(fronts))

    def choose_first(self, sample: Sample) -> int:
        """The step to begin at: 0 or one that was kept, so that something recorded is reached; at best a kept state.

        Raises:
            RequestError: there is none.
        """
        goals = {step for step in (*self.states, *self.lines)}
        needed = {first: min(goal for goal in goals if goal > first) - first for first in (0, *self.states[:-1])}
        fits = [s for s in needed if needed[s] <= sample.count <= self.states[-1] - s]
        if not fits:
            raise RequestError(
                f"{self.made.record.target} has {self.states[-1]:,} steps, kept {', '.join(map(str, self.states))}: "
                f"{sample.count:,} steps cannot be made again and compared\n  try --rebuild {min(needed.values())}"
            )
        best = [s for s in fits if any(s < state <= s + sample.count for state in self.states)]
        return random.Random(sample.seed).choice(best or fits)


def remake(context: BuildContext, made: Made, sample: Sample) -> Finding:
    """Make `sample.count` steps again."""
    recipe, kept = context.recipe, Kept.of(made)
    assert isinstance(recipe, CheckpointRecipe)
    first = kept.choose_first(sample)
    steps = range(first + 1, first + 1 + sample.count)
    kept.check(range(first, steps.stop))
    recorded = _conditions_of(made, steps)
    run = _run(context, recipe, recorded)
    use_compilation_cache(context.settings.compilation_cache)
    with jax.set_mesh(run.mesh):
        compared = list(_replay(run, kept, steps))
    now = conditions(run.execution, run.mesh)
    same = bool(recorded) and all({**there, "after": 0} == {"after": 0, **now} for there in recorded)
    return _judge(tuple(map(str, steps)), compared, same, TOLERANCE[recipe.precision.compute])


def _judge(steps: tuple[str, ...], compared: Sequence[Compared], same: bool, tolerance: float) -> Finding:
    different = [one for one in compared if one.again != one.recorded]
    if not different:
        return Finding("steps", steps)
    if same or different[0].step < int(steps[0]):  # a state that was read back has its bits on every device
        return Finding("steps", steps, str(different[0]))
    note = f"within {tolerance:g}: made on other devices or by another compiler"
    far = next((one for one in different if not one.distance <= tolerance), None)
    return Finding("steps", steps, f"{far} (not {note})") if far else Finding("steps", steps, equal=f"equal {note}")


def _conditions_of(made: Made, steps: range) -> list[Mapping[str, Any]]:
    """Under which conditions these steps were made; empty where that was not recorded."""
    listed, last = made.record.provenance.get("conditions", []), steps.stop - 1
    ends = [later["after"] for later in listed[1:]] + [last]
    return [there for there, end in zip(listed, ends, strict=False) if there["after"] < last and end >= steps[0]]


def _run(context: BuildContext, recipe: CheckpointRecipe, recorded: Sequence[Mapping[str, Any]]) -> Run:
    """As the steps were run, where the devices allow it, and without anything that is only measured."""
    measured = {"measure": CheckpointMeasure()}
    if recorded and _device_count(recorded[0]["mesh"]) == len(jax.devices()):
        execution = Execution.model_validate({**recorded[0]["execution"], "mesh": recorded[0]["mesh"]})
        unchanged = {"mesh": None, "micro_batch_size": None, "rematerialization": None}
        context = replace(context, settings=context.settings.model_copy(update=unchanged))
        measured["execution"] = {DEFAULT: execution}
    return prepare(replace(context, recipe=recipe.model_copy(update=measured)))


def _replay(run: Run, kept: Kept, steps: range) -> Iterator[Compared]:
    recipe, first = run.recipe, steps.start - 1
    optimizer = make_optimizer(recipe.optimizer, recipe.steps)
    graph, placed = abstract_state(recipe, run.execution, optimizer, run.mesh)
    state = kept.state(first, placed) if first else initial_state(recipe, run.execution, optimizer, placed)
    if first:
        yield Compared(first, STATE, state_digest(state), kept.digest(first), 0.0)
    train = compile_steps(run, graph, optimizer, placed, first).train
    with open_feed(run) as feed:
        for step in steps:
            if run.context.stop_requested():
                raise Stopped(f"{run.context.target}: stopped")
            state, measured = train(state, feed.batch(step - 1))
            for name, value in measured._asdict().items():
                if step in kept.lines:
                    again, recorded = float(value), kept.lines[step][f"train/{name}"]
                    yield Compared(step, f"train/{name}", again, recorded, _relative(abs(again - recorded), recorded))
            if step in kept.states:
                distance = _distance(state, kept.state(step, placed))
                yield Compared(step, STATE, state_digest(state), kept.digest(step), distance)


def _distance(again: TrainState, recorded: TrainState) -> float:
    difference = jax.tree.map(lambda a, b: a - b, again.parameters, recorded.parameters)
    return _relative(float(optax.tree.norm(difference)), float(optax.tree.norm(recorded.parameters)))


def _relative(difference: float, size: float) -> float:
    return difference / abs(size) if difference else 0.0


def _device_count(mesh: Mapping[str, int]) -> int:
    return mesh["data"] * mesh["fsdp"] * mesh["tensor"]
