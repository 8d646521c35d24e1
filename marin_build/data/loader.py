"""Batches of tokens. A training batch is a function of (recipe, step): resuming is knowing the step.

Row r of step s is sequence s × global batch + r of the mixture's order, whoever asks for it: hosts take slices of the
rows, so the data order depends neither on their number nor on the devices. Nothing is kept between calls but a plan of
the steps that follow the last one read, which changes speed only.

Shapes: B rows, T tokens that are predicted, T + 1 tokens a row (inputs are [:, :-1], targets are [:, 1:]).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import xxhash

from marin_build.data.mixture import Mixture
from marin_build.data.shuffle import Integers
from marin_build.data.windows import NO_PLACES, Booleans, Places, Tokens, TokenSet, WindowReader, token_count
from marin_build.errors import RequestError
from marin_build.recipe.mixture_schedule import Schedule

ORDER_VERSION = 1
"""Raised when the same recipe would be read in another order."""
PLANNED_SEQUENCES = 16384
"""Sequences planned at once where steps are read in order: a few milliseconds; a quarter of it costs a tenth of the
loader's speed."""


@dataclass(frozen=True)
class Batch:
    """Rows of one batch, in numpy."""

    tokens: Tokens
    """[B, T + 1] int32."""
    segment_ids: Tokens | None
    """[B, T + 1] int32: the document of each token, numbered from 0 within the row; None: rows are not told apart."""
    mask: Booleans | None
    """[B, T]: targets that count; None: all of them. For training there is one where a set has a loss mask."""


