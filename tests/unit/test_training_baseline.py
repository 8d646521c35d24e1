"""The byte-bigram model, against a count by hand and against plain Python."""

import itertools
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from marin_build.training.baseline import ByteTable, byte_bigram_bits_per_byte, count_pairs

TOKENS = [b"", b"a", b"b", b"ab", b"\xff\x00\xff"]


def token_set(*shards):
    return SimpleNamespace(shards=[SimpleNamespace(ids=np.array(ids, np.uint16)) for ids in shards])


def text(*shards):
    return b"".join(TOKENS[i] for ids in shards for i in ids)


def plain_bits_per_byte(fitted: bytes, before: bytes, scored: bytes) -> float:
    """The same model, slowly."""
    fitted = b"\n" + fitted
    pairs, singles = Counter(itertools.pairwise(fitted)), Counter(fitted[:-1])
    stream = (b"\n" + before)[-1:] + scored
    return sum(-math.log2((pairs[a, b] + 1) / (singles[a] + 256)) for a, b in itertools.pairwise(stream)) / len(scored)


def test_ids_turn_into_the_bytes_of_their_tokens():
    ids = np.array([3, 0, 4, 1, 0, 0, 2])
    assert ByteTable(TOKENS).text(ids).tobytes() == b"ab\xff\x00\xffab"
    assert ByteTable(TOKENS).text(np.array([], int)).tobytes() == b""


def test_pairs_cross_the_pieces_of_a_stream():
    pieces = [np.frombuffer(piece, np.uint8) for piece in (b"ab", b"", b"ba")]
    counts = count_pairs(pieces)
    assert counts.sum() == 4
    assert [counts[a, b] for a, b in (b"\na", b"ab", b"bb", b"ba")] == [1, 1, 1, 1]


def test_the_model_equals_the_one_counted_slowly():
    random = np.random.default_rng(0)
    train, valid = random.integers(0, 5, 300), random.integers(0, 5, 100)
    measured = byte_bigram_bits_per_byte({"t": token_set(train)}, {"t": 2.0}, {"v": token_set(valid)}, TOKENS)
    assert measured == pytest.approx(plain_bits_per_byte(text(train), text(valid[:1]), text(valid[1:])), rel=1e-12)


def test_shards_are_one_stream_and_the_first_token_of_a_set_is_not_scored():
    measured = byte_bigram_bits_per_byte(
        {"t": token_set([1, 2], [], [3])}, {"t": 1.0}, {"v": token_set([], [4, 1], [2])}, TOKENS
    )
    assert measured == pytest.approx(plain_bits_per_byte(b"abab", TOKENS[4], b"ab"), rel=1e-12)


def test_each_training_set_gives_its_share_of_the_bytes_that_are_counted():
    measured = byte_bigram_bits_per_byte(
        {"one": token_set([1] * 100), "two": token_set([2] * 100), "none": token_set([4] * 100)},
        {"one": 3.0, "two": 1.0, "none": 0.0},
        {"v": token_set([0, 1, 1])},
        TOKENS,
        fit_bytes=40,
    )
    # Of 30 bytes `a`, 29 pairs aa and one after the line feed; the last of them is followed by nothing.
    expected = (-math.log2((1 + 1) / (2 + 256)) - math.log2((29 + 1) / (29 + 256))) / 2
    assert measured == pytest.approx(expected, rel=1e-12)
