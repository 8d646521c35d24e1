"""A tokenizer as its folder holds it: what its ids mean, and the checks that make those ids trustworthy.

Ids are dense: 0 to size - 1, each used once. Libraries disagree about files with holes (one hands an added token the
next free id, another the id written), so such a file is refused and never guessed about.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from pydantic import TypeAdapter
from typing_extensions import NotRequired, TypedDict  # noqa: UP035 (pydantic needs this one before Python 3.12)

from marin_build.artifact.bodies import Count, check
from marin_build.artifact.digest import hash_bytes
from marin_build.artifact.strict_json import parse_object
from marin_build.data.encoder import (
    Encoded,
    Encoder,
    FastEncoder,
    byte_characters,
    encoder_kind,
    encoder_maker,
    read_library,
)
from marin_build.errors import DamageError, RequestError
from marin_build.recipe.schema import SpecialTokens

TOKENIZER, CONFIG, CHAT_TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
ROLES = ("bos", "eos", "pad")
MAX_CONFIG_BYTES = 16 << 20
MAX_BYTES = {TOKENIZER: 256 << 20}
"""Several times the largest that are published: 33 MB, and 2 MB for the configuration."""
SPACE_MARK = "▁"
"""What SentencePiece writes for a space."""


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer, ready to use; ids run from 0 to vocab_size - 1."""

    folder: Path
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    digest: str
    """xxh3_128 of its tokenizer.json."""
    encoder_kind: type[Encoder]
    make_encoder: Callable[[], Encoder]

    def __getstate__(self) -> dict[str, Any]:
        """For another process, which makes an encoder of its own."""
        return {name: value for name, value in vars(self).items() if name not in ("encoder", "_library")}

    @cached_property
    def encoder(self) -> Encoder:
        """Made when the first text comes: who only needs the ids of special tokens does not wait for it."""
        return self.make_encoder()

    def encode(self, texts: Sequence[str]) -> Encoded:
        """ids [T] uint32 and offsets [N + 1] int64 of N documents; no special tokens are added or recognised."""
        return self.encoder.encode(texts)

    def facts(self, target: str) -> dict[str, Any]:
        """What a ledger says of the tokenizer of this target."""
        return {
            "target": target,
            "xxh3_128": self.digest,
            "vocabulary_size": self.vocab_size,
            "bos_id": self.bos_id,
            "eos_id": self.eos_id,
            "pad_id": self.pad_id,
        }

    def token_bytes(self) -> list[bytes]:
        """The bytes of text that each id stands for; b"" for special tokens."""
        return token_bytes(_specification(read_small(self.folder / TOKENIZER)))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids, special tokens spelled out; bytes that are no text become U+FFFD."""
        return self._library.decode([int(i) for i in ids], skip_special_tokens=False)

    @cached_property
    def _library(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_file(str(self.folder / TOKENIZER))


@dataclass(frozen=True)
class Tokens:
    """What the ids of a tokenizer stand for, without what it takes to encode."""

    texts: Mapping[int, bytes]
    """The bytes of text of each ordinary id."""
    specials: Mapping[int, str]
    """The names of the special ids."""
    digest: str
    """xxh3_128 of the tokenizer.json."""


def read_tokens(path: Path) -> Tokens:
    """The tokens of a tokenizer.json.

    Raises:
        OSError: it cannot be read.
        ValueError: it is none.
        RequestError: the bytes of its tokens cannot be told.
    """
    data = read_small(path)
    specification = _specification(data)
    specials = {added["id"]: added["content"] for added in specification["added_tokens"] if added["special"]}
    texts = {number: text for number, text in enumerate(token_bytes(specification)) if number not in specials}
    return Tokens(texts, specials, hash_bytes(data))


def load_tokenizer(folder: str | Path, fast: bool = False) -> LoadedTokenizer:
    """Load the tokenizer of an artifact's folder; `fast` where its parity with fastokens has been shown.

    Raises:
        DamageError: the folder does not hold what the builder of tokenizers leaves there.
    """
    folder = Path(folder)
    try:
        data = read_small(folder / TOKENIZER)
        specification, config = _specification(data), parse_object(read_small(folder / CONFIG))
        kind = encoder_kind(specification, fast)
        make_encoder = encoder_maker(data, specification, fast)
        encoder = None if kind is FastEncoder else make_encoder()  # proves that the reference reads it
    except OSError as error:
        place = error.filename or folder
        raise DamageError(f"{place} cannot be read: {error.strerror}; build the tokenizer again") from None
    except ValueError as error:
        raise DamageError(f"the tokenizer in {folder} cannot be loaded: {error}; build it again") from None
    ids = special_ids(specification)
    named = {role: ids.get(spelling(config.get(f"{role}_token"))) for role in ROLES}
    loaded = LoadedTokenizer(
        folder=folder,
        vocab_size=len(all_tokens(specification)),
        **{f"{role}_id": named[role] for role in ROLES},
        digest=hash_bytes(data),
        encoder_kind=kind,
        make_encoder=make_encoder,
    )
    if encoder:
        vars(loaded)["encoder"] = encoder
    return loaded


def read_small(path: Path) -> bytes:
    """The bytes of a file of a tokenizer, which is small.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger than any of its kind.
    """
    limit = MAX_BYTES.get(path.name, MAX_CONFIG_BYTES)
    with path.open("rb") as file:
        data = file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)  # asked for more, Python allocates it
    if len(data) > limit:
        raise ValueError(f"{path.name} is larger than {limit:,} bytes")
    return data


# ---- what a tokenizer.json says --------------------------------------------------------------------------------------


def model_tokens(specification: dict[str, Any]) -> list[tuple[str, int]]:
    """(token, id) of the model, without the added tokens."""
    vocabulary = specification["model"]["vocab"]
    if isinstance(vocabulary, dict):
        return list(vocabulary.items())
    return [(token, number) for number, (token, _) in enumerate(vocabulary)]  # Unigram: tokens with their scores


def all_tokens(specification: dict[str, Any]) -> dict[int, str]:
    """Every id with its token; an added token has the last word about its id."""
    tokens = {number: token for token, number in model_tokens(specification)}
    return tokens | {added["id"]: added["content"] for added in specification["added_tokens"]}


def special_ids(specification: dict[str, Any]) -> dict[str | None, int]:
    return {added["content"]: added["id"] for added in specification["added_tokens"] if added["special"]}


def spelling(token: Any) -> str | None:
    """A token as tokenizer_config.json writes it: text, or an object with its `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


class _Added(TypedDict):
    id: Count
    content: str
    special: bool


class _Model(TypedDict):
    vocab: dict[str, Count] | list[tuple[str, float]]
    type: NotRequired[str | None]
    merges: NotRequired[list[Any]]
    dropout: NotRequired[float | None]


class _Specification(TypedDict):
    model: _Model
    added_tokens: list[_Added]
    normalizer: dict[str, Any] | None
    pre_tokenizer: dict[str, Any] | None
    decoder: dict[str, Any] | None


_specification_form = TypeAdapter(_Specification)


def read_specification(folder: Path) -> dict[str, Any]:
    """What the tokenizer.json of a folder says.

    Raises:
        OSError: it cannot be read.
        ValueError: it has another form.
    """
    return _specification(read_small(folder / TOKENIZER))


def _specification(data: bytes) -> dict[str, Any]:
    """What a tokenizer.json says, in the form that the library writes.

    Raises:
        ValueError: it has another form.
    """
    specification = parse_object(data)
    for part in ("added_tokens", "normalizer", "pre_tokenizer", "decoder"):
        specification.setdefault(part, [] if part == "added_tokens" else None)
    check(_specification_form, specification)
    return specification


def token_bytes(specification: dict[str, Any]) -> list[bytes]:
    """The bytes of text of each id, b"" for special tokens.

    Raises:
        RequestError: neither a byte-level tokenizer nor one that writes spaces as ▁.
    """
    parts = part_types(specification)
    if "ByteLevel" in parts:
        byte_of = {character: byte for byte, character in enumerate(byte_characters())}

        def text_of(token: str) -> bytes:
            return b"".join(bytes([byte_of[c]]) if c in byte_of else c.encode() for c in token)

    elif {"Metaspace", "ByteFallback"} & parts:

        def text_of(token: str) -> bytes:
            byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
            return bytes.fromhex(byte[1]) if byte else token.replace(SPACE_MARK, " ").encode()

    else:
        raise RequestError(
            f"cannot tell the bytes of this tokenizer's tokens: its parts are {', '.join(sorted(parts))}; "
            "needs ByteLevel, Metaspace or ByteFallback"
        )
    of_id = {number: text_of(token) for token, number in model_tokens(specification)}
    for added in specification["added_tokens"]:
        of_id[added["id"]] = b"" if added["special"] else added["content"].encode()
    return [of_id[number] for number in range(len(of_id))]


def part_types(specification: dict[str, Any]) -> set[str]:
    """Types of the normalizers, pre-tokenizers and decoders."""
    waiting = [specification.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
    types = set()
    while waiting:
        part = waiting.pop() or {}
        types |= {str(part["type"])} if "type" in part else set()
        waiting += [inner for key in ("normalizers", "pretokenizers", "decoders") for inner in part.get(key, ())]
    return types - {"Sequence"}


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_vocabulary(data: bytes, size: int, roles: SpecialTokens, where: str) -> dict[str, Any]:
    """Refuse a tokenizer.json whose ids cannot be trusted; returns it read.

    Raises:
        RequestError: what is wrong, with the value seen and the value needed.
    """
    try:
        specification = _specification(data)
        library = read_library(data)
    except ValueError as error:
        raise RequestError(
            f"{where} is not a tokenizer.json that tokenizers {tokenizers.__version__} reads: {error}"
        ) from None
    _check_dense(specification, where)
    _check_library(specification, library, where)
    _check_size(specification, size, where)
    _check_roles(specification, roles, where)
    if specification["model"].get("dropout"):
        raise RequestError(
            f"{where} has model.dropout {specification['model']['dropout']}: it encodes at random; needs null"
        )
    token_bytes(specification)
    return specification


def _check_dense(specification: dict[str, Any], where: str) -> None:
    pairs = {*model_tokens(specification), *((a["content"], a["id"]) for a in specification["added_tokens"])}
    ids = sorted(number for _, number in pairs)
    used = {*ids}
    holes = ids[-1] + 1 - len(used) if ids else 0
    if not ids or holes:
        first = islice((number for number in count() if number not in used), min(holes, 5))  # never lists all of them
        some = ", ".join(map(str, first)) + (", …" if holes > 5 else "")
        raise RequestError(
            f"{where} has holes in its ids: {holes:,} of 0 to {ids[-1] if ids else 0:,} are unused: {some}\n"
            "  libraries disagree about the ids after a hole; fill each with an added token, for example <|unused_0|>"
        )
    if len(ids) != len(used):
        twice = next(number for number, after in pairwise(ids) if number == after)
        tokens = sorted(token for token, number in pairs if number == twice)
        raise RequestError(f"{where} gives id {twice} to several tokens: {', '.join(map(repr, tokens))}")


def _check_library(specification: dict[str, Any], library: tokenizers.Tokenizer, where: str) -> None:
    """The library hands out ids of its own in some files; every id has to be the one written."""
    for added in specification["added_tokens"]:
        given = library.token_to_id(added["content"])
        if given != added["id"]:
            raise RequestError(f"{where}: {added['content']!r} has id {added['id']}, but the library gives it {given}")


def _check_size(specification: dict[str, Any], size: int, where: str) -> None:
    seen = len(all_tokens(specification))
    if seen != size:
        raise RequestError(
            f"{where} has {seen:,} ids, 0 to {seen - 1:,}, and the recipe says tokenizer.vocabulary_size {size:,}\n"
            f"  write vocabulary_size: {seen}, or take another file"
        )


def _check_roles(specification: dict[str, Any], roles: SpecialTokens, where: str) -> None:
    special = special_ids(specification)
    for role in ROLES:
        token = getattr(roles, role)
        if token is None or token in special:
            continue
        present = token in all_tokens(specification).values()
        problem = "is an ordinary token, so a document could spell it" if present else "is not in the vocabulary"
        some = ", ".join(repr(t) for t in list(special)[:8]) + (", …" if len(special) > 8 else "")
        raise RequestError(
            f"{where}: tokenizer.special_tokens.{role} {token!r} {problem}\n  its special tokens are: {some or 'none'}"
        )
