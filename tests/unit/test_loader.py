"""A batch is a function of the step: replayed in any order, by any hosts, over any shards, it holds the same tokens."""

from __future__ import annotations

import math
import platform
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from marin_build.data import loader as loader_module
from marin_build.data import shards
from marin_build.data.loader import Batch, TrainingLoader, ValidationLoader
from marin_build.errors import RequestError
from marin_build.recipe.mixture_counts import block_counts
from marin_build.recipe.mixture_schedule import Schedule


@dataclass(frozen=True)
class Shard:
    ids: np.ndarray
    offsets: np.ndarray
    loss_mask: np.ndarray | None = None


@dataclass(frozen=True)
class Tokens:
    """A token set in memory."""

    shards: list[Shard]

    @property
    def flat(self) -> np.ndarray:
        return np.concatenate([shard.ids for shard in self.shards])

    @property
    def document_numbers(self) -> np.ndarray:
        """The document of each token of the whole set, told the slow way."""
        lengths = np.concatenate([np.diff(shard.offsets) for shard in self.shards])
        return np.repeat(np.arange(len(lengths)), lengths)


def token_set(lengths_by_shard: Sequence[Sequence[int]], *, first: int = 0, dtype: type = np.int32) -> Tokens:
    """Documents of the given lengths; token n of the set is first + n."""
    made = []
    for lengths in lengths_by_shard:
        offsets = np.cumsum([0, *lengths]).astype(np.int32)
        made.append(Shard(np.arange(first, first + offsets[-1]).astype(dtype), offsets))
        first += int(offsets[-1])
    return Tokens(made)


