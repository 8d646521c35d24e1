"""Looks at the loss and the norms of every step, and stops the training when one is not a finite number.

Reading a number makes the host wait for the device, so a step's numbers are read when the next step is under way.
Before anything is written or saved they are all read: no state that a bad number went into is ever saved.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from marin_build.data.durable import explained
from marin_build.data.loader import TrainingLoader
from marin_build.errors import NumericalError
from marin_build.training.step import Measured


class Watch:
    """Args:
    loader: its batch of an update, from 0, is dumped when that update fails.
    logs: folder for the dump.
    """

    def __init__(self, loader: TrainingLoader, logs: Path):
        self._loader, self._logs = loader, logs
        self._unread: tuple[int, Measured] | None = None
        self._last: dict[str, float] = {}

    def add(self, step: int, measured: Measured) -> None:
        """Take the numbers of the update that led to `step`, and look at those of the one before.

        Raises:
            NumericalError: those of the one before are not finite.
        """
        before, self._unread = self._unread, (step, measured)
        if before is not None:
            self._look(*before)

    def settle(self) -> dict[str, float]:
        """Look at the newest numbers, and return them as metrics.

        Raises:
            NumericalError: they are not finite.
        """
        newest, self._unread = self._unread, None
        if newest is not None:
            self._look(*newest)
        return self._last

    def _look(self, step: int, measured: Measured) -> None:
        self._last = {f"train/{name}": float(value) for name, value in measured._asdict().items()}
        for name, value in self._last.items():
            if not math.isfinite(value):
                raise NumericalError(self._message(step, name, value))

    def _message(self, step: int, name: str, value: float) -> str:
        numbers = ", ".join(f"{name} {value:.6g}" for name, value in self._last.items())
        return (
            f"{name} is {value} at step {step}: training stops, and nothing of this step was saved\n"
            f"  {numbers}\n"
            f"  its batch: {self._dump(step - 1)}\n"
            "  checkpoints of earlier steps are intact, but this recipe comes to the same number again: look at the\n"
            "  batch, or lower the rate, lengthen the warmup or clip lower in a new version (marin-build bump)"
        )

    def _dump(self, update: int) -> Path:
        """Write the batch of an update and where each row comes from, and return the path.

        A numpy .npz: `tokens`, `segment_ids` and `mask` where there are any, and for each row its `set` and the
        `window` of it.
        """
        batch, path = self._loader.batch(update), self._logs / f"batch-{update}.npz"
        sets, windows = zip(*self._loader.sources(update), strict=True)
        arrays = {"tokens": batch.tokens, "segment_ids": batch.segment_ids, "mask": batch.mask}
        arrays |= {"set": sets, "window": windows}
        with explained(path):
            self._logs.mkdir(parents=True, exist_ok=True)
            np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
        return path
