"""From the loader to the devices: each process makes its own rows, one thread works ahead, every id is checked.

B rows of the global batch   T tokens that are predicted
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from marin_build.data.loader import Batch, TrainingLoader
from marin_build.errors import DamageError
from marin_build.model.sharding import batch_sharding
from marin_build.training.step import DeviceBatch

BATCHES_AHEAD = 2


class Feed:
    """The training batches of the steps before `steps`, on the devices. Use as a context, which ends the thread."""

    def __init__(
        self, loader: TrainingLoader, *, steps: int, batch_size: int, vocab_size: int, mesh: jax.sharding.Mesh
    ):
        self._loader, self._steps, self._vocab_size = loader, steps, vocab_size
        self._place = placer(mesh, batch_size)
        self._rows = local_rows(mesh, batch_size)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="loader")
        self._ahead: dict[int, Future[Batch]] = {}

    def batch(self, step: int) -> DeviceBatch:
        """The batch of `step`; the ones after it are begun.

        Raises:
            DamageError: an id that the model has no embedding for.
        """
        for number in range(step, min(step + 1 + BATCHES_AHEAD, self._steps)):
            if number not in self._ahead:
                self._ahead[number] = self._thread.submit(self._make, number)
        return self._place(self._ahead.pop(step).result())

    def _make(self, step: int) -> Batch:
        batch = self._loader.batch(step, self._rows)
        check_ids(batch, self._vocab_size, lambda row: self._source(step, row))
        return batch

    def _source(self, step: int, row: int) -> str:
        name, window = self._loader.sources(step, self._rows)[row]
        return f"window {window} of {name}, in the batch of step {step}"

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: Any) -> None:
        self._thread.shutdown(cancel_futures=True)


def check_ids(batch: Batch, vocab_size: int, where: Callable[[int], str]) -> None:
    """Look at every id: the lookup on the device clamps an id that is too large, and trains on nonsense.

    Args:
        where: what to say of a row.

    Raises:
        DamageError: an id outside the vocabulary.
    """
    if batch.tokens.min() < 0 or batch.tokens.max() >= vocab_size:
        row, column = np.argwhere((batch.tokens < 0) | (batch.tokens >= vocab_size))[0]
        raise DamageError(
            f"id {batch.tokens[row, column]} is outside the vocabulary of {vocab_size} ids: {where(int(row))}\n"
            "  the token set was made for another vocabulary or is damaged: see marin-build verify --full"
        )


def placer(mesh: jax.sharding.Mesh, batch_size: int) -> Callable[[Batch], DeviceBatch]:
    """A function that puts this process's rows of a batch of `batch_size` rows on its devices."""
    sharding = batch_sharding(mesh)

    def place(batch: Batch) -> DeviceBatch:
        arrays = {"tokens": batch.tokens, "segment_ids": batch.segment_ids, "mask": batch.mask}
        return {
            name: jax.make_array_from_process_local_data(sharding, array, (batch_size, *array.shape[1:]))
            for name, array in arrays.items()
            if array is not None
        }

    return place


def local_rows(mesh: jax.sharding.Mesh, batch_size: int) -> slice:
    """The rows of a global batch that this process's devices hold."""
    places = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    rows = np.unique(np.concatenate([np.arange(batch_size)[index] for index in places]))
    first, last = int(rows[0]), int(rows[-1])
    assert len(rows) == last - first + 1, "the mesh gives one process rows that are not neighbours"
    return slice(first, last + 1)


def rows_of(batch: Batch, rows: slice) -> Batch:
    """Some rows of a batch."""
    segment_ids = None if batch.segment_ids is None else batch.segment_ids[rows]
    return Batch(batch.tokens[rows], segment_ids, None if batch.mask is None else batch.mask[rows])