class TrainingLoader:
    """Batches of a weighted mixture of token sets, without end: a set that is used up starts a new epoch.

    The last tokens of a set, which fill no sequence, are left out. Sets that no stage draws from are not looked at.

    Raises:
        RequestError: a sequence length that does not fit the data.
    """

    def __init__(
        self, sets: Mapping[str, TokenSet], schedule: Schedule, *, sequence_length: int, segments: bool
    ) -> None:
        names = schedule.names
        self._tokens = {name: token_count(sets[name]) for name in names}
        self._schedule, self._sequence_length = schedule, sequence_length
        self.mixture = Mixture.make(schedule, self._tokens, sequence_length)
        self._reader = WindowReader([sets[name] for name in names], sequence_length, segments=segments)
        _keep_freed_memory(schedule.global_batch_size, sequence_length)
        self._steps_ahead = max(1, max(PLANNED_SEQUENCES, schedule.block) // schedule.global_batch_size)
        self._planned: tuple[range, Places] = (range(0), NO_PLACES)
        self._next_step: int | None = None

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """The batch of `step`, from 0; with `rows` only those of its rows, for one host of several."""
        places = self._places(step, rows)
        return Batch(*self._reader.read(places), self._reader.read_mask(places))

    @property
    def is_masked(self) -> bool:
        """Whether batches have a mask: some set trains on some of its tokens only."""
        return self._reader.is_masked

    def sources(self, step: int, rows: slice | None = None) -> list[tuple[str, int]]:
        """Where each row of a batch comes from: the set, and the window of it, which begins at token window × T."""
        table = self._places(step, rows).table
        names = [component.name for component in self.mixture.components]
        return [(names[number], window) for number, window in zip(*table[:2].tolist(), strict=True)]

    def epochs(self, steps: int) -> dict[str, float]:
        """How often a run of `steps` steps reads each set; 1.0 is once. Sets of weight 0 are left out."""
        seen = self.sequences_seen(steps)
        return {component.name: seen[component.name] / component.windows for component in self.mixture.components}

    def sequences_seen(self, step: int) -> dict[str, int]:
        """Sequences of each set in the batches before `step`."""
        return self.mixture.drawn(step * self._schedule.global_batch_size)

    def report(self, steps: int) -> str:
        """What a run of `steps` steps will read, a line a set after one a stage: to be shown before training."""
        epochs, block = self.epochs(steps), self.mixture.block
        sets = [
            f"{epochs[c.name]:.3g} epochs of {c.windows:,} sequences ({self._tokens[c.name]:,} tokens)"
            for c in self.mixture.components
        ]
        first, *later = self._schedule.stages
        if not later:
            shares = [f"{count} of every {block} sequences ({count / block:.2%})" for count in first.counts.values()]
            return "\n".join(map("{}: {}, {}".format, first.counts, shares, sets))
        stages = [
            f"from step {stage.from_step:,} on, of every {block} sequences: "
            + ", ".join(f"{count} {name} ({count / block:.2%})" for name, count in stage.counts.items())
            for stage in self._schedule.stages
        ]
        return "\n".join([*stages, *map("{}: {}".format, epochs, sets)])

    @property
    def plan_digest(self) -> str:
        """Hash of all that determines which tokens of which set are in which row of which step, as 32 hex digits.

        A checkpoint keeps it, so that a resumed run can tell that it would read other data. It knows the sizes of the
        sets, not their content: that is the business of the artifacts' digests.
        """
        components = self.mixture.components
        plan = {
            "order_version": ORDER_VERSION,
            "seed": self.mixture.seed,
            "sequence_length": self._sequence_length,
            "global_batch_size": self._schedule.global_batch_size,
            "components": [[c.name, c.counts[0], self._tokens[c.name]] for c in components],
        }
        if later := self.mixture.first_blocks[1:]:
            plan["stages"] = [[first, [c.counts[n] for c in components]] for n, first in enumerate(later, 1)]
        return xxhash.xxh3_128_hexdigest(json.dumps(plan, sort_keys=True, ensure_ascii=True).encode())

    def _places(self, step: int, rows: slice | None) -> Places:
        """Places of a batch's rows: from the plan, or where steps are read in no order, worked out for it alone."""
        if step < 0:
            raise ValueError(f"step {step} is negative")
        size = self._schedule.global_batch_size
        planned = self._planned
        if step not in planned[0]:
            in_order, self._next_step = step == self._next_step, step + 1
            steps = range(step, step + self._steps_ahead if in_order else step + 1)
            planned = (steps, self._reader.places(*self.mixture.plan(step * size, len(steps) * size)))
            if in_order:  # kept, safely for threads
                self._planned = planned
                self._next_step = steps.stop
        return planned[1].take((step - planned[0].start) * size + _row_numbers(size, rows))


class ValidationLoader:
    """A token set once, in order: every token but the first is a target exactly once, if it is trained on.

    All batches have the same shape; what is missing in the last is padding, masked.

    Raises:
        RequestError: a set of fewer than two tokens, which has no target.
    """

    def __init__(self, token_set: TokenSet, *, sequence_length: int, batch_size: int, segments: bool) -> None:
        self.targets = token_count(token_set) - 1
        """Tokens that are predicted, in all, trained on or not."""
        if self.targets < 1:
            raise RequestError(f"a validation set needs at least 2 tokens, this one has {self.targets + 1}")
        self._sequence_length, self._batch_size = sequence_length, batch_size
        self._reader = WindowReader([token_set], sequence_length, segments=segments)
        _keep_freed_memory(batch_size, sequence_length)

    def __len__(self) -> int:
        """Batches."""
        return -(-self.targets // (self._sequence_length * self._batch_size))

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch(number) for number in range(len(self)))

    def batch(self, number: int, rows: slice | None = None) -> Batch:
        """Batch `number`, from 0; with `rows` only those of its rows, for one host of several."""
        windows = number * self._batch_size + _row_numbers(self._batch_size, rows)
        targets = np.clip(self.targets - windows * self._sequence_length, 0, self._sequence_length)
        last = (self.targets - 1) // self._sequence_length
        places = self._reader.places(np.zeros_like(windows), np.minimum(windows, last))
        tokens, segment_ids = self._reader.read(places)
        tokens[windows > last] = 0
        if segment_ids is not None:
            segment_ids[windows > last] = 0
        mask, trained = np.arange(self._sequence_length) < targets[:, None], self._reader.read_mask(places)
        return Batch(tokens, segment_ids, mask if trained is None else mask & trained)


def _keep_freed_memory(rows: int, sequence_length: int) -> None:
    """Free a block of a few batches, once: glibc keeps back twice the largest block that it saw freed (to 32 MiB).

    Without it a batch with segments is paged in anew each time: 1,000 faults and three times the CPU time at 256 rows
    of 2,049 tokens. The block is never touched, so it takes no memory; elsewhere than in glibc it changes nothing.
    """
    np.empty(min(4 * rows * (sequence_length + 1) * 4, 31 << 20), dtype=np.uint8)


def _row_numbers(batch_size: int, rows: slice | None) -> Integers:
    if rows is not None and (rows.step or 1) < 0:
        raise ValueError(f"rows {rows} are not in rising order")
    return np.arange(batch_size)[slice(None) if rows is None else rows]
