"""A keyed shuffle without a list: use number n of a data set → the window that is read.

Epoch e of a set of `size` windows is a bijection of [0, size) keyed by (key, e), so each epoch reads every window once,
in a new order, and any use can be computed by itself. It is a Feistel network over a rectangle of `size` or more cells,
walked until the cell is one of the first `size`; nothing of the size of the data is allocated.

Any change of these functions changes the data order of every run: `tests/golden/data_order.txt` pins them.

Shapes: N uses, R rounds.
Source: SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", fig. 17); the network
over a rectangle and cycle walking (Black, Rogaway 2002, "Ciphers with arbitrary finite domains", §3 and §5).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

ROUNDS = 6
"""4 leave small sets visibly uneven; 6 look random over 200,000 keys (tests/unit/test_shuffle.py)."""
MINIMUM_CELLS = 64
"""Smaller rectangles have too few round functions and prefer some orders."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)

Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


def random_words(key: int, numbers: Integers) -> Words:
    """Entries `numbers` (any shape) of the SplitMix64 stream that starts at `key`; distinct numbers, distinct words."""
    return _mix((numbers.astype(np.uint64) + np.uint64(1)) * _GOLDEN + np.uint64(key))


def shuffled(uses: Integers, size: int, key: int) -> Integers:
    """Windows [N] in [0, size) that are read at use numbers [N]; use n is in epoch n // size."""
    epochs, index = np.divmod(uses, size)
    if size == 1:
        return index
    distinct, which = np.unique(epochs, return_inverse=True)
    numbers = distinct * ROUNDS + np.arange(ROUNDS)[:, None]
    return _permute(index.astype(np.uint64), size, random_words(key, numbers)[:, which]).astype(np.int64)


def _permute(cells: Words, size: int, round_keys: Words) -> Words:
    """Walk cells [N] through the network with round_keys [R, N] until all are below `size`."""
    rows, columns = _rectangle(size)
    cells = _feistel(cells, rows, columns, round_keys)
    outside = np.flatnonzero(cells >= size)
    while len(outside):
        cells[outside] = _feistel(cells[outside], rows, columns, round_keys[:, outside])
        outside = outside[cells[outside] >= size]
    return cells


def _rectangle(size: int) -> tuple[int, int]:
    """Rows and columns, nearly square, with as few cells beyond `size` as a short search finds: they cost walks."""
    cells = max(size, MINIMUM_CELLS)
    side = math.isqrt(cells - 1) + 1
    columns = min(range(side, side + min(side // 4 + 1, 32)), key=lambda columns: -cells % columns)
    return -(-cells // columns), columns


def _feistel(cells: Words, rows: int, columns: int, round_keys: Words) -> Words:
    """One pass [N]: by turns, move the row by a random function of the column and the column by one of the row."""
    row = cells // np.uint64(columns)
    column = cells - row * np.uint64(columns)
    for row_keys, column_keys in zip(round_keys[::2], round_keys[1::2], strict=True):
        row = _moved(row, rows, column ^ row_keys)
        column = _moved(column, columns, row ^ column_keys)
    return row * np.uint64(columns) + column


def _moved(place: Words, length: int, words: Words) -> Words:
    """Places in [0, length) moved around the ring by distances that are random in the words."""
    moved = place + ((_mix(words) >> np.uint64(32)) * np.uint64(length) >> np.uint64(32))
    return moved - np.uint64(length) * (moved >= length)


def _mix(words: Words) -> Words:
    """SplitMix64's output function, a bijection of 64-bit words."""
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))
