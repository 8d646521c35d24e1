"""How many sequences of each block every component of a mixture gets: largest remainders, in exact arithmetic.

All that a recipe says of its mixture is decided here, without data, so that a mixture that cannot be is an error while
a run is planned. A recipe may have several stages, each with weights of its own; one block size serves them all.

Shares are whole numbers in the exact proportion of the weights, by component and sorted by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from marin_build.errors import RequestError

MAX_BLOCK = 1 << 20
"""A block is planned at once: about 0.1 s and 100 MB at this size."""

Shares = Mapping[str, int]


def block_counts(weights: Mapping[str, float], block: int) -> dict[str, int]:
    """Sequences of each block by component, sorted by name; components of weight 0 are left out.

    Weights are taken as the decimal numbers that were written, so 0.6 and 0.4 are the same mixture as 6 and 4.

    Raises:
        RequestError: a weight or block that is not allowed, or a weight above 0 that gets no sequence of a block.
    """
    return stage_counts([weights], block)[0]


def stage_counts(
    stages: Sequence[Mapping[str, float]], block: int, begins: Sequence[int] = (0,)
) -> list[dict[str, int]]:
    """`block_counts` of each stage.

    Args:
        begins: the sequence with which each stage begins; blocks that an error recommends fit them.

    Raises:
        RequestError: see `block_counts`; the block that an error names works for every stage.
    """
    shares = [shares_of(weights) for weights in stages]
    if not 1 <= block <= MAX_BLOCK:
        raise RequestError(f"data.mixture_block: {block} is not allowed, a block has 1 to {MAX_BLOCK} sequences")
    counts = [_largest_remainder(each, block) for each in shares]
    for number, count in enumerate(counts):
        if 0 in count.values():
            where = f" in data.stages[{number - 1}]" if number else ""
            raise RequestError(_no_slot(shares[number], count, block, where, smallest_block(shares, block, begins)))
    return counts


def shares_of(weights: Mapping[str, float]) -> Shares:
    """Weights above 0 as shares."""
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


def _largest_remainder(shares: Shares, block: int) -> dict[str, int]:
    """Whole numbers that sum to `block`, each share × block rounded down or up; equal remainders go by name."""
    total = sum(shares.values())
    counts, remainders = {}, []
    for name, share in shares.items():
        counts[name], remainder = divmod(share * block, total)
        remainders.append((-remainder, name))
    for _, name in sorted(remainders)[: block - sum(counts.values())]:
        counts[name] += 1
    return counts


def _no_slot(shares: Shares, counts: Mapping[str, int], block: int, where: str, enough: int | None) -> str:
    starved = min((name for name, count in counts.items() if count == 0), key=lambda name: (shares[name], name))
    share = shares[starved] / sum(shares.values())
    return (
        f"data.mixture_block: a block of {block} has no sequence for {starved!r}{where} (share {share:.3g}); "
        + (f"the smallest larger block that works is {enough}" if enough else f"no block up to {MAX_BLOCK} works")
        + f"\n  without a sequence: {', '.join(name for name, count in counts.items() if count == 0)}"
        + "\n  raise data.mixture_block, raise the weight, or set the weight to 0 to leave the component out"
    )


def smallest_block(stages: Sequence[Shares], above: int, begins: Sequence[int] = (0,)) -> int | None:
    """The smallest block larger than `above` in which each share of each stage gets a sequence; None: there is none.

    It has to be searched: with largest remainders a larger block can give a component fewer sequences. No block below
    total / (C × smallest share) works: the smallest share's remainder, if it is rounded up, is at least each of those
    rounded down, and with them it makes up a whole sequence.

    Args:
        begins: sequences with which a block must begin.
    """
    edges, rarest = math.gcd(*begins), [_rarest(shares) for shares in stages]
    lowest = max(
        -(-sum(shares.values()) // (len(shares) * shares[name])) for shares, name in zip(stages, rarest, strict=True)
    )
    for block in range(max(above + 1, lowest), MAX_BLOCK + 1):
        if edges % block == 0 and all(map(_is_served, rarest, stages, [block] * len(stages))):
            return block
    return None


def _rarest(shares: Shares) -> str:
    """The component that is served last: of the smallest share, the last by name."""
    smallest = min(shares.values())
    return max(name for name, share in shares.items() if share == smallest)


def _is_served(name: str, shares: Shares, block: int) -> bool:
    """Whether one share gets a sequence; if the rarest does, all do. `_largest_remainder` without its sorting."""
    total = sum(shares.values())
    if shares[name] * block >= total:
        return True
    remainders = {other: share * block % total for other, share in shares.items()}
    mine = remainders[name]
    ahead = sum(
        1 for other, remainder in remainders.items() if remainder > mine or (remainder == mine and other < name)
    )
    return ahead < sum(remainders.values()) // total
