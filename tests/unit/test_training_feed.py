"""From the loader to the devices: order, work ahead, errors of the thread, rows of a process."""

import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from marin_build.data.loader import Batch
from marin_build.errors import DamageError
from marin_build.training.feed import Feed, local_rows, rows_of

MESH = jax.make_mesh((1, 1, 1), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)


class Loader:
    """Batches filled with the number of their step; `broken` steps fail."""

    def __init__(self, broken=(), bad_id_at=None):
        self.made, self.broken, self.bad_id_at = [], broken, bad_id_at

    def batch(self, step, rows=None):
        self.made.append((step, threading.current_thread().name))
        if step in self.broken:
            raise OSError(f"cannot read step {step}")
        tokens = np.full((4, 9), step, np.int32)
        if step == self.bad_id_at:
            tokens[2, 3] = 50
        return Batch(tokens[rows], np.zeros((4, 9), np.int32)[rows], None)

    def sources(self, step, rows=None):
        return [("plays", 7 + row) for row in range(4)]


def feed(loader, steps=6):
    return Feed(loader, steps=steps, batch_size=4, vocab_size=50, mesh=MESH)


def test_every_step_gets_its_own_batch_and_none_is_made_twice_or_past_the_end():
    loader = Loader()
    with feed(loader) as batches:
        for step in range(2, 6):
            batch = batches.batch(step)
            np.testing.assert_array_equal(batch["tokens"], np.full((4, 9), step))
            assert batch["segment_ids"].shape == (4, 9)
            assert "mask" not in batch
    assert [step for step, _ in loader.made] == [2, 3, 4, 5]


def test_batches_are_made_ahead_by_another_thread():
    loader = Loader()
    with feed(loader) as batches:
        batches.batch(0)
    assert {name.split("_")[0] for _, name in loader.made} == {"loader"}
    assert len(loader.made) >= 1


def test_an_error_of_the_thread_is_raised_at_its_step():
    with feed(Loader(broken=[2])) as batches:
        batches.batch(0)
        batches.batch(1)
        with pytest.raises(OSError, match="cannot read step 2"):
            batches.batch(2)


def test_an_id_outside_the_vocabulary_names_set_and_window():
    with feed(Loader(bad_id_at=1)) as batches:
        batches.batch(0)
        with pytest.raises(DamageError, match=r"id 50 is outside the vocabulary of 50 ids: window 9 of plays"):
            batches.batch(1)


def test_one_process_holds_all_rows():
    assert local_rows(MESH, 12) == slice(0, 12)


def test_a_process_makes_the_rows_of_its_own_devices(monkeypatch):
    indices = {"d2": (slice(4, 6),), "d3": (slice(6, 8),), "d3 again": (slice(6, 8),)}
    sharding = SimpleNamespace(addressable_devices_indices_map=lambda shape: indices)
    monkeypatch.setattr("marin_build.training.feed.batch_sharding", lambda mesh: sharding)
    assert local_rows(MESH, 8) == slice(4, 8)
    batch = rows_of(Batch(np.arange(24).reshape(8, 3), None, np.ones((8, 2), bool)), slice(4, 8))
    assert batch.tokens[0, 0] == 12
    assert batch.mask.shape == (4, 2)