@pytest.fixture(autouse=True, scope="module")
def small_plans() -> Iterator[None]:
    """Plan few sequences at once: the order is the same, and the tests cross the edges of plans."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_module, "PLANNED_SEQUENCES", 50)
        yield


def numbered(tokens: int, first: int = 0) -> Tokens:
    """Two shards of documents of 7 tokens and less."""
    halves = (tokens // 2, tokens - tokens // 2)
    return token_set([[7] * (half // 7) + [half % 7] for half in halves], first=first)


def training(sets: dict[str, Tokens], weights: dict[str, float], **changes: Any) -> TrainingLoader:
    """A loader of short sequences; `stages` are (step, weights) after the first."""
    keywords = {"sequence_length": 5, "mixture_block": 12, "global_batch_size": 8, "seed": 3, "segments": False}
    keywords |= changes
    schedule = Schedule.make(
        [(0, weights), *keywords.get("stages", ())],
        block=keywords["mixture_block"],
        global_batch_size=keywords["global_batch_size"],
        seed=keywords["seed"],
    )
    return TrainingLoader(sets, schedule, sequence_length=keywords["sequence_length"], segments=keywords["segments"])


def three_sets() -> dict[str, Tokens]:
    return {"a": numbered(400), "b": numbered(150, first=1000), "c": numbered(60, first=2000)}


WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}
LENGTHS = st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=1, max_size=6)


# ---- tokens and segments ---------------------------------------------------------------------------------------------


@settings(max_examples=50)
@given(lengths=LENGTHS, sequence_length=st.integers(1, 12), segments=st.booleans())
def test_rows_are_the_windows_that_they_say_across_any_shards(
    lengths: list[list[int]], sequence_length: int, segments: bool
) -> None:
    data = token_set(lengths)
    if len(data.flat) <= sequence_length:
        return
    keywords = {"sequence_length": sequence_length, "segments": segments, "global_batch_size": 25}
    loader = training({"a": data}, {"a": 1.0}, **keywords)
    for step in range(3):
        batch = loader.batch(step)
        for row, (name, window) in enumerate(loader.sources(step)):
            cut = slice(window * sequence_length, window * sequence_length + sequence_length + 1)
            assert name == "a"
            assert batch.tokens[row].tolist() == data.flat[cut].tolist()
            if segments:
                documents = np.unique(data.document_numbers[cut], return_inverse=True)[1]
                assert batch.segment_ids[row].tolist() == documents.tolist()
        assert (batch.segment_ids is None) == (not segments)


def test_batches_are_int32_whatever_the_shards_hold() -> None:
    wide, narrow = (
        training({"a": token_set([[30], [7, 8]], dtype=dtype)}, {"a": 1}, segments=True)
        for dtype in (np.int32, np.uint16)
    )
    for batch, other in ((wide.batch(step), narrow.batch(step)) for step in range(3)):
        assert batch.tokens.dtype == other.tokens.dtype == batch.segment_ids.dtype == np.int32
        assert batch.tokens.shape == batch.segment_ids.shape == (8, 6)
        assert np.array_equal(batch.tokens, other.tokens)
        assert batch.mask is None


def test_segments_do_not_look_at_the_tokens() -> None:
    # documents without an end token, and end tokens inside documents: only the offsets count
    data = Tokens([Shard(np.zeros(24, np.int32), np.array([0, 3, 3, 10, 24], np.int32))])
    batch = training({"a": data}, {"a": 1}, sequence_length=22, segments=True).batch(0)
    assert batch.segment_ids[0].tolist() == [0] * 3 + [1] * 7 + [2] * 13


def test_a_document_that_began_in_an_earlier_window_is_number_zero() -> None:
    loader = training({"a": token_set([[8, 9]])}, {"a": 1}, segments=True)
    rows = dict(zip((window for _, window in loader.sources(0)), loader.batch(0).segment_ids.tolist(), strict=True))
    assert rows == {0: [0] * 6, 1: [0] * 3 + [1] * 3, 2: [0] * 6}


def test_segments_leave_the_tokens_alone() -> None:
    for step in range(4):
        without, with_segments = (training(three_sets(), WEIGHTS, segments=on).batch(step) for on in (False, True))
        assert np.array_equal(without.tokens, with_segments.tokens)


def test_real_shards_are_read(tmp_path: Path) -> None:
    lengths = np.array([4, 0, 90, 6])
    ids = np.arange(100, dtype=np.uint16)
    for number in range(2):
        shards.write_shard(tmp_path / f"{number}.arrow", ids, lengths)
    written = Tokens([shards.Shard(tmp_path / f"{number}.arrow", 100, 4) for number in range(2)])
    in_memory = Tokens([Shard(ids, np.array([0, 4, 4, 94, 100], np.int32))] * 2)
    for step in range(6):
        batch, other = (training({"a": data}, {"a": 1}, segments=True).batch(step) for data in (written, in_memory))
        assert np.array_equal(batch.tokens, other.tokens)
        assert np.array_equal(batch.segment_ids, other.segment_ids)


# ---- the order is a function of the step -----------------------------------------------------------------------------


def same(batch: Batch, other: Batch) -> bool:
    return np.array_equal(batch.tokens, other.tokens) and np.array_equal(batch.segment_ids, other.segment_ids)


@settings(max_examples=50)
@given(
    steps=st.lists(st.integers(0, 5000), min_size=1, max_size=8),
    batch_size=st.integers(1, 40),
    block=st.integers(3, 30),
)
def test_a_step_is_the_same_replayed_in_any_order(steps: list[int], batch_size: int, block: int) -> None:
    keywords = {"global_batch_size": batch_size, "mixture_block": block, "segments": True}
    loader = training(three_sets(), {"a": 1, "b": 1, "c": 1}, **keywords)
    for step in steps:
        fresh = training(three_sets(), {"a": 1, "b": 1, "c": 1}, **keywords)
        assert same(loader.batch(step), fresh.batch(step))


@settings(max_examples=50)
@given(cuts=st.lists(st.integers(0, 40), max_size=5), step=st.integers(0, 3000))
def test_hosts_may_share_the_rows_in_any_way(cuts: list[int], step: int) -> None:
    loader = training(three_sets(), WEIGHTS, global_batch_size=40, segments=True)
    whole = loader.batch(step)
    edges = [0, *sorted(cuts), 40]
    parts = [loader.batch(step, slice(first, end)) for first, end in pairwise(edges)]
    assert np.array_equal(np.concatenate([part.tokens for part in parts]), whole.tokens)
    assert np.array_equal(np.concatenate([part.segment_ids for part in parts]), whole.segment_ids)


def test_hosts_may_take_every_nth_row() -> None:
    loader = training(three_sets(), WEIGHTS)
    for host in range(3):
        rows = slice(host, None, 3)
        assert np.array_equal(loader.batch(9, rows).tokens, loader.batch(9).tokens[rows])
        assert loader.sources(9, rows) == loader.sources(9)[rows]


def test_rows_against_their_order_are_refused() -> None:
    with pytest.raises(ValueError, match="rising order"):
        training(three_sets(), WEIGHTS).batch(0, slice(None, None, -1))


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        training(three_sets(), WEIGHTS).batch(-1)


@given(batch_size=st.integers(1, 30))
def test_the_batch_size_only_cuts_the_same_order(batch_size: int) -> None:
    def first_rows(size: int) -> np.ndarray:
        loader = training(three_sets(), WEIGHTS, global_batch_size=size)
        return np.concatenate([loader.batch(step).tokens for step in range(-(-120 // size))])[:120]

    assert np.array_equal(first_rows(batch_size), first_rows(7))


@pytest.mark.parametrize("planned", [1, 50, 4096])
def test_how_much_is_planned_at_once_changes_nothing(planned: int, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = training(three_sets(), WEIGHTS, global_batch_size=333, segments=True)
    monkeypatch.setattr(loader_module, "PLANNED_SEQUENCES", planned)
    other = training(three_sets(), WEIGHTS, global_batch_size=333, segments=True)
    assert all(same(loader.batch(step), other.batch(step)) for step in (0, 7, 8))


def test_threads_may_share_a_loader() -> None:
    loader = training(three_sets(), WEIGHTS, segments=True)
    steps = [step * 4999 % 20_000 for step in range(60)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(loader.batch, steps))
    alone = training(three_sets(), WEIGHTS, segments=True)
    assert all(same(batch, alone.batch(step)) for step, batch in zip(steps, together, strict=True))


def test_a_batch_stays_as_it_is_when_the_next_is_read() -> None:
    loader = training(three_sets(), WEIGHTS)
    batch = loader.batch(0)
    before = batch.tokens.copy()
    loader.batch(1)
    assert np.array_equal(batch.tokens, before)


def test_the_order_of_the_mapping_changes_nothing() -> None:
    loader = training(three_sets(), WEIGHTS)
    turned = training(dict(reversed(three_sets().items())), dict(reversed(WEIGHTS.items())))
    assert all(np.array_equal(loader.batch(step).tokens, turned.batch(step).tokens) for step in range(20))
    assert loader.plan_digest == turned.plan_digest


def test_adding_a_set_leaves_the_windows_of_the_others_in_their_order() -> None:
    def windows_of_a(loader: TrainingLoader, steps: int) -> list[int]:
        return [window for step in range(steps) for name, window in loader.sources(step) if name == "a"]

    more = {"0": numbered(99, first=5000), **three_sets(), "z": numbered(99, first=6000)}
    with_more = windows_of_a(training(more, {"0": 0.3, "z": 0.4, **WEIGHTS}), 60)
    without = windows_of_a(training(three_sets(), WEIGHTS), 60)
    assert with_more == without[: len(with_more)]
    assert len(with_more) > 100


def test_the_seed_changes_the_order() -> None:
    assert not np.array_equal(
        training(three_sets(), WEIGHTS).batch(0).tokens, training(three_sets(), WEIGHTS, seed=4).batch(0).tokens
    )


# ---- shares, epochs, limits ------------------------------------------------------------------------------------------


def test_every_block_has_exact_shares() -> None:
    loader = training(three_sets(), WEIGHTS, global_batch_size=10, mixture_block=10)
    for step in range(50):
        assert Counter(name for name, _ in loader.sources(step)) == {"a": 5, "b": 3, "c": 2}


def test_every_epoch_of_a_set_covers_each_window_once() -> None:
    loader = training(three_sets(), WEIGHTS)
    drawn: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for step in range(200):
        for name, window in loader.sources(step):
            drawn[name].append(window)
    for name, windows in (("a", 79), ("b", 29), ("c", 11)):
        epochs = [drawn[name][first : first + windows] for first in range(0, len(drawn[name]) - windows, windows)]
        assert len(epochs) > 3
        assert all(sorted(epoch) == list(range(windows)) for epoch in epochs)
        assert epochs[0] != epochs[1]


def test_sequences_seen_and_epochs_are_those_that_were_read() -> None:
    loader = training(three_sets(), WEIGHTS)
    seen: Counter[str] = Counter({"a": 0, "b": 0, "c": 0})
    for step in range(30):
        assert loader.sequences_seen(step) == seen
        assert loader.epochs(step) == {"a": seen["a"] / 79, "b": seen["b"] / 29, "c": seen["c"] / 11}
        seen.update(name for name, _ in loader.sources(step))


def test_the_report_says_share_epochs_and_size_of_every_set() -> None:
    first, *others = training(three_sets(), WEIGHTS).report(steps=79).splitlines()
    assert first == "a: 6 of every 12 sequences (50.00%), 4 epochs of 79 sequences (400 tokens)"
    assert [line.split(":")[0] for line in others] == ["b", "c"]


def test_the_report_of_stages_says_each_and_what_the_run_reads_in_all() -> None:
    loader = training(three_sets(), {"a": 1, "b": 1, "c": 0}, stages=[(3, {"a": 1, "b": 0, "c": 1})])
    assert loader.report(steps=6).splitlines() == [
        "from step 0 on, of every 12 sequences: 6 a (50.00%), 6 b (50.00%)",
        "from step 3 on, of every 12 sequences: 6 a (50.00%), 6 c (50.00%)",
        "a: 0.304 epochs of 79 sequences (400 tokens)",
        "b: 0.414 epochs of 29 sequences (150 tokens)",
        "c: 1.09 epochs of 11 sequences (60 tokens)",
    ]


def test_sets_of_weight_zero_are_never_drawn_nor_opened() -> None:
    loader = training({"a": numbered(100)}, {"a": 1, "too_short": 0, "absent": 0.0})
    assert {name for step in range(40) for name, _ in loader.sources(step)} == {"a"}
    assert loader.epochs(5) == {"a": 40 / 19}


def test_a_sequence_longer_than_the_data_names_the_set_and_its_tokens() -> None:
    with pytest.raises(RequestError) as caught:
        training({"long": numbered(100), "short": numbered(20)}, {"long": 1, "short": 1}, sequence_length=20)
    first_line = str(caught.value).splitlines()[0]
    assert all(word in first_line for word in ("data.sequence_length", "20", "'short'", "20 tokens"))


def test_a_set_of_exactly_one_sequence_is_enough() -> None:
    batch = training({"a": numbered(21)}, {"a": 1}, sequence_length=20).batch(10**6)
    assert (batch.tokens == np.arange(21)).all()


def test_an_empty_set_is_an_error() -> None:
    for empty in (Tokens([]), token_set([[], []])):
        with pytest.raises(RequestError, match="0 tokens"):
            training({"a": empty}, {"a": 1})


def test_the_tail_that_fills_no_sequence_is_left_out() -> None:
    tokens = np.concatenate([training({"a": numbered(19)}, {"a": 1}).batch(step).tokens for step in range(9)])
    assert tokens.max() == 15


def test_a_trillion_tokens_and_a_step_beyond_32_bits_cost_no_memory() -> None:
    # shards of 2^40 tokens without memory behind them: every token is the same
    huge = Tokens(
        [Shard(np.lib.stride_tricks.as_strided(np.array([7], np.int32), (2**40,), (0,)), np.array([0, 2**40]))] * 3
    )
    keywords = {"sequence_length": 1024, "mixture_block": 2048, "global_batch_size": 64, "segments": True}
    loader = training({"huge": huge, "other": huge}, {"huge": 0.7, "other": 0.3}, **keywords)
    tracemalloc.start()
    for step in (0, 2**31 + 5, 2**40):
        batch = loader.batch(step)
        assert (batch.tokens == 7).all()
        assert (batch.segment_ids == 0).all()
        assert {window * 1024 < 3 * 2**40 for _, window in loader.sources(step)} == {True}
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 30_000_000
    assert sum(loader.sequences_seen(2**40).values()) == 2**46
    assert max(window for _, window in loader.sources(2**31 + 5)) > 2**30


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="how freed memory is kept is glibc's own way")
def test_batches_with_segments_are_not_paged_in_anew_each_time() -> None:
    code = """
