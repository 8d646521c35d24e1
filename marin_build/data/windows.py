"""Rows of T + 1 tokens cut from token sets: window w of a set is its tokens [w·T, w·T + T + 1).

A set is the concatenation of its shards, and a window may cross their edges, so small shards lose nothing.
Neighbouring windows share one token: the last target of one is the first input of the next. Tokens stay where they are
(memory-mapped shards) until a row is copied; the work per row is one slice copy.

Shapes: N rows, W = T + 1 tokens a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from marin_build.data.shuffle import Integers

Tokens = npt.NDArray[np.int32]
Booleans = npt.NDArray[np.bool_]


class Shard(Protocol):
    """Whole documents: flat `ids` [tokens], and `offsets` [documents + 1] where each begins and the last ends."""

    @property
    def ids(self) -> npt.NDArray[np.integer]: ...
    @property
    def offsets(self) -> npt.NDArray[np.integer]: ...


class TokenSet(Protocol):
    """What is needed of a `shards.TokenizedSet`."""

    @property
    def shards(self) -> Sequence[Shard]: ...


def token_count(token_set: TokenSet) -> int:
    return sum(len(shard.ids) for shard in token_set.shards)


class WindowReader:
    """Reads windows of several sets.

    A *place* is where a row comes from, a column of an integer array [6, N]: the set, the window, the shard (numbered
    over all sets), the first token in it, and the range of document starts inside the row (only with `segments`).
    """

    def __init__(self, sets: Sequence[TokenSet], sequence_length: int, *, segments: bool) -> None:
        self._sequence_length, self._width, self._with_segments = sequence_length, sequence_length + 1, segments
        shards = [shard for token_set in sets for shard in token_set.shards]
        self._ids = [np.asarray(shard.ids) for shard in shards]
        self._offsets = [np.asarray(shard.offsets) for shard in shards]
        self._lengths = np.array([len(ids) for ids in self._ids], dtype=np.int64)
        self._tokens_before = np.cumsum(self._lengths) - self._lengths
        edges = np.cumsum([0, *(len(token_set.shards) for token_set in sets)]).tolist()
        self._shards_of_set = [range(first, end) for first, end in pairwise(edges)]
        self._first_tokens = [np.cumsum([0, *self._lengths[first:end]]) for first, end in pairwise(edges)]

    def places(self, set_numbers: Integers, windows: Integers) -> Integers:
        """Places [6, N] of windows [N] of sets [N]."""
        places = np.zeros((6, len(windows)), dtype=np.int64)
        places[:2] = set_numbers, windows
        for number, first_tokens in enumerate(self._first_tokens):
            rows = np.flatnonzero(set_numbers == number)
            tokens = windows[rows] * self._sequence_length
            shard = np.searchsorted(first_tokens, tokens, side="right") - 1
            places[2, rows] = self._shards_of_set[number].start + shard
            places[3, rows] = tokens - first_tokens[shard]
        if self._with_segments:
            self._find_documents(places)
        return places

    def read(self, places: Integers) -> tuple[Tokens, Tokens | None]:
        """Tokens [N, W] and, with `segments`, segment ids [N, W]. Beyond the end of a set tokens are 0.

        Segment ids number the documents of a row from 0 in the order of their tokens; padding counts as one more.
        """
        ids, width = self._ids, self._width
        whole = self._is_whole(places)
        rows = [ids[shard][start : start + width] for shard, start in places[2:4].T.tolist()]
        for row in np.flatnonzero(~whole).tolist():
            rows[row] = self._joined(self._pieces(places[:, row]))
        tokens = np.concatenate([np.empty(0, np.int32), *rows], dtype=np.int32).reshape(-1, width)
        return tokens, self._segment_ids(places, whole) if self._with_segments else None

    def _is_whole(self, places: Integers) -> Booleans:
        """Whether each row [N] lies in one shard."""
        whole: Booleans = places[3] + self._width <= self._lengths[places[2]]
        return whole

    def _pieces(self, place: Integers) -> list[Piece]:
        """The parts of a row that crosses shard edges; a last window may end before the row does."""
        number, _, shard, start = place[:4].tolist()
        pieces, position = [], 0
        while position < self._width and shard < self._shards_of_set[number].stop:
            length = min(self._width - position, int(self._lengths[shard]) - start)
            if length > 0:
                pieces.append(Piece(position, shard, start, length))
            position, shard, start = position + length, shard + 1, 0
        return pieces

    def _joined(self, pieces: list[Piece]) -> Tokens:
        """One row [W] of its pieces, then zeros."""
        row = np.zeros(self._width, dtype=np.int32)
        for piece in pieces:
            ids = self._ids[piece.shard][piece.start : piece.start + piece.length]
            row[piece.position : piece.position + piece.length] = ids
        return row

    def _find_documents(self, places: Integers) -> None:
        """Fill in the ranges of document starts for rows that lie in one shard, searching each shard in its order."""
        rows = np.flatnonzero(self._is_whole(places))
        rows = rows[np.argsort(self._tokens_before[places[2, rows]] + places[3, rows])]
        shards, first = np.unique(places[2, rows], return_index=True)
        ends = np.stack([places[3, rows], places[3, rows] + self._sequence_length])
        for shard, ends_in in zip(shards.tolist(), np.split(ends, first[1:], axis=1), strict=False):
            ends_in[:] = _count_until(self._offsets[shard], ends_in)
        places[4:, rows] = ends

    def _segment_ids(self, places: Integers, whole: Booleans) -> Tokens:
        """Segment ids [N, W]: runs that begin with each row and with each document."""
        rows, width = places.shape[1], self._width
        row_starts = np.arange(rows) * width
        found = [self._offsets[shard][first:end] for shard, _, first, end in places[2:].T.tolist()]
        for row in np.flatnonzero(~whole).tolist():
            found[row] = self._document_positions(self._pieces(places[:, row]))
        shift = row_starts - np.where(whole, places[3], 0)
        documents = np.concatenate([row_starts[:0], *found]) + np.repeat(shift, [len(offsets) for offsets in found])
        starts = np.sort(np.concatenate([row_starts, documents]))
        starts = starts[np.diff(starts, prepend=-1) > 0]
        numbers = np.arange(len(starts)) - np.searchsorted(starts, row_starts)[starts // width]
        return np.repeat(numbers.astype(np.int32), np.diff(starts, append=rows * width)).reshape(rows, width)

    def _document_positions(self, pieces: list[Piece]) -> Integers:
        """Positions in [0, T] of a row where a document begins; a shard begins one, and so does padding."""
        positions = [np.array([pieces[-1].position + pieces[-1].length])]
        for piece in pieces:
            offsets = self._offsets[piece.shard]
            first, end = _count_until(offsets, np.array([piece.start, piece.start + piece.length - 1]))
            positions += [np.array([piece.position]), offsets[first:end] - piece.start + piece.position]
        together = np.concatenate(positions)
        return together[together < self._width]


@dataclass(frozen=True)
class Piece:
    """A part of a row: `length` tokens from `start` on of one shard, at `position` in the row."""

    position: int
    shard: int
    start: int
    length: int


def _count_until(offsets: npt.NDArray[np.integer], tokens: Integers) -> Integers:
    """How many offsets are at or before each token. Searching in another type would copy all offsets first."""
    return np.searchsorted(offsets, tokens.astype(offsets.dtype), side="right")
