"""The byte-bigram model: what a model must beat to have learned more than which byte follows which.

It counts pairs of neighbouring bytes in the training text and adds one to each: P(b | a) = (pairs ab + 1) / (pairs a· +
256). It is scored on the bytes that the language model is scored on. Texts are read as one stream, so the first byte of
a document follows the last of the one before; a stream begins after a line feed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from marin_build.data.shards import TokenizedSet

FIT_BYTES = 64 << 20
"""Training text that is counted: 256 × 256 pairs are known well by then, and it takes a second."""
CHUNK_TOKENS = 1 << 20
LINE_FEED = 10


class ByteTable:
    """The bytes of each id of a tokenizer, to turn ids into text at numpy's speed."""

    def __init__(self, token_bytes: Sequence[bytes]):
        self.lengths = np.array([len(text) for text in token_bytes], np.int64)
        self._starts = np.cumsum(self.lengths) - self.lengths
        self._text = np.frombuffer(b"".join(token_bytes), np.uint8)

    def text(self, ids: np.ndarray) -> np.ndarray:
        """uint8 bytes of these ids, one after the other."""
        lengths = self.lengths[ids]
        before = np.cumsum(lengths) - lengths
        return self._text[np.arange(int(lengths.sum())) + np.repeat(self._starts[ids] - before, lengths)]


def byte_bigram_bits_per_byte(
    training: Mapping[str, TokenizedSet],
    weights: Mapping[str, float],
    validation: Mapping[str, TokenizedSet],
    token_bytes: Sequence[bytes],
    fit_bytes: int = FIT_BYTES,
) -> float:
    """Bits per byte on all validation sets of the model fitted on the beginnings of the training sets.

    Each training set gives its share by weight of `fit_bytes`, or all it has.
    """
    table, total = ByteTable(token_bytes), sum(weights.values())
    fitted = np.zeros((256, 256), np.int64)
    for name, token_set in training.items():
        fitted += count_pairs(_first(_texts(token_set, table), int(fit_bytes * weights[name] / total)))
    scored = sum(count_pairs(_texts(token_set, table), targets_only=True) for token_set in validation.values())
    bits = np.log2(fitted.sum(axis=1, keepdims=True) + 256) - np.log2(fitted + 1)
    return float((scored * bits).sum() / scored.sum())


def count_pairs(texts: Iterable[np.ndarray], targets_only: bool = False) -> np.ndarray:
    """[256, 256] how often byte b (column) follows byte a (row) in the stream of texts.

    Args:
        targets_only: the first text is only what comes before.
    """
    counts, before = np.zeros(256 * 256, np.int64), np.uint8(LINE_FEED)
    for number, text in enumerate(texts):
        stream = np.concatenate(([before], text))
        before = stream[-1]
        if number or not targets_only:
            counts += np.bincount(stream[:-1].astype(np.int64) * 256 + stream[1:], minlength=256 * 256)
    return counts.reshape(256, 256)


def _texts(token_set: TokenizedSet, table: ByteTable) -> Iterator[np.ndarray]:
    """The bytes of a set in pieces; the first piece is the text of its first token, which is no target."""
    first = True
    for shard in token_set.shards:
        ids = shard.ids
        if first and len(ids):
            yield table.text(ids[:1])
            ids, first = ids[1:], False
        for start in range(0, len(ids), CHUNK_TOKENS):
            yield table.text(ids[start : start + CHUNK_TOKENS])


def _first(texts: Iterable[np.ndarray], limit: int) -> Iterator[np.ndarray]:
    """The texts up to `limit` bytes in all."""
    for text in texts:
        yield text[:limit]
        limit -= len(text)
        if limit <= 0:
            return