import resource, types
import numpy as np
from marin_build.data.loader import TrainingLoader
from marin_build.recipe.mixture_schedule import Schedule
ids, offsets = np.arange(10**6, dtype=np.int32), np.arange(0, 10**6 + 1, 1000, dtype=np.int32)
data = types.SimpleNamespace(shards=[types.SimpleNamespace(ids=ids, offsets=offsets, loss_mask=None)])
schedule = Schedule.make([(0, {"a": 1.0})], block=64, global_batch_size=256, seed=0)
loader = TrainingLoader({"a": data}, schedule, sequence_length=2048, segments=True)
for step in range(10):
    loader.batch(step)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for step in range(10, 30):
    loader.batch(step)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 200  # 1,000 where freed memory goes back to the system


# ---- stages ----------------------------------------------------------------------------------------------------------

STAGES = [(6, {"a": 2, "b": 0, "c": 1}), (9, {"a": 0, "b": 1, "c": 1})]
"""After 0.5, 0.3 and 0.2: from step 6 on (sequence 48) and from step 9 on (sequence 72), blocks of 12."""


def test_each_stage_has_exact_shares_in_every_block() -> None:
    loader = training(three_sets(), WEIGHTS, stages=STAGES)
    names = [name for step in range(12) for name, _ in loader.sources(step)]
    blocks = [Counter(names[first : first + 12]) for first in range(0, 96, 12)]
    assert blocks == [{"a": 6, "b": 4, "c": 2}] * 4 + [{"a": 8, "c": 4}] * 2 + [{"b": 6, "c": 6}] * 2


