"""Where what is measured goes: metrics.jsonl first, then Weights & Biases and the progress line.

With several processes, process 0 alone writes.
"""

from __future__ import annotations

from typing import Any

import jax

from marin_build.artifact.context import BuildContext
from marin_build.recipe.schema import CheckpointRecipe
from marin_build.training.metrics import MetricsFile
from marin_build.training.progress import Progress
from marin_build.training.tracker import Tracker

METRICS = "metrics.jsonl"


class Journal:
    """The metrics of one attempt, from `first` on. Use as a context."""

    def __init__(self, context: BuildContext, recipe: CheckpointRecipe, first: int, progress: Progress):
        self._context, self._progress = context, progress
        self._writes = jax.process_index() == 0
        if not self._writes:
            return
        self._file = MetricsFile(context.folder / METRICS, keep_through=first, logger=context.logger)
        self._tracker = Tracker(
            context.settings,
            name=str(context.target),
            run_id=f"{str(context.target).replace('/', '-')}-{context.fingerprint[:8]}",
            config=recipe.model_dump(mode="json"),
            logger=context.logger,
        )

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Write what was measured at `step`; what was measured there before stays."""
        if not self._writes:
            return
        self._context.check_lease()
        self._file.write(step, metrics)
        self._tracker.log(step, metrics)
        if "train/loss" in metrics:
            self._progress.show(step, metrics)
        if "eval/bpb" in metrics:
            self._context.logger.info(
                "validation at step %d: %.4f bits per byte, loss %.4f", step, metrics["eval/bpb"], metrics["eval/loss"]
            )

    def final(self, step: int) -> dict[str, float]:
        """The metrics of the line of `step`, the last."""
        if not self._writes or self._file.last.get("step") != step:
            return {}
        return {name: value for name, value in self._file.last.items() if name != "step"}

    def sync(self) -> None:
        """Bring all lines to the disk."""
        if self._writes:
            self._file.sync()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self._writes:
            self._file.close()
            self._tracker.finish(exit_code=0 if kind is None else 1)
