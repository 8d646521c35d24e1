"""Validation: exact sums for each set, and every mean that is reported derived from them.

For a set the sums are nats, tokens and bytes over its targets, which are all of its tokens but the first. Bits per byte
is nats / ln 2 / bytes: it compares models whatever their tokenizers. Special tokens have no bytes, and cost nats.

    B batch   T tokens that are predicted   V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import numpy as np

from marin_build.data.loader import Batch, ValidationLoader
from marin_build.errors import NumericalError, RequestError
from marin_build.training.feed import check_ids, local_rows, placer, rows_of
from marin_build.training.step import ValidationStep


@dataclass(frozen=True)
class Score:
    """Sums over the targets of a set, or of several."""

    nats: float
    tokens: int
    bytes: int

    def __add__(self, other: Score) -> Score:
        return Score(self.nats + other.nats, self.tokens + other.tokens, self.bytes + other.bytes)

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.tokens

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


@dataclass(frozen=True)
class Validator:
    """Scores parameters on validation sets."""

    loaders: Mapping[str, ValidationLoader]
    step: ValidationStep
    byte_lengths: np.ndarray
    """[V] bytes of each id's text."""
    batch_size: int
    mesh: jax.sharding.Mesh
    stop_requested: Callable[[], bool]

    def validate(self, parameters: Any) -> dict[str, float] | None:
        """All validation metrics of these parameters; None when a stop was requested meanwhile.

        Raises:
            NumericalError: the loss of a set is not a number.
            RequestError: a set without bytes.
        """
        scores: dict[str, Score] = {}
        for name, loader in self.loaders.items():
            score = self._score(name, loader, parameters)
            if score is None:
                return None
            if not math.isfinite(score.nats):
                raise NumericalError(
                    f"the validation loss of {name} is {score.nats}\n  the model's parameters overflow"
                )
            if score.bytes == 0:
                raise RequestError(f"measure.validation.sets: {name} has no bytes of text, so no bits per byte")
            scores[name] = score
        return score_metrics(scores)

    def _score(self, name: str, loader: ValidationLoader, parameters: Any) -> Score | None:
        place, rows = placer(self.mesh, self.batch_size), local_rows(self.mesh, self.batch_size)
        nats, tokens, text_bytes = 0.0, 0, 0
        waiting: jax.Array | float = 0.0
        for batch in loader:
            if self.stop_requested():
                return None
            check_ids(batch, len(self.byte_lengths), lambda row: f"validation set {name}")
            summed = self.step(parameters, place(rows_of(batch, rows)))
            tokens += int(batch.mask.sum())
            text_bytes += target_bytes(batch, self.byte_lengths)
            nats += float(waiting)  # of the batch before, so that the device always has one to work on
            waiting = summed
        return Score(nats + float(waiting), tokens, text_bytes)


def target_bytes(batch: Batch, byte_lengths: np.ndarray) -> int:
    """Bytes of text of the unmasked targets."""
    return int(byte_lengths[batch.tokens[:, 1:]][batch.mask].sum())


def score_metrics(scores: Mapping[str, Score]) -> dict[str, float]:
    """The metrics of some sets.

    `eval/loss` and `eval/bpb` are over all tokens and bytes, `eval/macro_…` plain means over the sets. Each set has
    `eval/<set>/loss` and `eval/<set>/bpb`, and each folder of names its own `micro_loss`, `bpb` and macro means.
    """
    if not scores:
        return {}
    metrics = {"eval/loss": _sum(scores).loss, "eval/bpb": _sum(scores).bits_per_byte, **_macro("eval", scores)}
    for parent in parents(scores):
        inside = {name: score for name, score in scores.items() if name.startswith(f"{parent}/")}
        metrics[f"eval/{parent}/micro_loss"] = _sum(inside).loss
        metrics[f"eval/{parent}/bpb"] = _sum(inside).bits_per_byte
        metrics |= _macro(f"eval/{parent}", inside)
    for name, score in scores.items():
        metrics |= {f"eval/{name}/loss": score.loss, f"eval/{name}/bpb": score.bits_per_byte}
    return metrics


def parents(names: Mapping[str, Any]) -> list[str]:
    """All folders of names such as `paloma/c4_en`.

    Raises:
        RequestError: a set has the name of a folder of sets, so that their metrics would have one name.
    """
    found = sorted({name.rsplit("/", depth)[0] for name in names for depth in range(1, name.count("/") + 1)})
    for parent in found:
        if parent in names:
            raise RequestError(f"measure.validation.sets: {parent!r} is a set and also the folder of others; rename it")
    return found


def _sum(scores: Mapping[str, Score]) -> Score:
    return reduce(Score.__add__, scores.values())


def _macro(front: str, scores: Mapping[str, Score]) -> dict[str, float]:
    losses = [score.loss for score in scores.values()]
    bits = [score.bits_per_byte for score in scores.values()]
    return {f"{front}/macro_loss": sum(losses) / len(losses), f"{front}/macro_bpb": sum(bits) / len(bits)}