def test_a_set_goes_on_with_its_own_order_in_the_next_stage() -> None:
    def windows_of(loader: TrainingLoader, name: str, steps: int) -> list[int]:
        return [window for step in range(steps) for other, window in loader.sources(step) if other == name]

    staged, alone = training(three_sets(), WEIGHTS, stages=STAGES), training(three_sets(), {"a": 1, "b": 1, "c": 1})
    for name in "abc":
        windows = windows_of(staged, name, 40)
        assert len(windows) > 30
        assert windows == windows_of(alone, name, 80)[: len(windows)]


def test_a_later_stage_changes_nothing_before_it() -> None:
    staged, plain = training(three_sets(), WEIGHTS, stages=STAGES), training(three_sets(), WEIGHTS)
    assert all(np.array_equal(staged.batch(step).tokens, plain.batch(step).tokens) for step in range(6))
    assert not np.array_equal(staged.batch(6).tokens, plain.batch(6).tokens)


def test_a_set_that_comes_later_takes_no_place_in_the_order_before() -> None:
    sets = {"0": numbered(99, first=5000), **three_sets(), "z": numbered(99, first=6000)}
    stages = [(6, {"0": 1, "a": 1, "b": 1, "c": 1, "z": 1})]
    late = training(sets, {"0": 0, **WEIGHTS, "z": 0}, stages=stages)
    plain = training(three_sets(), WEIGHTS)
    assert all(np.array_equal(late.batch(step).tokens, plain.batch(step).tokens) for step in range(6))
    assert {name for name, _ in late.sources(7) + late.sources(8)} == set(sets)


