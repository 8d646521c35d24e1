"""What a run draws from each component of its mixture, beside what there is: epochs, limits, and what is wrong.

It needs no data, only the number of tokens of each set where that is known, so it can be asked before a build.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from marin_build.recipe.mixture_schedule import schedule_of

if TYPE_CHECKING:
    from marin_build.recipe.schema import CheckpointRecipe


@dataclass(frozen=True)
class Need:
    """One component over the whole run."""

    name: str
    target: str
    sequence_length: int
    sequences: tuple[int, ...]
    """Drawn, by stage; 0 where the stage does not draw from it."""
    available_tokens: int | None
    """Of the whole set; None: not known."""
    max_epochs: float | None

    @property
    def tokens(self) -> int:
        """Tokens that are predicted over the run."""
        return sum(self.sequences) * self.sequence_length

    @property
    def windows(self) -> int | None:
        """Sequences of the whole set: one epoch. Neighbours share a token, and a tail that fills none is left out."""
        return None if self.available_tokens is None else max(0, self.available_tokens - 1) // self.sequence_length

    @property
    def epochs(self) -> float | None:
        """How often the run reads the set; None where its size is not known, or too small for a sequence."""
        return sum(self.sequences) / self.windows if self.windows else None

    @property
    def problem(self) -> str | None:
        """What makes the run impossible, for people; None: nothing known."""
        if self.windows is None or not any(self.sequences):
            return None
        if not self.windows:
            return too_short(self.name, self.available_tokens or 0, self.sequence_length)
        limit = None if self.max_epochs is None else Fraction(repr(self.max_epochs))
        if limit is None or sum(self.sequences) <= limit * self.windows:
            return None
        return self._over(limit)

    def _over(self, limit: Fraction) -> str:
        drawn, factor = sum(self.sequences), limit * (self.windows or 0) / sum(self.sequences)
        enough = -(-drawn // limit) * self.sequence_length + 1
        return (
            f"data.train.{self.name}.max_epochs: the run reads {self.epochs:.4g} epochs of it, "
            f"more than the limit of {self.max_epochs:g}"
            f"\n  it draws {drawn:,} sequences ({self.tokens:,} tokens) of {self.target}, "
            f"which has {self.windows:,} ({self.available_tokens:,} tokens)"
            f"\n  what helps: a set of {enough:,} tokens or more, {float(factor):.3g} times its share or less, "
            "fewer steps, or a higher max_epochs"
        )


def needs_of(recipe: CheckpointRecipe, tokens: Mapping[str, int | None]) -> list[Need]:
    """What a run draws from every component that a stage draws from, sorted by name.

    Args:
        tokens: of each component's set, by the component's name; None or absent where it is not known.
    """
    schedule = schedule_of(recipe)
    drawn = schedule.drawn(recipe.steps)
    return [
        Need(
            name=name,
            target=recipe.data.train[name].target,
            sequence_length=recipe.data.sequence_length,
            sequences=tuple(stage.get(name, 0) for stage in drawn),
            available_tokens=tokens.get(name),
            max_epochs=recipe.data.train[name].max_epochs,
        )
        for name in schedule.names
    ]


def too_short(name: str, tokens: int, sequence_length: int) -> str:
    """What to say of a set that fills no sequence."""
    return (
        f"data.sequence_length: {sequence_length} is longer than the data of {name!r}, which has {tokens} tokens\n"
        f"  a sequence takes {sequence_length + 1}: shorten data.sequence_length, add text, or set the weight to 0"
    )
