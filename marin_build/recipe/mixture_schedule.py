"""The mixture of a whole run: its stages, and how many sequences of each component come in each of them.

The first stage has the weights of `data.train`; each later one has weights of its own from a step on, which begins a
block. What the order of a block is decides what the run draws from its last, unfinished block; so that order is here
too, for one block at a time and without numpy. `data/mixture.py` computes the same for many.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from marin_build.errors import RequestError
from marin_build.recipe.mixture_counts import shares_of, smallest_block, stage_counts

if TYPE_CHECKING:
    from marin_build.recipe.schema import CheckpointRecipe

_WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Stage:
    """Steps with one set of weights."""

    from_step: int
    first_block: int
    weights: Mapping[str, float]
    counts: Mapping[str, int]
    """Sequences of each block by component, sorted by name; those of weight 0 are left out."""


@dataclass(frozen=True)
class Schedule:
    """All stages of a run, and all that decides which component a sequence comes from."""

    stages: tuple[Stage, ...]
    block: int
    global_batch_size: int
    seed: int

    @classmethod
    def make(
        cls, stages: Sequence[tuple[int, Mapping[str, float]]], *, block: int, global_batch_size: int, seed: int
    ) -> Schedule:
        """The schedule of stages given as (first step, weights), the first of them from step 0.

        Raises:
            RequestError: a weight or block that is not allowed or gets no sequence, or a stage that begins no block.
        """
        begins = [step * global_batch_size for step, _ in stages]
        counts = stage_counts([weights for _, weights in stages], block, begins)
        for number, (step, _) in enumerate(stages):
            if step * global_batch_size % block:
                raise RequestError(_no_edge(number, step, block, global_batch_size))
        made = (
            Stage(step, step * global_batch_size // block, weights, count)
            for (step, weights), count in zip(stages, counts, strict=True)
        )
        return cls(tuple(made), block, global_batch_size, seed)

    @property
    def names(self) -> list[str]:
        """Components that are drawn from in some stage, sorted."""
        return sorted({name for stage in self.stages for name in stage.counts})

    def drawn(self, steps: int) -> list[dict[str, int]]:
        """By stage, how many sequences of each of its components come in a run of `steps` steps."""
        totals = [
            self._before(min(step, steps) * self.global_batch_size)
            for step in [*(stage.from_step for stage in self.stages), steps]
        ]
        return [
            {name: after[name] - before[name] for name in stage.counts}
            for stage, (before, after) in zip(self.stages, pairwise(totals), strict=True)
        ]

    def check_served(self, steps: int) -> None:
        """Raise RequestError where a run of `steps` steps ends before it draws from a component of its last stage."""
        for number, (stage, drawn) in enumerate(zip(self.stages, self.drawn(steps), strict=True)):
            if starved := [name for name, sequences in drawn.items() if not sequences]:
                raise RequestError(self._starved(number, stage, starved, steps))

    def _before(self, sequences: int) -> dict[str, int]:
        """How many of the first `sequences` sequences come from each component."""
        block, rest = divmod(sequences, self.block)
        totals = dict.fromkeys(self.names, 0)
        ends = [*(stage.first_block for stage in self.stages[1:]), None]
        for stage, end in zip(self.stages, ends, strict=True):
            blocks = (block if end is None else min(block, end)) - stage.first_block
            for name, count in stage.counts.items():
                totals[name] += max(blocks, 0) * count
        if rest:
            now = next(stage for stage in reversed(self.stages) if stage.first_block <= block)
            for name in self._order(now, block)[:rest]:
                totals[name] += 1
        return totals

    def _order(self, stage: Stage, number: int) -> list[str]:
        """The components of one block, in order."""
        key = derive_key("mixture", self.seed)
        slots = [name for name, count in stage.counts.items() for _ in range(count)]
        first = number * self.block
        words = [_random_word(key, first + place) for place in range(self.block)]
        return [slots[place] for place in sorted(range(self.block), key=words.__getitem__)]

    def _starved(self, number: int, stage: Stage, starved: Sequence[str], steps: int) -> str:
        sequences = (steps - stage.from_step) * self.global_batch_size
        where = f"data.stages[{number - 1}]" if number else "data.train"
        enough = self._smallest_block()
        if enough is None:
            helps = "no mixture_block works"
        elif enough <= sequences:
            helps = f"the smallest mixture_block that works is {enough:,}"
        else:
            helps = f"{-(-enough // self.global_batch_size):,} steps with a mixture_block of {enough:,} would do"
        return (
            f"{where}: {starved[0]!r} has a weight above 0 and would get nothing: {sequences:,} sequences are less "
            f"than a block of {self.block:,} and end before it comes; {helps}"
            f"\n  without a sequence: {', '.join(starved)}"
            "\n  lower data.mixture_block, train for more steps, or set the weight to 0 to leave the component out"
        )

    def _smallest_block(self) -> int | None:
        begins = [stage.from_step * self.global_batch_size for stage in self.stages]
        return smallest_block([shares_of(stage.weights) for stage in self.stages], 0, begins)


def _no_edge(number: int, step: int, block: int, global_batch_size: int) -> str:
    apart = block // math.gcd(block, global_batch_size)
    below, above = step // apart * apart, (step // apart + 1) * apart
    works = f"{below:,} and {above:,} work" if below else f"{above:,} works"
    return (
        f"data.stages[{number - 1}].from_step: step {step:,} begins no block of mixture_block {block:,}; "
        f"the nearest {works}"
        f"\n  with {global_batch_size:,} sequences a step, steps that are a multiple of {apart:,} begin a block"
        f"\n  or choose a mixture_block that divides {step * global_batch_size:,}, the sequences before the stage"
    )


def schedule_of(recipe: CheckpointRecipe) -> Schedule:
    """The schedule of a recipe.

    Raises:
        RequestError: see `Schedule.make`.
    """
    first = {name: component.weight for name, component in recipe.data.train.items()}
    later = [(stage.from_step, stage.weights) for stage in recipe.data.stages]
    return Schedule.make(
        [(0, first), *later],
        block=recipe.data.mixture_block,
        global_batch_size=recipe.global_batch_size,
        seed=recipe.seed,
    )


# ---- keyed randomness ------------------------------------------------------------------------------------------------


def derive_key(purpose: str, seed: int, name: str = "") -> int:
    """The 64-bit key of one purpose: from the seed and a data set's name, never from the set's place in a list."""
    import xxhash

    return xxhash.xxh3_64_intdigest(f"{purpose}/{seed}/{name}".encode())


def _random_word(key: int, number: int) -> int:
    """Entry `number` of the SplitMix64 stream that starts at `key`: `data.shuffle.random_words` for one number."""
    word = ((number + 1) * 0x9E3779B97F4A7C15 + key) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
