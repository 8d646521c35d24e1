"""When something is due: lines of metrics, validation, checkpoints. Step s is the number of updates that were made."""

from __future__ import annotations

import time
from dataclasses import dataclass

from marin_build.recipe.schema import CheckpointRecipe
from marin_build.settings import Settings


@dataclass(frozen=True)
class Cadence:
    """Every decision is a function of the step, but for rolling checkpoints by the clock."""

    steps: int
    log_every_steps: int
    validate_every_steps: int | None
    keep_every_steps: int | None
    rolling_steps: int | None
    rolling_seconds: float | None

    @classmethod
    def of(cls, recipe: CheckpointRecipe, settings: Settings) -> Cadence:
        validation = recipe.measure.validation
        minutes = settings.rolling_checkpoint_minutes
        return cls(
            steps=recipe.steps,
            log_every_steps=settings.log_every_steps,
            validate_every_steps=validation.every_steps if validation and validation.sets else None,
            keep_every_steps=recipe.measure.keep_every_steps,
            rolling_steps=settings.rolling_checkpoint_steps,
            rolling_seconds=None if minutes is None else minutes * 60,
        )

    def validates(self, step: int) -> bool:
        """At step 0, at every multiple, and at the end."""
        every = self.validate_every_steps
        return _is_multiple(step, every) or (every is not None and step == self.steps)

    def writes(self, step: int) -> bool:
        """Whether the step has a line of metrics."""
        return step % self.log_every_steps == 0 or step == self.steps or self.validates(step)

    def keeps(self, step: int) -> bool:
        """Whether the checkpoint of the step stays for good."""
        return step == self.steps or (step > 0 and _is_multiple(step, self.keep_every_steps))

    def saves(self, step: int) -> bool:
        """Whether a checkpoint of the step is saved, kept or rolling."""
        return self.keeps(step) or _is_multiple(step, self.rolling_steps)

    def is_overdue(self, saved_at: float) -> bool:
        """Whether the clock asks for a rolling checkpoint; `saved_at` is when the last save began, by `monotonic`."""
        return self.rolling_seconds is not None and time.monotonic() - saved_at >= self.rolling_seconds


def _is_multiple(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
