"""What a run draws is known from its recipe alone, and it is what the loader will draw."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from marin_build.data.mixture import Component, Mixture
from marin_build.data.shuffle import random_words
from marin_build.errors import RequestError
from marin_build.recipe.mixture_counts import MAX_BLOCK, block_counts
from marin_build.recipe.mixture_needs import Need
from marin_build.recipe.mixture_schedule import Schedule, _random_word

NAMES = "abcd"


def schedule(*stages: tuple[int, dict[str, float]], block: int = 12, size: int = 8, seed: int = 3) -> Schedule:
    return Schedule.make(stages, block=block, global_batch_size=size, seed=seed)


def works(weights: dict[str, float], block: int) -> bool:
    try:
        return bool(block_counts(weights, block))
    except RequestError:
        return False


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    block, size = draw(st.integers(4, 60)), draw(st.integers(1, 40))
    begins = draw(st.lists(st.integers(1, 9), unique=True, max_size=3).map(sorted))
    weights = [
        draw(st.dictionaries(st.sampled_from(NAMES), st.integers(1, 9), min_size=1)) for _ in range(len(begins) + 1)
    ]
    assume(all(works(each, block) for each in weights))
    apart = block // math.gcd(block, size)
    steps = [0, *(begin * apart for begin in begins)]
    return schedule(*zip(steps, weights, strict=True), block=block, size=size, seed=draw(st.integers(0, 2**70)))


def mixture(made: Schedule) -> Mixture:
    components = (
        Component(name, tuple(stage.counts.get(name, 0) for stage in made.stages), 10**6) for name in made.names
    )
    return Mixture(tuple(components), made.seed, tuple(stage.first_block for stage in made.stages))


@settings(max_examples=60)
@given(made=schedules(), steps=st.integers(1, 60))
def test_what_a_run_draws_is_counted_without_numpy_as_it_will_come(made: Schedule, steps: int) -> None:
    order, _ = mixture(made).plan(0, steps * made.global_batch_size)
    edges = [min(stage.from_step, steps) * made.global_batch_size for stage in made.stages] + [len(order)]
    for stage, drawn, (first, end) in zip(made.stages, made.drawn(steps), pairwise(edges), strict=True):
        seen = np.bincount(order[first:end], minlength=len(made.names))
        assert drawn == {name: seen[made.names.index(name)] for name in stage.counts}


@given(made=schedules(), steps=st.integers(0, 60))
def test_the_mixture_counts_the_same(made: Schedule, steps: int) -> None:
    totals = dict.fromkeys(made.names, 0)
    for stage in made.drawn(steps):
        for name, sequences in stage.items():
            totals[name] += sequences
    assert mixture(made).drawn(steps * made.global_batch_size) == totals


@given(key=st.integers(0, 2**64 - 1), number=st.integers(0, 2**62))
def test_the_random_words_are_those_of_numpy(key: int, number: int) -> None:
    assert _random_word(key, number) == int(random_words(key, np.array([number]))[0])


def test_counts_beyond_32_bits_are_added_over_the_stages() -> None:
    far = 3 * 2**40  # steps of 8 sequences, blocks of 12
    made = schedule((0, {"a": 1, "b": 2}), (far, {"a": 2, "b": 1}))
    assert made.drawn(far + 3) == [{"a": 2**43, "b": 2**44}, {"a": 16, "b": 8}]
    order, windows = mixture(made).plan(far * 8, 24)
    assert np.bincount(order).tolist() == [16, 8]
    assert len(set(windows[order == 0].tolist())) == 16


# ---- what cannot be --------------------------------------------------------------------------------------------------


def refused(*arguments: Any, **keywords: Any) -> str:
    with pytest.raises(RequestError) as caught:
        schedule(*arguments, **keywords)
    return str(caught.value)


def test_a_stage_that_begins_no_block_names_the_nearest_steps_that_do() -> None:
    message = refused((0, {"a": 1}), (10, {"a": 1}))
    assert message.splitlines()[0] == (
        "data.stages[0].from_step: step 10 begins no block of mixture_block 12; the nearest 9 and 12 work"
    )
    assert "with 8 sequences a step, steps that are a multiple of 3 begin a block" in message
    assert "the nearest 3 works" in refused((0, {"a": 1}), (2, {"a": 1}))


@given(block=st.integers(1, 400), size=st.integers(1, 300), step=st.integers(1, 5000))
def test_the_nearest_steps_work_and_none_is_nearer(block: int, size: int, step: int) -> None:
    stages = (0, {"a": 1}), (step, {"a": 1})
    if step * size % block == 0:
        assert schedule(*stages, block=block, size=size).stages[1].first_block == step * size // block
        return
    first_line = refused(*stages, block=block, size=size).splitlines()[0]
    named = [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", first_line.partition("nearest")[2])]
    right = [other for other in range(1, step + block + 1) if other * size % block == 0]
    below, above = [other for other in right if other < step], [other for other in right if other > step]
    assert named == [*below[-1:], above[0]]


def test_a_block_without_a_slot_in_a_later_stage_names_the_stage_and_a_block_for_all() -> None:
    weights = {"a": 0.99, "b": 0.01}
    message = refused((0, {"a": 1, "b": 1}), (6, weights))  # sequence 48
    assert "a block of 12 has no sequence for 'b' in data.stages[0] (share 0.01)" in message
    assert "no block up to" in message.splitlines()[0]  # none of 48's divisors gives b a sequence
    message = refused((0, {"a": 1, "b": 1}), (48, weights))  # sequence 384
    named = int(message.splitlines()[0].rpartition(" ")[2])
    assert named == 64  # 51 would give b a sequence, but 384 is no multiple of it
    assert schedule((0, {"a": 1, "b": 1}), (48, weights), block=named).stages[1].counts["b"] == 1


@settings(max_examples=40)
@given(made=schedules(), block=st.integers(1, 60))
def test_the_named_block_works_for_every_stage_and_edge(made: Schedule, block: int) -> None:
    stages = [(stage.from_step, dict(stage.weights)) for stage in made.stages]
    try:
        schedule(*stages, block=block, size=made.global_batch_size)
    except RequestError as error:
        found = re.search(r"works is (\d+)", str(error).splitlines()[0])
        if not found:
            return
        again = schedule(*stages, block=int(found[1]), size=made.global_batch_size)
        assert [list(stage.counts) for stage in again.stages] == [list(stage.counts) for stage in made.stages]


def test_the_trap_of_cumulative_floors_is_an_error_that_names_a_block() -> None:
    weights = {"a": 0.99, "b": 0.0001, "c": 0.0001, "d": 0.0098}
    message = refused((0, weights), block=4096, size=256)
    named = int(re.search(r"works is (\d+)", message)[1])
    counts = schedule((0, weights), block=named, size=256).stages[0].counts
    assert min(counts.values()) == counts["b"] == counts["c"] == 1
    assert sum(counts.values()) == named < MAX_BLOCK
    assert not works(weights, named - 1)


def test_a_run_that_ends_before_a_component_comes_is_an_error() -> None:
    made = schedule((0, {"a": 99, "b": 1}), block=100, size=5)
    steps = next(steps for steps in range(1, 21) if made.drawn(steps)[0]["b"])
    made.check_served(steps)
    with pytest.raises(RequestError) as caught:
        made.check_served(steps - 1)
    first_line = str(caught.value).splitlines()[0]
    assert first_line.startswith("data.train: 'b' has a weight above 0 and would get nothing: ")
    assert "the smallest mixture_block that works is" in first_line or "steps with a mixture_block of 51" in first_line


def test_a_last_stage_that_is_too_short_names_itself_and_what_would_do() -> None:
    seeds = (schedule((0, {"a": 1, "b": 1}), (3, {"a": 1, "b": 11}), seed=seed) for seed in range(100))
    made = next(made for made in seeds if not made.drawn(4)[1]["a"])
    with pytest.raises(RequestError, match=r"data.stages\[0\]: 'a' has a weight above 0 and would get nothing: 8 seq"):
        made.check_served(4)
    made.check_served(5)


# ---- epochs and limits -----------------------------------------------------------------------------------------------


def need(sequences: int, tokens: int | None, limit: float | None) -> Need:
    return Need("a", "tokenized/a/dev", 4, (sequences,), tokens, limit)


def test_a_limit_is_kept_to_the_sequence() -> None:
    assert need(20, 41, 2.0).problem is None  # 10 windows of 4 tokens
    assert need(21, 41, 2.0).epochs == 2.1
    assert "2.1 epochs of it, more than the limit of 2\n" in (need(21, 41, 2.0).problem or "")
    assert need(21, 41, None).problem is None
    assert need(21, None, 2.0).problem is None


@given(sequences=st.integers(1, 10**6), tokens=st.integers(5, 10**6), limit=st.floats(0.01, 100))
def test_the_size_of_set_that_an_error_asks_for_is_enough_and_no_more(
    sequences: int, tokens: int, limit: float
) -> None:
    message = need(sequences, tokens, limit).problem
    if message is None:
        return
    enough = int(re.search(r"a set of ([\d,]+) tokens", message)[1].replace(",", ""))
    assert need(sequences, enough, limit).problem is None
    assert need(sequences, enough - 1, limit).problem is not None


def test_a_set_too_short_for_a_sequence_is_a_problem_of_its_own() -> None:
    assert need(1, 4, None).epochs is None
    assert (need(1, 4, None).problem or "").startswith("data.sequence_length: 4 is longer than the data of 'a'")
