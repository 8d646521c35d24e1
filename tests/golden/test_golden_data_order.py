"""The data order, pinned: a change of it would make every resumed or repeated run read other data, silently."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from marin_build.data.mixture import Component, Mixture
from marin_build.recipe.mixture_counts import block_counts

GOLDEN = Path(__file__).parent / "data_order.txt"
WINDOWS = {"dclm_baseline": 13_016_601, "proofpile_2": 188_477, "starcoderdata": 856_445}
WEIGHTS = {"dclm_baseline": 3.8, "starcoderdata": 0.25, "proofpile_2": 0.055}


def lines() -> Iterator[str]:
    """First windows of some blocks: the reference mixture, a far block, and sets of few windows over many epochs."""
    reference = mixture(WEIGHTS, WINDOWS, block=2048, seed=0)
    for block in (0, 1, 2**33):
        yield from block_lines(f"reference seed 0 block {block}", reference, block, rows=48)
    for seed in (0, 1):
        small = mixture({"a": 0.5, "b": 0.3, "c/d": 0.2}, {"a": 1, "b": 5, "c/d": 67}, block=10, seed=seed)
        for block in (0, 1, 1000):
            yield from block_lines(f"small seed {seed} block {block}", small, block, rows=10)


def mixture(weights: dict[str, float], windows: dict[str, int], *, block: int, seed: int) -> Mixture:
    counts = block_counts(weights, block)
    return Mixture(tuple(Component(name, (count,), windows[name]) for name, count in counts.items()), seed)


def block_lines(title: str, made: Mixture, block: int, *, rows: int) -> Iterator[str]:
    yield f"{title}\n"
    order, windows = made.plan(block * made.block, made.block)
    places = [f"{made.components[number].name}:{window}" for number, window in zip(order[:rows], windows, strict=False)]
    for first in range(0, rows, 4):
        yield f"  {' '.join(places[first : first + 4])}\n"


def test_the_data_order_is_the_one_that_was_pinned():
    assert "".join(lines()) == GOLDEN.read_text(encoding="utf-8")