@st.composite
def staged(draw: st.DrawFn) -> dict[str, Any]:
    """Keywords of a loader with random weights, block, batch size and stages, and the steps at which they begin."""
    batch_size, block = draw(st.integers(1, 20)), draw(st.integers(4, 30))
    apart = block // math.gcd(block, batch_size)
    begins = draw(st.lists(st.integers(1, 6), unique=True, max_size=3).map(sorted))
    weight = st.one_of(st.integers(1, 3), st.floats(0.2, 3))
    weights = st.dictionaries(st.sampled_from("abc"), weight, min_size=1)
    named = {"a": 0, "b": 0, "c": 0}
    first, *later = [{**named, **draw(weights)} for _ in range(len(begins) + 1)]
    assume(all(_has_slots(each, block) for each in (first, *later)))
    stages = [(begin * apart, each) for begin, each in zip(begins, later, strict=True)]
    return {"weights": first, "stages": stages, "mixture_block": block, "global_batch_size": batch_size}


def _has_slots(weights: dict[str, float], block: int) -> bool:
    try:
        return bool(block_counts(weights, block))
    except RequestError:
        return False


@settings(max_examples=60)
@given(keywords=staged(), data=st.data())
def test_any_step_of_any_stages_is_the_same_in_any_order_and_cut_among_any_hosts(
    keywords: dict[str, Any], data: st.DataObject
) -> None:
    edges = [step for step, _ in keywords["stages"]]
    near = [step + shift for step in edges for shift in (-1, 0, 1)]
    steps = data.draw(st.lists(st.sampled_from([*near, 0, 1, 2, 3, 50]), min_size=1, max_size=8))
    cut = data.draw(st.integers(0, keywords["global_batch_size"]))
    loader = training(three_sets(), segments=True, **keywords)
    in_order = training(three_sets(), segments=True, **keywords)
    batches = [in_order.batch(step) for step in range(max(steps) + 1)]
    for step in steps:
        assert same(loader.batch(step), batches[step])
        parts = [
            training(three_sets(), segments=True, **keywords).batch(step, rows)
            for rows in (slice(cut), slice(cut, None))
        ]
        assert np.array_equal(np.concatenate([part.tokens for part in parts]), batches[step].tokens)
        assert np.array_equal(np.concatenate([part.segment_ids for part in parts]), batches[step].segment_ids)


