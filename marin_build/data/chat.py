"""Conversations as ids, with a mask of those that are trained on: what a tokenizer and its chat template make of them.

The text between two special tokens of the template is encoded alone, as every library does. A token is trained on if a
byte of it is in a generation block, as in `transformers`.

Shapes: N conversations, T ids of all of them, P texts between special tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from marin_build.data.chat_template import ChatTemplate, Rendered
from marin_build.data.vocabulary import LoadedTokenizer, read_specification, special_ids
from marin_build.errors import RequestError

Masked = tuple[np.ndarray, np.ndarray, np.ndarray]
"""ids [T] uint32, lengths [N] int64, and the loss mask [T] uint8: 1 where a token is trained on."""


@dataclass(frozen=True)
class ChatEncoder:
    """Encodes rendered conversations."""

    tokenizer: LoadedTokenizer
    template: ChatTemplate

    def encode(self, conversations: Sequence[Rendered]) -> Masked:
        """The ids of conversations, one after the other, with the special tokens that the template wrote and no others.

        Raises:
            RequestError: the tokenizer leaves out or changes some of a text.
        """
        pieces = [list(_pieces(rendered)) for rendered in conversations]
        flat, offsets = self.tokenizer.encode([text for part in pieces for text, is_special in part if not is_special])
        texts = iter(np.split(flat, offsets[1:-1]))
        made = [self._one(r, part, texts) for r, part in zip(conversations, pieces, strict=True)]
        lengths = np.array([len(ids) for ids, _ in made], np.int64)
        ids = np.concatenate([np.empty(0, np.uint32), *(ids for ids, _ in made)], dtype=np.uint32)
        return ids, lengths, np.concatenate([np.empty(0, np.uint8), *(mask for _, mask in made)])

    def _one(
        self, rendered: Rendered, pieces: list[tuple[str, bool]], texts: Iterator[np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """ids and mask of a conversation; takes its texts' ids from `texts`."""
        ids, sizes = [], []
        for text, is_special in pieces:
            made = np.array([self._special_ids[text]], np.uint32) if is_special else next(texts)
            size = np.array([len(text.encode())]) if is_special else self._byte_counts[made]
            if size.sum() != len(text.encode()):
                raise RequestError(f"the tokenizer changes the text {text[:40]!a}: chat data cannot be made with it")
            ids.append(made)
            sizes.append(size)
        ends = np.cumsum(np.concatenate(sizes))
        starts = ends - np.concatenate(sizes)
        mask = np.zeros(len(ends), np.uint8)
        for start, end in _byte_spans(rendered):
            mask[np.searchsorted(ends, start, side="right") : np.searchsorted(starts, end, side="left")] = 1
        return np.concatenate(ids), mask

    @cached_property
    def _special_ids(self) -> dict[str | None, int]:
        return special_ids(read_specification(self.tokenizer.folder))

    @cached_property
    def _byte_counts(self) -> np.ndarray:
        """[V] bytes of text of each id."""
        return np.array([len(text) for text in self.tokenizer.token_bytes()], np.int64)


def _pieces(rendered: Rendered) -> Iterator[tuple[str, bool]]:
    """The text in order: (a special token, True), (what is between, False)."""
    at = 0
    for start, end in rendered.specials:
        if at < start:
            yield rendered.text[at:start], False
        yield rendered.text[start:end], True
        at = end
    if at < len(rendered.text):
        yield rendered.text[at:], False


def _byte_spans(rendered: Rendered) -> Iterator[tuple[int, int]]:
    """The spans that are trained on, in bytes, without the empty ones."""
    at = bytes_before = 0
    for start, end in rendered.trained:
        bytes_before += len(rendered.text[at:start].encode())
        inside = len(rendered.text[start:end].encode())
        if inside:
            yield bytes_before, bytes_before + inside
        at, bytes_before = end, bytes_before + inside
