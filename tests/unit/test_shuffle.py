"""The shuffle is a bijection an epoch, looks random at every size, and allocates nothing of the size of the data."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_build.data.shuffle import MINIMUM_CELLS, ROUNDS, _rectangle, random_words, shuffled
from marin_build.recipe.mixture_schedule import derive_key

WORD = (1 << 64) - 1
KEYS = st.integers(0, WORD)


def splitmix64(state: int) -> int:
    """Output of SplitMix64 at a state, in plain integers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & WORD
    return state ^ (state >> 31)


def shuffled_in_plain_integers(use: int, size: int, key: int) -> int:
    epoch, cell = divmod(use, size)
    if size == 1:
        return 0
    rows, columns = _rectangle(size)
    while True:
        row, column = divmod(cell, columns)
        for number in range(ROUNDS):
            round_key = splitmix64((epoch * ROUNDS + number + 1) * 0x9E3779B97F4A7C15 + key & WORD)
            if number % 2 == 0:
                row = (row + (splitmix64(column ^ round_key) >> 32) * rows // 2**32) % rows
            else:
                column = (column + (splitmix64(row ^ round_key) >> 32) * columns // 2**32) % columns
        cell = row * columns + column
        if cell < size:
            return cell


def excess(observed: np.ndarray, expected: float) -> float:
    """How many standard deviations the chi-square of counts lies above what independent draws give."""
    freedom = observed.size - 1
    return float((((observed - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@given(size=st.integers(1, 3000), epoch=st.integers(0, 10**6), key=KEYS)
def test_every_epoch_reads_every_window_once(size: int, epoch: int, key: int) -> None:
    windows = shuffled(epoch * size + np.arange(size), size, key)
    assert np.array_equal(np.sort(windows), np.arange(size))


@given(size=st.integers(1, 10**12), use=st.integers(0, 10**15), key=KEYS)
def test_equals_the_same_network_in_plain_integers(size: int, use: int, key: int) -> None:
    assert shuffled(np.array([use]), size, key).tolist() == [shuffled_in_plain_integers(use, size, key)]


@given(uses=st.lists(st.integers(0, 10**9), max_size=30), size=st.integers(1, 100), key=KEYS)
def test_a_use_does_not_depend_on_the_uses_asked_for_with_it(uses: list[int], size: int, key: int) -> None:
    together = shuffled(np.array(uses, dtype=np.int64), size, key).tolist()
    assert together == [shuffled(np.array([use]), size, key)[0] for use in uses]


def test_words_are_those_of_the_published_generator() -> None:
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert random_words(1234567, np.arange(5)).tolist() == published


def test_keys_differ_by_purpose_seed_and_name() -> None:
    parts = [
        (purpose, seed, name) for purpose in ("windows", "mixture") for seed in (0, 1, 11) for name in ("", "a", "1/a")
    ]
    assert len({derive_key(*part) for part in parts}) == len(parts)
    assert derive_key("windows", 1, "1/a") != derive_key("windows", 11, "/a")


def test_a_seed_of_any_size_and_a_name_in_any_script_have_a_key() -> None:
    assert 0 <= derive_key("windows", 10**40, "数据/ö") <= WORD


@pytest.mark.parametrize("size", [2, 10, 1000])
def test_epochs_and_keys_change_the_order(size: int) -> None:
    uses = np.arange(64 * size)
    first, other = (shuffled(uses, size, key).reshape(64, size) for key in (1, 2))
    assert len({tuple(order) for order in first.tolist()}) > 1
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("size", [100_003, 1_000_003, 2**20, 10**9])
def test_batches_of_sorted_topics_look_like_random_draws(size: int) -> None:
    # 64 topics in order, 300 batches of 256: chi-square 63 on average, the mean of 300 has a standard deviation of 0.65
    topics = shuffled(np.arange(300 * 256), size, 1) * 64 // size
    counts = np.stack([np.bincount(batch, minlength=64) for batch in topics.reshape(300, 256)])
    assert abs(((counts - 4) ** 2 / 4).sum(axis=1).mean() - 63) < 4 * 0.65


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 9, 17, 31, 66, 67, 97])
def test_small_sets_have_no_favourite_orders(size: int) -> None:
    # over 60,000 epochs: where a window lands, where two windows land together, and where it lands an epoch later
    epochs = np.arange(60_000)
    first, second, last = (shuffled(epochs * size + use, size, 3) for use in (0, 1, size - 1))
    assert excess(np.bincount(first, minlength=size), len(epochs) / size) < 4.5
    assert excess(np.bincount(first[1:] * size + first[:-1], minlength=size**2), len(epochs) / size**2) < 4.5
    for other in (second, last):
        together = np.bincount(first * size + other, minlength=size**2).reshape(size, size)[~np.eye(size, dtype=bool)]
        assert excess(together, len(epochs) / (size * (size - 1))) < 4.5


def test_neighbouring_uses_are_not_neighbours_in_the_data() -> None:
    windows = shuffled(np.arange(50_000), 1_000_003, 5)
    assert abs(np.corrcoef(np.arange(50_000), windows)[0, 1]) < 0.02
    assert len(np.unique(np.abs(np.diff(windows)))) > 45_000


@pytest.mark.parametrize("size", [10**9, 10**9 + 7, 2**40 + 1])
def test_huge_sets_cost_no_memory(size: int) -> None:
    uses = np.concatenate([np.arange(4096), size - np.arange(1, 4097), 2**45 + np.arange(4096)])
    tracemalloc.start()
    windows = shuffled(uses, size, 9)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10_000_000
    assert windows.min() >= 0
    assert windows.max() < size
    assert len(np.unique(windows[:8192])) == 8192  # the start and the end of epoch 0 share nothing


@given(size=st.integers(1, 10**13))
def test_the_rectangle_holds_the_set_and_little_more(size: int) -> None:
    rows, columns = _rectangle(size)
    cells = max(size, MINIMUM_CELLS)
    assert cells <= rows * columns < cells + columns
    assert rows <= columns <= 2 * rows  # 66 = 6 × 11 is the least square