@settings(max_examples=60)
@given(keywords=staged())
def test_through_all_stages_every_epoch_covers_each_window_once(keywords: dict[str, Any]) -> None:
    loader = training(three_sets(), **keywords)
    drawn: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    steps = 400 // keywords["global_batch_size"]
    for step in range(steps):
        for name, window in loader.sources(step):
            drawn[name].append(window)
    for name, windows in (("a", 79), ("b", 29), ("c", 11)):
        for first in range(0, len(drawn[name]), windows):
            epoch = drawn[name][first : first + windows]
            assert len(set(epoch)) == len(epoch) <= windows
            assert len(epoch) == windows or first + windows > len(drawn[name])
            assert set(epoch) <= set(range(windows))
    assert {name: len(windows) for name, windows in drawn.items() if windows} == {
        name: count for name, count in loader.sequences_seen(steps).items() if count
    }


# ---- loss masks ------------------------------------------------------------------------------------------------------


def masked(tokens: Tokens, seed: int = 0) -> Tokens:
    """The same documents, of whose tokens about a third is trained on."""
    dice = np.random.default_rng(seed)
    masks = [(dice.random(len(shard.ids)) < 0.3).astype(np.uint8) for shard in tokens.shards]
    return Tokens([Shard(s.ids, s.offsets, mask) for s, mask in zip(tokens.shards, masks, strict=True)])


