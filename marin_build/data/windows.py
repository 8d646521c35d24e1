"""Rows of T + 1 tokens cut from token sets: window w of a set is its tokens [w·T, w·T + T + 1).

A set is the concatenation of its shards, and a window may cross their edges, so small shards lose nothing.
Neighbouring windows share one token: the last target of one is the first input of the next. Tokens stay where they are
(memory-mapped shards) until a row is copied; the work per row is one slice copy.

Shapes: N rows, W = T + 1 tokens a row, M documents that begin inside rows.
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

SET, WINDOW, SHARD, START, FIRST, END = range(6)
"""Lines of `Places.table`."""


class Shard(Protocol):
    """Whole documents: flat `ids` [tokens], and `offsets` [documents + 1] where each begins and the last ends.

    `loss_mask` [tokens] is 0 where a token is not trained on; None: all are.
    """

    @property
    def ids(self) -> npt.NDArray[np.integer]: ...
    @property
    def offsets(self) -> npt.NDArray[np.integer]: ...
    @property
    def loss_mask(self) -> npt.NDArray[np.uint8] | None: ...


class TokenSet(Protocol):
    """What is needed of a `shards.TokenizedSet`."""

    @property
    def shards(self) -> Sequence[Shard]: ...


def token_count(token_set: TokenSet) -> int:
    return sum(len(shard.ids) for shard in token_set.shards)


@dataclass(frozen=True)
class Places:
    """Where N rows come from."""

    table: Integers
    """[6, N]: set, window, shard (numbered over all sets), first token in the shard, and the range in `documents`."""
    documents: Tokens
    """[M]: positions in their rows at which documents begin; the start of a row is not one. Empty without segments."""

    def take(self, rows: Integers) -> Places:
        return Places(self.table[:, rows], self.documents)


NO_PLACES = Places(np.empty((6, 0), np.int64), np.empty(0, np.int32))


@dataclass(frozen=True)
class Piece:
    """A part of a row: `length` tokens from `start` on of one shard, at `position` in the row."""

    position: int
    shard: int
    start: int
    length: int


class WindowReader:
    """Finds and reads windows of several sets."""

    def __init__(self, sets: Sequence[TokenSet], sequence_length: int, *, segments: bool) -> None:
        self._sequence_length, self._width, self._with_segments = sequence_length, sequence_length + 1, segments
        shards = [shard for token_set in sets for shard in token_set.shards]
        self._ids = [np.asarray(shard.ids) for shard in shards]
        self._offsets = [np.asarray(shard.offsets) for shard in shards]
        self._masks = [shard.loss_mask for shard in shards]
        self._has_mask = np.array([mask is not None for mask in self._masks], bool)
        self.is_masked = bool(self._has_mask.any())
        """Whether a set has a loss mask."""
        self._lengths = np.array([len(ids) for ids in self._ids], dtype=np.int64)
        self._tokens_before = np.cumsum(self._lengths) - self._lengths
        edges = np.cumsum([0, *(len(token_set.shards) for token_set in sets)]).tolist()
        self._shards_of_set = [range(first, end) for first, end in pairwise(edges)]

    def places(self, set_numbers: Integers, windows: Integers) -> Places:
        """Places of windows [N] of sets [N]."""
        table = np.zeros((6, len(windows)), dtype=np.int64)
        table[SET], table[WINDOW] = set_numbers, windows
        for number, shards in enumerate(self._shards_of_set):
            rows = np.flatnonzero(set_numbers == number)
            first_tokens = self._tokens_before[shards.start : shards.stop] - self._tokens_before[shards.start]
            tokens = windows[rows] * self._sequence_length
            shard = np.searchsorted(first_tokens, tokens, side="right") - 1
            table[SHARD, rows] = shards.start + shard
            table[START, rows] = tokens - first_tokens[shard]
        return Places(table, self._find_documents(table) if self._with_segments else np.empty(0, np.int32))

    def read(self, places: Places) -> tuple[Tokens, Tokens | None]:
        """Tokens [N, W] and, with `segments`, segment ids [N, W]. Beyond the end of a set tokens are 0.

        Segment ids number the documents of a row from 0 in the order of their tokens; padding counts as one more.
        """
        ids, width = self._ids, self._width
        rows = [ids[shard][start : start + width] for shard, start in places.table[SHARD : START + 1].T.tolist()]
        for row in np.flatnonzero(~self._is_whole(places.table)).tolist():
            rows[row] = self._joined(self._pieces(places.table[:, row]))
        tokens = np.concatenate([np.empty(0, np.int32), *rows], dtype=np.int32).reshape(-1, width)
        return tokens, self._segment_ids(places) if self._with_segments else None

    def read_mask(self, places: Places) -> Booleans | None:
        """Which targets [N, T], the tokens of a row after its first, are trained on; None: no set has a loss mask."""
        if not self.is_masked:
            return None
        mask = np.ones((places.table.shape[1], self._width), bool)
        for row in np.flatnonzero(self._has_mask[places.table[SHARD]]).tolist():
            for piece in self._pieces(places.table[:, row]):
                column = slice(piece.position, piece.position + piece.length)
                if (masked := self._masks[piece.shard]) is not None:
                    mask[row, column] = masked[piece.start : piece.start + piece.length]
        return mask[:, 1:]

    def _is_whole(self, table: Integers) -> Booleans:
        """Whether each row [N] lies in one shard."""
        whole: Booleans = table[START] + self._width <= self._lengths[table[SHARD]]
        return whole

    def _pieces(self, place: Integers) -> list[Piece]:
        """The parts of a row that crosses shard edges; a last window may end before the row does."""
        number, _, shard, start, *_ = place.tolist()
        pieces, position = [], 0
        while position < self._width and shard < self._shards_of_set[number].stop:
            length = min(self._width - position, int(self._lengths[shard]) - start)
            if length > 0:
                pieces.append(Piece(position, shard, start, length))
            position, shard, start = position + length, shard + 1, 0
        return pieces

    def _joined(self, pieces: Sequence[Piece]) -> Tokens:
        """One row [W] of its pieces, then zeros."""
        row = np.zeros(self._width, dtype=np.int32)
        for piece in pieces:
            ids = self._ids[piece.shard][piece.start : piece.start + piece.length]
            row[piece.position : piece.position + piece.length] = ids
        return row

    def _find_documents(self, table: Integers) -> Tokens:
        """Documents [M] of all rows, shard by shard; fills in the ranges of the table."""
        whole = self._is_whole(table)
        rows = np.flatnonzero(whole)
        rows = rows[np.argsort(self._tokens_before[table[SHARD, rows]] + table[START, rows])]
        shards, first = np.unique(table[SHARD, rows], return_index=True)
        found = [
            (rows_of, *self._inside(shard, table[START, rows_of]))
            for shard, rows_of in zip(shards.tolist(), np.split(rows, first[1:]), strict=False)
        ]
        for row in np.flatnonzero(~whole).tolist():
            positions = self._inside_pieces(self._pieces(table[:, row]))
            found.append((np.array([row]), np.array([len(positions)]), positions))
        if not found:
            return np.empty(0, np.int32)
        rows, counts, documents = (np.concatenate(parts) for parts in zip(*found, strict=True))
        table[END, rows] = np.cumsum(counts)
        table[FIRST, rows] = table[END, rows] - counts
        return documents

    def _inside(self, shard: int, starts: Integers) -> tuple[Integers, Tokens]:
        """How many documents begin inside each row [N] of one shard, and their positions [M] in (0, T]."""
        offsets = self._offsets[shard]
        first = offsets.searchsorted(starts.astype(offsets.dtype), side="right")  # else all offsets are copied
        end = offsets.searchsorted((starts + self._sequence_length).astype(offsets.dtype), side="right")
        counts = end - first
        return counts, (offsets[spread(first, counts)] - np.repeat(starts, counts)).astype(np.int32)

    def _inside_pieces(self, pieces: Sequence[Piece]) -> Tokens:
        """Positions [M] in (0, T] of a row where a document begins; a shard begins one, and so does padding."""
        positions = [np.array([piece.position]) for piece in pieces]
        positions.append(np.array([pieces[-1].position + pieces[-1].length]))
        for piece in pieces:
            offsets = self._offsets[piece.shard]
            inside = offsets[(offsets > piece.start) & (offsets < piece.start + piece.length)]
            positions.append(inside.astype(np.int64) - piece.start + piece.position)
        together = np.concatenate(positions).astype(np.int32)
        return together[(together > 0) & (together < self._width)]

    def _segment_ids(self, places: Places) -> Tokens:
        """Segment ids [N, W]: runs that begin with each row and with each document."""
        rows, width = places.table.shape[1], self._width
        row_starts = np.arange(rows) * width
        counts = places.table[END] - places.table[FIRST]
        documents = places.documents[spread(places.table[FIRST], counts)] + np.repeat(row_starts, counts)
        starts = np.sort(np.concatenate([row_starts, documents]))
        starts = starts[np.diff(starts, prepend=-1) > 0]  # an empty document begins where the next one does
        numbers = np.arange(len(starts)) - np.searchsorted(starts, row_starts)[starts // width]
        return np.repeat(numbers.astype(np.int32), np.diff(starts, append=rows * width)).reshape(rows, width)


def spread(first: Integers, counts: Integers) -> Integers:
    """The numbers first, first + 1, … of each range, one range after the other: [counts.sum()]."""
    return np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
