"""The pace of a training, and the one line that tells how it goes."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta

from marin_build.training.peak import Peak

SECONDS_BETWEEN_LINES = 5.0
"""So that fast steps do not fill the log; the first and the last line always come."""


class Progress:
    """Measures tokens a second and FLOP utilisation between two calls of `measure`, and prints the progress line.

    Time inside `paused()` (validation) does not count; a stall by a checkpoint does.
    """

    def __init__(
        self,
        *,
        first: int,
        steps: int,
        tokens_per_step: int,
        flops_per_token: float,
        peak: Peak | None,
        logger: logging.Logger,
    ):
        self._first, self._steps = first, steps
        self._tokens_per_step, self._flops_per_token, self._peak = tokens_per_step, flops_per_token, peak
        self._logger = logger
        self._start = self._measured_at = time.monotonic()
        self._measured_step = first
        self._paused = self._paused_before = 0.0
        self._printed_at = -SECONDS_BETWEEN_LINES

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._paused += time.monotonic() - start

    @property
    def seconds(self) -> float:
        """Seconds of training so far, without pauses."""
        return time.monotonic() - self._start - self._paused

    def measure(self, step: int) -> dict[str, float]:
        """The pace of the steps since the last call, after `step` updates."""
        now = time.monotonic()
        seconds = now - self._measured_at - (self._paused - self._paused_before)
        tokens_per_second = (step - self._measured_step) * self._tokens_per_step / max(seconds, 1e-9)
        self._measured_at, self._measured_step, self._paused_before = now, step, self._paused
        metrics = {"train/tokens_per_second": tokens_per_second}
        if self._peak:
            used = tokens_per_second * self._flops_per_token
            metrics["train/flops_utilization"] = used / self._peak.flops_per_second
        return metrics

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the progress line for the metrics of `step`."""
        now = time.monotonic()
        if now - self._printed_at < SECONDS_BETWEEN_LINES and step < self._steps:
            return
        self._printed_at = now
        self._logger.info("%s", self.line(step, metrics))

    def line(self, step: int, metrics: Mapping[str, float]) -> str:
        parts = [f"step {step}/{self._steps} {step / self._steps:6.1%}", f"loss {metrics['train/loss']:.4f}"]
        parts.append(f"{metrics['train/tokens_per_second']:,.0f} tokens/s")
        if "train/flops_utilization" in metrics:
            parts.append(f"{metrics['train/flops_utilization']:.1%} of peak FLOP/s")
        parts.append(f"ETA {self._remaining(step)}")
        return " | ".join(parts)

    def _remaining(self, step: int) -> timedelta:
        seconds_per_step = self.seconds / max(step - self._first, 1)
        return timedelta(seconds=round(seconds_per_step * (self._steps - step)))
