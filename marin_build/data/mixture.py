"""The order of the training sequences: sequence number → data set and window.

Sequences come in blocks. Every block holds each set in the same count (largest remainder of share × block), in an order
keyed by the seed and the block's number. The n-th sequence drawn from a set, counted over the whole run, is the n-th of
that set's own shuffle. So shares are exact to within one sequence a block, a set is read epoch by epoch, and what a set
gives does not depend on the sets beside it, on their weights or on the order in which a recipe lists them.

Shapes: N sequences, K sequences a block, C components.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from marin_build.data.shuffle import Integers, derive_key, random_words, shuffled
from marin_build.errors import RequestError

MAX_BLOCK = 1 << 20
"""A block is planned at once: about 0.1 s and 100 MB at this size."""


@dataclass(frozen=True)
class Component:
    """One data set of a mixture."""

    name: str
    count: int
    """Sequences of each block."""
    windows: int
    """Sequences of the whole set: one epoch."""


@dataclass(frozen=True)
class Mixture:
    """The order of all sequences, as a function of the sequence number. Components are sorted by name."""

    components: tuple[Component, ...]
    seed: int

    @property
    def block(self) -> int:
        return sum(component.count for component in self.components)

    def plan(self, first_block: int, blocks: int) -> tuple[Integers, Integers]:
        """Component numbers [N] and their windows [N] of the sequences of `blocks` blocks, N = blocks × K."""
        order = self._order(first_block, blocks)
        windows = np.empty_like(order)
        for number, component in enumerate(self.components):
            uses = first_block * component.count + np.arange(blocks * component.count)
            key = derive_key("windows", self.seed, component.name)
            windows[order == number] = shuffled(uses, component.windows, key)
        return order, windows

    def drawn(self, sequences: int) -> dict[str, int]:
        """How many of the first `sequences` sequences come from each component."""
        full_blocks, rest = divmod(sequences, self.block)
        in_rest = np.bincount(self._order(full_blocks, 1)[:rest], minlength=len(self.components))
        return {
            component.name: full_blocks * component.count + int(more)
            for component, more in zip(self.components, in_rest, strict=True)
        }

    def _order(self, first_block: int, blocks: int) -> Integers:
        """Component numbers [N], each block sorted by random words: no two are equal, so there are no ties."""
        slots = np.repeat(np.arange(len(self.components)), [component.count for component in self.components])
        numbers = first_block * self.block + np.arange(blocks * self.block)
        words = random_words(derive_key("mixture", self.seed), numbers)
        return slots[np.argsort(words.reshape(blocks, self.block), axis=1)].reshape(-1)


def block_counts(weights: Mapping[str, float], block: int) -> dict[str, int]:
    """Sequences of each block by component, sorted by name; components of weight 0 are left out.

    Weights are taken as the decimal numbers that were written, so 0.6 and 0.4 are the same mixture as 6 and 4.

    Raises:
        RequestError: a weight or block that is not allowed, or a weight above 0 that gets no sequence of a block.
    """
    shares = _shares(weights)
    if not 1 <= block <= MAX_BLOCK:
        raise RequestError(f"data.mixture_block: {block} is not allowed, a block has 1 to {MAX_BLOCK} sequences")
    counts = _largest_remainder(shares, block)
    if 0 in counts.values():
        raise RequestError(_no_slot(shares, counts, block))
    return counts


def _shares(weights: Mapping[str, float]) -> dict[str, int]:
    """Weights above 0 as whole numbers in exact proportion, sorted by name."""
    for name, weight in weights.items():
        if not (math.isfinite(weight) and weight >= 0):
            raise RequestError(
                f"data.train.{name}.weight: {weight} is not allowed, a weight is a finite number from 0 up"
            )
    exact = {name: Fraction(repr(float(weights[name]))) for name in sorted(weights) if weights[name] > 0}
    if not exact:
        raise RequestError("data.train: at least one component needs a weight above 0")
    denominator = math.lcm(*(share.denominator for share in exact.values()))
    return {name: int(share * denominator) for name, share in exact.items()}


def _largest_remainder(shares: Mapping[str, int], block: int) -> dict[str, int]:
    """Whole numbers that sum to `block`, each share × block rounded down or up; equal remainders go by name."""
    total = sum(shares.values())
    counts, remainders = {}, []
    for name, share in shares.items():
        counts[name], remainder = divmod(share * block, total)
        remainders.append((-remainder, name))
    for _, name in sorted(remainders)[: block - sum(counts.values())]:
        counts[name] += 1
    return counts


def _no_slot(shares: Mapping[str, int], counts: Mapping[str, int], block: int) -> str:
    starved = min((name for name, count in counts.items() if count == 0), key=lambda name: (shares[name], name))
    share = shares[starved] / sum(shares.values())
    enough = smallest_block(shares, above=block)
    return (
        f"data.mixture_block: a block of {block} has no sequence for {starved!r} (share {share:.3g}); "
        + (f"the smallest larger block that works is {enough}" if enough else f"no block up to {MAX_BLOCK} has one")
        + f"\n  without a sequence: {', '.join(name for name, count in counts.items() if count == 0)}"
        + "\n  raise data.mixture_block, raise the weight, or set the weight to 0 to leave the component out"
    )


def smallest_block(shares: Mapping[str, int], above: int) -> int | None:
    """The smallest block larger than `above` in which each share gets a sequence; None: there is none up to MAX_BLOCK.

    It has to be searched: with largest remainders a larger block can give a component fewer sequences. No block below
    total / (C × smallest share) works: the smallest share's remainder, if it is rounded up, is at least each of those
    rounded down, and with them it makes up a whole sequence.
    """
    total, smallest = sum(shares.values()), min(shares.values())
    last = max(name for name, share in shares.items() if share == smallest)
    lowest = -(-total // (len(shares) * smallest))
    for block in range(max(above + 1, lowest), MAX_BLOCK + 1):
        if _is_served(last, shares, total, block):
            return block
    return None


def _is_served(name: str, shares: Mapping[str, int], total: int, block: int) -> bool:
    """Whether one share gets a sequence; if the smallest does, all do. `_largest_remainder` without its sorting."""
    if shares[name] * block >= total:
        return True
    remainders = {other: share * block % total for other, share in shares.items()}
    mine = remainders[name]
    ahead = sum(
        1 for other, remainder in remainders.items() if remainder > mine or (remainder == mine and other < name)
    )
    return ahead < sum(remainders.values()) // total
