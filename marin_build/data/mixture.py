"""The order of the training sequences: sequence number → data set and window.

Sequences come in blocks. Every block of a stage holds each set in the same count (largest remainder of share × block),
in an order keyed by the seed and the block's number. The n-th sequence drawn from a set, counted over the whole run, is
the n-th of that set's own shuffle. So shares are exact to within one sequence a block, a set is read epoch by epoch
through all stages, and what a set gives does not depend on the sets beside it, on their weights or on the order in
which a recipe lists them.

Shapes: N sequences, K sequences a block, C components.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from marin_build.data.shuffle import Integers, random_words, shuffled
from marin_build.errors import RequestError
from marin_build.recipe.mixture_needs import too_short
from marin_build.recipe.mixture_schedule import Schedule, derive_key


@dataclass(frozen=True)
class Component:
    """One data set of a mixture."""

    name: str
    counts: tuple[int, ...]
    """Sequences of each block, by stage."""
    windows: int
    """Sequences of the whole set: one epoch."""


@dataclass(frozen=True)
class Mixture:
    """The order of all sequences, as a function of the sequence number. Components are sorted by name."""

    components: tuple[Component, ...]
    seed: int
    first_blocks: tuple[int, ...] = (0,)
    """The block with which each stage begins, rising from 0."""

    @classmethod
    def make(cls, schedule: Schedule, tokens: Mapping[str, int], sequence_length: int) -> Mixture:
        """The mixture of a schedule over sets of these sizes; those that no stage draws from are not looked at.

        Raises:
            RequestError: a sequence length that does not fit the data.
        """
        components = [
            Component(
                name,
                tuple(stage.counts.get(name, 0) for stage in schedule.stages),
                _windows_in(name, tokens[name], sequence_length),
            )
            for name in schedule.names
        ]
        return cls(tuple(components), schedule.seed, tuple(stage.first_block for stage in schedule.stages))

    @property
    def block(self) -> int:
        return sum(component.counts[0] for component in self.components)

    def plan(self, first: int, sequences: int) -> tuple[Integers, Integers]:
        """Component numbers [N] and their windows [N] of N = `sequences` sequences from number `first` on."""
        parts = [self._plan(*part) for part in self._by_stage(first, first + sequences)]
        order, windows = zip(*parts, strict=True)
        return (order[0], windows[0]) if len(parts) == 1 else (np.concatenate(order), np.concatenate(windows))

    def drawn(self, sequences: int) -> dict[str, int]:
        """How many of the first `sequences` sequences come from each component."""
        block, rest = divmod(sequences, self.block)
        stage = bisect_right(self.first_blocks, block) - 1
        in_rest = np.bincount(self._order(stage, block, 1)[:rest], minlength=len(self.components))
        return {
            component.name: self._uses_before(component, stage, block) + int(more)
            for component, more in zip(self.components, in_rest, strict=True)
        }

    def _by_stage(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(stage, first, end) of the parts of a range of sequences."""
        edges = [block * self.block for block in self.first_blocks] + [end]
        for stage, (begin, stop) in enumerate(pairwise(edges)):
            begin, stop = max(first, begin), min(end, stop)
            if begin < stop:
                yield stage, begin, stop

    def _plan(self, stage: int, first: int, end: int) -> tuple[Integers, Integers]:
        first_block, place = divmod(first, self.block)
        order = self._order(stage, first_block, -(-end // self.block) - first_block)
        skipped = np.bincount(order[:place], minlength=len(self.components)).tolist()
        order = order[place : place + end - first]
        windows = np.empty_like(order)
        for number, component in enumerate(self.components):
            chosen = np.flatnonzero(order == number)
            if len(chosen):
                uses = self._uses_before(component, stage, first_block) + skipped[number] + np.arange(len(chosen))
                key = derive_key("windows", self.seed, component.name)
                windows[chosen] = shuffled(uses, component.windows, key)
        return order, windows

    def _uses_before(self, component: Component, stage: int, block: int) -> int:
        """Sequences of a component before a block of a stage."""
        edges = [*self.first_blocks[: stage + 1], block]
        lengths = [after - before for before, after in pairwise(edges)]
        return sum(length * count for length, count in zip(lengths, component.counts, strict=False))

    def _order(self, stage: int, first_block: int, blocks: int) -> Integers:
        """Component numbers [N], each block sorted by random words: no two are equal, so there are no ties."""
        slots = np.repeat(np.arange(len(self.components)), [component.counts[stage] for component in self.components])
        numbers = first_block * self.block + np.arange(blocks * self.block)
        words = random_words(derive_key("mixture", self.seed), numbers)
        return slots[np.argsort(words.reshape(blocks, self.block), axis=1)].reshape(-1)


def _windows_in(name: str, tokens: int, sequence_length: int) -> int:
    windows = (tokens - 1) // sequence_length
    if windows < 1:
        raise RequestError(too_short(name, tokens, sequence_length))
    return windows