@settings(max_examples=50)
@given(lengths=LENGTHS, sequence_length=st.integers(1, 12))
def test_a_target_counts_if_its_token_is_trained_on_across_any_shards(
    lengths: list[list[int]], sequence_length: int
) -> None:
    data = masked(token_set(lengths))
    if len(data.flat) <= sequence_length:
        return
    loader = training({"a": data}, {"a": 1.0}, sequence_length=sequence_length, segments=True, global_batch_size=25)
    trained = np.concatenate([shard.loss_mask for shard in data.shards])
    for step in (0, 3):
        batch = loader.batch(step)
        assert batch.mask is not None
        assert batch.mask.dtype == np.bool_
        assert (batch.mask == trained[batch.tokens[:, 1:]].astype(bool)).all()  # token n of the set is n


def test_all_targets_of_text_count_beside_conversations() -> None:
    sets = three_sets() | {"b": masked(numbered(150, first=1000))}
    loader = training(sets, WEIGHTS, segments=True)
    names = [name for name, _ in loader.sources(0)]
    mask = loader.batch(0).mask
    assert mask is not None
    assert {*names} == {"a", "b", "c"}
    assert all(mask[row].all() == (name != "b") for row, name in enumerate(names))
    assert (loader.batch(0, slice(2, 5)).mask == mask[2:5]).all()


def test_a_loss_mask_moves_no_token_and_text_alone_gets_none() -> None:
    plain, sets = training(three_sets(), WEIGHTS), three_sets()
    beside = training({**sets, "b": masked(sets["b"])}, WEIGHTS)
    assert plain.batch(1).mask is None
    assert not plain.is_masked
    assert beside.is_masked
    assert (beside.batch(1).tokens == plain.batch(1).tokens).all()
    assert beside.plan_digest == plain.plan_digest
    unused = training({**sets, "b": masked(sets["b"])}, {"a": 1.0, "b": 0.0, "c": 1.0})
    assert unused.batch(0).mask is None


@pytest.mark.parametrize("tokens", [41, 45, 46])
def test_validation_counts_every_trained_token_once_and_no_padding(tokens: int) -> None:
    data = masked(numbered(tokens))
    trained = np.concatenate([shard.loss_mask for shard in data.shards])
    seen = [
        batch.tokens[:, 1:][batch.mask]
        for batch in ValidationLoader(data, sequence_length=5, batch_size=4, segments=True)
    ]
    assert np.concatenate(seen).tolist() == (np.flatnonzero(trained[1:]) + 1).tolist()


# ---- the digest of the plan ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [{"seed": 4}, {"sequence_length": 6}, {"mixture_block": 10}, {"global_batch_size": 9}],
    ids=lambda change: next(iter(change)),
)
def test_whatever_determines_the_order_is_in_the_plan_digest(change: dict[str, int]) -> None:
    assert training(three_sets(), WEIGHTS, **change).plan_digest != training(three_sets(), WEIGHTS).plan_digest


def test_names_weights_and_sizes_of_the_sets_are_in_the_plan_digest() -> None:
    sets = three_sets()
    digests = {
        training(sets, WEIGHTS).plan_digest,
        training(sets, {**WEIGHTS, "a": 0.4}).plan_digest,
        training({**sets, "a": numbered(401)}, WEIGHTS).plan_digest,
        training({"a": sets["a"], "b": sets["b"], "d": sets["c"]}, {"a": 0.5, "b": 0.3, "d": 0.2}).plan_digest,
        training({"a": sets["b"], "b": sets["a"], "c": sets["c"]}, WEIGHTS).plan_digest,
    }
    assert len(digests) == 5


def test_the_plan_digest_leaves_out_what_does_not_move_a_token() -> None:
    digest = training(three_sets(), WEIGHTS).plan_digest
    assert len(digest) == 32
    assert training(three_sets(), WEIGHTS, segments=True).plan_digest == digest
    assert training(three_sets(), {**WEIGHTS, "unused": 0}).plan_digest == digest
    assert training({**three_sets(), "b": token_set([[3] * 50], first=9)}, WEIGHTS).plan_digest == digest


