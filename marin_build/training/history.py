"""What one attempt at a training tells the next, in the notes of each checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from marin_build.training.checkpoint import Restored
from marin_build.training.progress import Progress
from marin_build.training.state import TrainState
from marin_build.training.validation import Validator

Conditions = Mapping[str, Any]


@dataclass
class History:
    """What earlier attempts left, and what this one adds."""

    first: int
    """Step that this attempt begins at."""
    resumed_at: tuple[int, ...]
    """The steps that attempts resumed at, this one included."""
    seconds: float
    """Seconds of training before `first`."""
    problems: tuple[str, ...]
    """Damaged checkpoints that were met."""
    scored: Any
    """[step, names of the validation sets] of the last validation."""
    conditions: tuple[Conditions, ...]
    """What decides the bits of a step besides the recipe, where it changed: each with `after`, the step before."""

    @classmethod
    def after(cls, restored: Restored | None, now: Conditions) -> History:
        if restored is None:
            return cls(0, (), 0.0, (), None, ({"after": 0, **now},))
        notes = restored.notes
        before = notes.get("conditions", ())
        same = bool(before) and {**before[-1], "after": 0} == {"after": 0, **now}
        return cls(
            first=restored.step,
            resumed_at=(*notes.get("resumed_at", ()), restored.step),
            seconds=notes.get("seconds", 0.0),
            problems=(*notes.get("problems", ()), *restored.problems),
            scored=notes.get("scored"),
            conditions=(*before, *(() if same else ({"after": restored.step, **now},))),
        )

    def was_scored(self, validator: Validator) -> bool:
        """Whether the state that this attempt begins with was validated on the same sets."""
        return self.scored == [self.first, sorted(validator.loaders)]

    def score(self, step: int, validator: Validator, state: TrainState, progress: Progress) -> dict[str, float]:
        """The validation metrics of `step`; empty when a stop was requested meanwhile, and left to the next attempt."""
        with progress.paused():
            metrics = validator.validate(state.parameters)
        if metrics is not None:
            self.scored = [step, sorted(validator.loaders)]
        return metrics or {}

    def notes(self, progress: Progress) -> dict[str, Any]:
        return {
            "resumed_at": list(self.resumed_at),
            "seconds": self.seconds + progress.seconds,
            "problems": list(self.problems),
            "scored": self.scored,
            "conditions": list(self.conditions),
        }
