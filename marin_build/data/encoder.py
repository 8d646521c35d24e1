"""Encoders: text in, flat ids and offsets out.

The reference is Hugging Face `tokenizers`. Another encoder has to give the same ids for the same tokenizer.json, so
it never enters an artifact's identity; which one was used is kept in the provenance. `fastokens` needs a fortieth of
the time, and is used for a tokenizer once `parity` has shown that it gives the ids of the reference.

Shapes: N documents, P pieces of documents, T ids of all documents.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import tokenizers

from marin_build.data.pieces import cut, groups, may_be_cut
from marin_build.errors import RequestError
from marin_build.foreign import shortened
from marin_build.recipe.derived import FAST_LIBRARY as FAST
from marin_build.recipe.derived import REFERENCE_LIBRARY as REFERENCE
from marin_build.recipe.derived import installed

Encoded = tuple[np.ndarray, np.ndarray]
"""ids [T] uint32, and offsets [N + 1] int64: document n is ids[offsets[n]:offsets[n + 1]]."""


class Encoder(Protocol):
    """Encodes documents without adding special tokens; text that spells one stays text."""

    name: str
    version: str

    def encode(self, texts: Sequence[str]) -> Encoded: ...


class _PieceEncoder:
    """Encodes about a million characters at a time, long documents in pieces where that keeps their ids."""

    def __init__(self, cuts: bool) -> None:
        self._cuts = cuts

    def encode(self, texts: Sequence[str]) -> Encoded:
        pieces = [list(cut(text)) if self._cuts else [text] for text in texts]
        encoded = [self._encode_group(group) for group in groups([piece for parts in pieces for piece in parts])]
        ids = np.concatenate([np.empty(0, np.uint32), *(ids for ids, _ in encoded)])
        ends = offsets_of(np.concatenate([np.empty(0, np.int64), *(np.diff(offsets) for _, offsets in encoded)]))
        return ids, ends[offsets_of([len(parts) for parts in pieces])]

    def _encode_group(self, pieces: list[str]) -> Encoded:
        raise NotImplementedError


class LibraryEncoder(_PieceEncoder):
    """Hugging Face `tokenizers`, whatever the tokenizer is made of."""

    name = REFERENCE
    version = tokenizers.__version__

    def __init__(self, tokenizer: tokenizers.Tokenizer, cuts: bool = False) -> None:
        super().__init__(cuts)
        tokenizer.encode_special_tokens = True  # the text of a special token is text
        tokenizer.no_truncation()  # some published files would cut documents off
        tokenizer.no_padding()
        self._tokenizer = tokenizer

    def _encode_group(self, pieces: list[str]) -> Encoded:
        with failures_as(RequestError, "the tokenizer cannot encode this text"):
            encodings = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        arrays = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        return np.concatenate(arrays), offsets_of([len(array) for array in arrays])


class FastEncoder(_PieceEncoder):
    """`fastokens`, for byte pair tokenizers that it reads.

    Its regular expressions have limits that a run of millions of spaces can meet. With `falls_back`, the reference
    encodes what it cannot.

    Raises:
        ValueError: it does not read this one.
    """

    name = FAST
    version = installed(FAST) or "not installed"

    def __init__(self, tokenizer_json: bytes, cuts: bool = False, falls_back: bool = False) -> None:
        super().__init__(cuts)
        self._tokenizer_json, self._falls_back = tokenizer_json, falls_back
        os.environ["FASTOKENS_BPE_THREADS"] = "1"  # one process is one thread; read when its first text comes
        import fastokens

        with failures_as(ValueError, f"{FAST} {self.version} says"):
            # from_file would add what tokenizer_config.json beside it says, as the reference does not
            self._tokenizer = fastokens.Tokenizer.from_json_str(tokenizer_json.decode())
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()

    def _encode_group(self, pieces: list[str]) -> Encoded:
        try:
            return self._encode_fast(pieces)
        except RequestError:
            if not self._falls_back:
                raise
        return self._reference._encode_group(pieces)

    @cached_property
    def _reference(self) -> LibraryEncoder:
        return LibraryEncoder(read_library(self._tokenizer_json))

    def _encode_fast(self, pieces: list[str]) -> Encoded:
        with failures_as(RequestError, "the tokenizer cannot encode this text"):
            ids, offsets = self._tokenizer.encode_batch_flat(pieces, False, split_special_tokens=True)
        return np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.uint64).astype(np.int64)


class ByteEncoder:
    """One id a byte, for tokenizers that say so: the same ids as the library at a thousandth of its time and memory."""

    name = "bytes"
    version = "1"

    def encode(self, texts: Sequence[str]) -> Encoded:
        documents = [text.encode() for text in texts]
        ids = np.frombuffer(b"".join(documents), np.uint8).astype(np.uint32)
        return ids, offsets_of([len(document) for document in documents])


def offsets_of(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """[N] lengths to [N + 1] int64 offsets that begin with 0."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def encoder_kind(specification: dict[str, Any], fast: bool = False) -> type[Encoder]:
    """What encodes for a tokenizer.json; `fast` where parity has been shown."""
    if gives_bytes(specification):
        return ByteEncoder
    return FastEncoder if fast else LibraryEncoder


def encoder_maker(tokenizer_json: bytes, specification: dict[str, Any], fast: bool = False) -> Callable[[], Encoder]:
    """What makes the encoder for a tokenizer.json, given as its bytes and as read; other processes can be sent it."""
    kind, cuts = encoder_kind(specification, fast), may_be_cut(specification)
    if kind is ByteEncoder:
        return ByteEncoder
    if kind is FastEncoder:
        return partial(FastEncoder, tokenizer_json, cuts, falls_back=True)
    return partial(_library_encoder, tokenizer_json, cuts)


def _library_encoder(tokenizer_json: bytes, cuts: bool) -> LibraryEncoder:
    return LibraryEncoder(read_library(tokenizer_json), cuts)


def read_library(tokenizer_json: bytes) -> tokenizers.Tokenizer:
    """The library's tokenizer.

    Raises:
        ValueError: it cannot read the file.
    """
    with failures_as(ValueError, "the library says"):
        return tokenizers.Tokenizer.from_buffer(tokenizer_json)


@contextlib.contextmanager
def failures_as(kind: type[Exception], what: str) -> Iterator[None]:
    """Turn what the library raises into one kind of error: any Exception, and a panic, which is none of them."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(f"{what}: {shortened(str(error), 300)}") from None


def gives_bytes(specification: dict[str, Any]) -> bool:
    """Whether this tokenizer gives one id a byte, equal to it: nothing before, no merges, bytes in their order."""
    model, splitter = specification["model"], specification["pre_tokenizer"] or {}
    plain = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return (
        model.get("type") == "BPE"
        and model["merges"] == []
        and model["vocab"] == {character: byte for byte, character in enumerate(byte_characters())}
        and specification["normalizer"] is None
        and all(splitter.get(key) == value for key, value in plain.items())
        and all(token["special"] for token in specification["added_tokens"])
    )


def byte_characters() -> list[str]:
    """The character that byte-level tokenizers write for each of the 256 bytes.

    Printable Latin-1 stands for itself; the others are numbered from U+0100 on.
    Source: GPT-2, `bytes_to_unicode` in encoder.py.
    """
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in itself else chr(next(others)) for byte in range(256)]