def test_stages_are_in_the_plan_digest() -> None:
    digests = {
        training(three_sets(), WEIGHTS, stages=stages).plan_digest
        for stages in ([], STAGES, STAGES[:1], [(9, STAGES[0][1])], [(6, {**STAGES[0][1], "b": 1})])
    }
    assert len(digests) == 5


def test_the_plan_digest_of_a_known_plan_is_pinned() -> None:
    assert training(three_sets(), WEIGHTS).plan_digest == "01eed0c65e7c6985e3f9084eb7ef6c9a"


# ---- validation ------------------------------------------------------------------------------------------------------


@given(lengths=LENGTHS, sequence_length=st.integers(1, 12), batch_size=st.integers(1, 5), segments=st.booleans())
def test_every_token_but_the_first_is_a_target_once(
    lengths: list[list[int]], sequence_length: int, batch_size: int, segments: bool
) -> None:
    data = token_set(lengths, first=100)
    if len(data.flat) < 2:
        return
    loader = ValidationLoader(data, sequence_length=sequence_length, batch_size=batch_size, segments=segments)
    batches = list(loader)
    assert len(batches) == len(loader)
    targets = np.concatenate([batch.tokens[:, 1:][batch.mask] for batch in batches])
    inputs = np.concatenate([batch.tokens[:, :-1][batch.mask] for batch in batches])
    assert targets.tolist() == data.flat[1:].tolist()
    assert inputs.tolist() == data.flat[:-1].tolist()
    assert loader.targets == len(targets)
    for batch in batches:
        assert batch.tokens.shape == (batch_size, sequence_length + 1)
        assert batch.mask.shape == (batch_size, sequence_length)
        assert (batch.segment_ids is None) == (not segments)


@given(lengths=LENGTHS, sequence_length=st.integers(1, 12), batch_size=st.integers(1, 5))
def test_validation_segments_are_documents_and_padding_is_one_more(
    lengths: list[list[int]], sequence_length: int, batch_size: int
) -> None:
    data = token_set(lengths)
    if len(data.flat) < 2:
        return
    loader = ValidationLoader(data, sequence_length=sequence_length, batch_size=batch_size, segments=True)
    found = np.concatenate([batch.segment_ids for batch in loader])
    for window, row in enumerate(found):
        documents = data.document_numbers[window * sequence_length :][: sequence_length + 1]
        if len(documents) < 2:  # not one target
            assert not row.any()
            continue
        padded = np.concatenate([documents, np.full(sequence_length + 1 - len(documents), documents[-1] + 1)])
        assert row.tolist() == np.unique(padded, return_inverse=True)[1].tolist()


def test_hosts_may_share_the_rows_of_a_validation_batch() -> None:
    loader = ValidationLoader(numbered(97), sequence_length=5, batch_size=8, segments=True)
    for number, batch in enumerate(loader):
        parts = [loader.batch(number, slice(first, first + 2)) for first in range(0, 8, 2)]
        for field in ("tokens", "segment_ids", "mask"):
            assert np.array_equal(np.concatenate([getattr(part, field) for part in parts]), getattr(batch, field))


def test_a_validation_set_shorter_than_a_sequence_is_padded() -> None:
    (batch,) = ValidationLoader(numbered(4, first=9), sequence_length=6, batch_size=2, segments=False)
    assert batch.tokens.tolist() == [[9, 10, 11, 12, 0, 0, 0], [0] * 7]
    assert batch.mask.tolist() == [[True] * 3 + [False] * 3, [False] * 6]


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_validation_set_without_a_target_is_an_error(tokens: int) -> None:
    with pytest.raises(RequestError, match=f"at least 2 tokens, this one has {tokens}"):
        ValidationLoader(token_set([[tokens]]), sequence_length=4, batch_size=2, segments=False)
