"""Every block has exact shares, and what a data set gives depends on its own name alone."""

from __future__ import annotations

import re
import time
import tracemalloc
from collections import Counter
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marin_build.data.mixture import Component, Mixture
from marin_build.data.shuffle import shuffled
from marin_build.errors import RequestError
from marin_build.recipe.mixture_counts import MAX_BLOCK, block_counts
from marin_build.recipe.mixture_schedule import derive_key

NAMES = st.text("abcdef/_0", min_size=1, max_size=6)
WEIGHTS = st.dictionaries(NAMES, st.one_of(st.integers(1, 50), st.floats(1e-3, 100)), min_size=1, max_size=6)


def mixture(seed: int = 1, **sets: tuple[int, int]) -> Mixture:
    """Sets by name as (sequences a block, windows)."""
    return Mixture(tuple(Component(name, (sets[name][0],), sets[name][1]) for name in sorted(sets)), seed)


def plan(made: Mixture, first_block: int, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Whole blocks."""
    return made.plan(first_block * made.block, blocks * made.block)


def drawn_windows(made: Mixture, name: str, blocks: int) -> list[int]:
    """The windows of one set in the order in which they come."""
    order, windows = plan(made, 0, blocks)
    return windows[order == [component.name for component in made.components].index(name)].tolist()


def named_block(error: RequestError) -> int:
    found = re.search(r"works is (\d+)", str(error).splitlines()[0])
    assert found, error
    return int(found[1])


# ---- counts ----------------------------------------------------------------------------------------------------------


def test_the_reference_mixture_has_the_counts_of_largest_remainders() -> None:
    weights = {"dclm_baseline": 3.8, "starcoderdata": 0.25, "proofpile_2": 0.055}
    assert block_counts(weights, 2048) == {"dclm_baseline": 1896, "proofpile_2": 27, "starcoderdata": 125}


@given(weights=WEIGHTS, block=st.integers(1, 5000))
def test_shares_are_exact_to_within_one_sequence_a_block(weights: dict[str, float], block: int) -> None:
    try:
        counts = block_counts(weights, block)
    except RequestError:
        return
    total = sum(Fraction(repr(float(weight))) for weight in weights.values())
    assert sum(counts.values()) == block
    for name, weight in weights.items():
        assert abs(counts[name] - Fraction(repr(float(weight))) / total * block) < 1


def test_weights_that_break_cumulative_floors_keep_their_counts() -> None:
    weights = {"a": 0.99, "b": 0.0001, "c": 0.0001, "d": 0.0098}
    assert block_counts(weights, 10_000) == {"a": 9900, "b": 1, "c": 1, "d": 98}
    with pytest.raises(RequestError, match="no sequence"):
        block_counts(weights, 4096)


def test_a_weight_below_one_sequence_is_served_by_its_remainder() -> None:
    assert block_counts({"a": 0.9999, "b": 0.00005, "c": 0.00005}, 16_384) == {"a": 16_382, "b": 1, "c": 1}


@given(
    weights=st.dictionaries(NAMES, st.integers(1, 50), min_size=1, max_size=6),
    scale=st.sampled_from(["0.1", "0.01", "7", "1e-6"]),
)
def test_only_the_proportions_of_weights_matter(weights: dict[str, int], scale: str) -> None:
    scaled = {name: float(Decimal(scale) * weight) for name, weight in weights.items()}
    assert block_counts(scaled, 4096) == block_counts(weights, 4096)


@given(weights=WEIGHTS, block=st.integers(3000, 5000), data=st.data())
def test_the_order_of_the_recipe_does_not_matter(weights: dict[str, float], block: int, data: st.DataObject) -> None:
    shuffled_names = data.draw(st.permutations(list(weights)))
    try:
        counts = block_counts(weights, block)
    except RequestError:
        return
    assert list(block_counts({name: weights[name] for name in shuffled_names}, block).items()) == list(counts.items())


def test_equal_remainders_go_by_name() -> None:
    assert block_counts({"c": 1, "a": 1, "b": 1}, 4) == {"a": 2, "b": 1, "c": 1}


def test_weight_zero_is_left_out() -> None:
    assert block_counts({"a": 1.0, "b": 0.0, "c": 0}, 7) == {"a": 7}


def test_a_weight_without_a_slot_names_the_field_the_set_and_the_block_that_works() -> None:
    with pytest.raises(RequestError) as caught:
        block_counts({"big": 0.99, "small": 0.01}, 32)
    first_line = str(caught.value).splitlines()[0]
    for word in ("data.mixture_block", "32", "'small'", "51"):
        assert word in first_line


def test_all_sets_without_a_slot_are_named_the_smallest_first() -> None:
    with pytest.raises(RequestError) as caught:
        block_counts({"big": 1, "less": 0.002, "least": 0.001}, 8)
    first_line, second_line, *_ = str(caught.value).splitlines()
    assert "'least' (share 0.000997)" in first_line
    assert second_line.endswith(": least, less")


@given(weights=st.dictionaries(NAMES, st.integers(1, 200), min_size=1, max_size=5), block=st.integers(1, 60))
def test_the_named_block_is_the_smallest_larger_one_that_works(weights: dict[str, int], block: int) -> None:
    def works(size: int) -> bool:
        """Whether the smallest weight is rounded up from 0 or above it, by the definition of largest remainders."""
        quotas = {name: Fraction(weight * size, sum(weights.values())) for name, weight in weights.items()}
        left = size - sum(int(quota) for quota in quotas.values())
        up = sorted(quotas, key=lambda name: (int(quotas[name]) - quotas[name], name))[:left]
        return all(quota >= 1 or name in up for name, quota in quotas.items())

    if works(block):
        assert sum(block_counts(weights, block).values()) == block
        return
    with pytest.raises(RequestError) as caught:
        block_counts(weights, block)
    assert named_block(caught.value) == next(size for size in range(block + 1, 10**6) if works(size))


def test_a_larger_block_can_fail_where_a_smaller_one_works() -> None:
    # the reason why the block that works is searched for: with largest remainders 25 works, 24 and 26 do not
    weights = {"a": 0.49, "b": 0.49, "c": 0.02}
    assert block_counts(weights, 25) == {"a": 12, "b": 12, "c": 1}
    for block, works in ((24, 25), (26, 27)):
        with pytest.raises(RequestError) as caught:
            block_counts(weights, block)
        assert named_block(caught.value) == works


def test_a_weight_too_small_for_any_block_says_so() -> None:
    with pytest.raises(RequestError, match=rf"no block up to {MAX_BLOCK}"):
        block_counts({"a": 1.0, "b": 1e-12}, 2048)


def test_the_search_for_a_block_takes_seconds_at_most() -> None:
    weights = {f"set_{number}": 1 + number / 7 for number in range(100)} | {"rare": 0.01}
    start = time.process_time()
    with pytest.raises(RequestError) as caught:
        block_counts(weights, 256)
    assert named_block(caught.value) > 256
    assert time.process_time() - start < 10


@pytest.mark.parametrize("block", [0, -1, MAX_BLOCK + 1])
def test_a_block_out_of_range_is_an_error(block: int) -> None:
    with pytest.raises(RequestError, match=rf"data.mixture_block: {block} is not allowed.* 1 to {MAX_BLOCK}"):
        block_counts({"a": 1.0}, block)


@pytest.mark.parametrize("weight", [-0.5, float("nan"), float("inf")])
def test_a_weight_that_is_no_share_is_an_error(weight: float) -> None:
    with pytest.raises(RequestError, match=r"data.train.b.weight"):
        block_counts({"a": 1.0, "b": weight}, 8)


def test_a_mixture_without_any_weight_is_an_error() -> None:
    with pytest.raises(RequestError, match="at least one"):
        block_counts({"a": 0.0}, 8)


# ---- order -----------------------------------------------------------------------------------------------------------


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=5), first=st.integers(0, 2**40), blocks=st.integers(1, 5)
)
def test_every_block_holds_every_set_in_its_count(counts: list[int], first: int, blocks: int) -> None:
    made = mixture(**{f"set_{number}": (count, 50) for number, count in enumerate(counts)})
    order, _ = plan(made, first, blocks)
    for block in order.reshape(blocks, made.block):
        assert np.bincount(block, minlength=len(counts)).tolist() == counts


@given(windows=st.integers(1, 40), count=st.integers(1, 30))
def test_a_set_is_read_epoch_by_epoch(windows: int, count: int) -> None:
    drawn = drawn_windows(mixture(a=(count, windows), b=(5, 100)), "a", blocks=-(-3 * windows // count))
    for epoch in range(3):
        assert sorted(drawn[epoch * windows : (epoch + 1) * windows]) == list(range(windows))


@given(seed=st.integers(0, 2**70), others=st.dictionaries(st.sampled_from("bcyz"), st.integers(1, 20), max_size=3))
def test_what_a_set_gives_does_not_depend_on_the_sets_beside_it(seed: int, others: dict[str, int]) -> None:
    alone = shuffled(np.arange(60), 37, derive_key("windows", seed, "m")).tolist()
    sets = {"m": (6, 37)} | {name: (count, 11) for name, count in others.items()}
    assert drawn_windows(mixture(seed, **sets), "m", blocks=10) == alone


@given(first=st.integers(0, 2**40), blocks=st.integers(1, 6))
def test_blocks_are_the_same_whichever_blocks_are_planned_with_them(first: int, blocks: int) -> None:
    made = mixture(a=(5, 7), b=(3, 1000))
    together = np.stack(plan(made, first, blocks))
    one_by_one = [np.stack(plan(made, first + number, 1)) for number in range(blocks)]
    assert np.array_equal(together, np.concatenate(one_by_one, axis=1))


@given(sequences=st.integers(0, 200), seed=st.integers(0, 100))
def test_sequences_drawn_are_those_that_were_planned(sequences: int, seed: int) -> None:
    made = mixture(seed, a=(5, 7), b=(3, 1000), c=(1, 2))
    order, _ = plan(made, 0, -(-200 // made.block))
    seen = Counter(order[:sequences].tolist())
    assert made.drawn(sequences) == {"a": seen[0], "b": seen[1], "c": seen[2]}


def test_blocks_differ_in_their_order_and_so_do_seeds() -> None:
    order, _ = plan(mixture(a=(32, 100), b=(32, 100)), 0, 20)
    assert len({tuple(block) for block in order.reshape(20, 64).tolist()}) == 20
    assert not np.array_equal(order, plan(mixture(2, a=(32, 100), b=(32, 100)), 0, 20)[0])


def test_every_place_of_a_block_gets_every_set_in_its_share() -> None:
    # over 4,000 blocks the count of set a at each of 8 places is binomial (4,000, 3/8): standard deviation 31
    order, _ = plan(mixture(a=(3, 100), b=(5, 100)), 0, 4000)
    at_place = (order.reshape(4000, 8) == 0).sum(axis=0)
    assert np.abs(at_place - 1500).max() < 4 * 31
    assert at_place.std() > 5


def test_a_billion_windows_far_into_a_run_cost_no_memory() -> None:
    made = mixture(a=(1500, 10**9), b=(548, 10**9 + 7))
    first_block = 2**31 * 2048 // made.block  # step 2^31 of batches of 2,048
    tracemalloc.start()
    order, windows = plan(made, first_block, 2)
    drawn = made.drawn(first_block * made.block)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 10_000_000
    assert drawn == {"a": first_block * 1500, "b": first_block * 548}
    uses = drawn["a"] + np.arange(3000)
    assert windows[order == 0].tolist() == shuffled(uses, 10**9, derive_key("windows", 1, "a")).tolist()


def test_the_largest_block_is_planned_in_bounded_memory() -> None:
    made = mixture(a=(MAX_BLOCK - 1, 10**9), b=(1, 3))
    tracemalloc.start()
    order, _ = plan(made, 3, 1)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(order) == MAX_BLOCK
    assert peak_bytes < 300_000_000
