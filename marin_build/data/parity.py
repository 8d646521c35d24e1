"""Parity: does `fastokens` give the ids of Hugging Face `tokenizers` for one tokenizer?

Both encode a fixed set of texts that tokenizers have disagreed about, and a sample of real text. The set is a function
of the tokenizer's added tokens alone; random texts come from a fixed seed. What other libraries were seen to get wrong
and why it is here: tables of Unicode of another version (every character up to U+1FFFF stands in it), case folding of
contractions, runs that lie across the blocks that a library works on (runs of random length in long texts), caches that
remember an earlier text (texts that begin like the one before), and the spelling of special tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from marin_build.artifact.strict_json import parse_object
from marin_build.data.encoder import Encoder, FastEncoder, LibraryEncoder, read_library
from marin_build.errors import RequestError
from marin_build.foreign import shortened

Texts = tuple[str, list[str]]
"""A name, and texts that are encoded one after the other."""

SHOWN_CHARACTERS = 200
MAX_SPELLED = 500
"""Added tokens that are spelled out; some tokenizers have thousands, all alike."""
RUN_CHARACTERS = 60_000
_RANGES = [
    *((0x01, 0x250), (0x300, 0x370), (0x590, 0x700), (0x900, 0x980), (0xE00, 0xE60), (0x2000, 0x2070)),
    *((0x3040, 0x3100), (0x4E00, 0x4F00), (0xAC00, 0xAC80), (0xFE00, 0xFE10), (0xFF00, 0xFF60)),
    *((0x1D400, 0x1D440), (0x1F300, 0x1F6A0), (0x200D, 0x200E), (0xE000, 0xE001), (0xFEFF, 0xFF00)),
]
SCRIPTS = [chr(code) for first, end in _RANGES for code in range(first, end)] + ["\ufffd", "\U0010ffff"]
"""Latin, combining marks, Hebrew, Arabic, Devanagari, Thai, spaces, kana, CJK, Hangul, selectors, emoji, …"""
ASCII = " \t\r\n'\"sdtmlrve0123456789aAzZ_-/\\.,:;!?()[]{}<>|@#$%^&*+=~`"
BY_HAND = [
    *("", " ", "  ", "\n", "\r\n", "\r\n\r\n  x", "\t\t  a", " \u00a0 b", "I'LL we'Ve DON'T 'S '\u017f '\u212a"),
    *("e\u0301 \u0065\u0301", "\u212b \ufb01", "\u0130stanbul \u017f", "1234567 1,234.5 ٣٤٥ ½²", "a\x00b", "\x00"),
    *(
        "\ufeffbom",
        "\ufeff",
        "👩‍👩‍👧‍👦🏳️‍🌈",
        "नमस्ते ก็ได้",
        "한국어 테스트",
        "a\u2028b\u2029c\x85d\x0bd\x0c",
        "क्षि 中文 עברית",
    ),
    *("a" * 5000, " " * 5000, "\n" * 3000, "ab " * 3000, "=-" * 2500, " \n" * 2000, "'" * 300, "\u0301" * 300),
]
_BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


@dataclass(frozen=True)
class ParityResult:
    """What the comparison of one tokenizer has shown."""

    equal: bool
    fastokens: str
    """Its version."""
    tokenizers: str
    texts: int
    """How many both have encoded."""
    characters: int
    refused: str | None = None
    """Why fastokens does not read the tokenizer, or fails."""
    difference: str | None = None
    """The first text that got other ids."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def parity(tokenizer_json: bytes, sample: Sequence[str]) -> ParityResult:
    """Compare both encoders; equal means that every text got the same ids.

    Raises:
        ValueError: the reference does not read the tokenizer.
    """
    reference: Encoder = LibraryEncoder(read_library(tokenizer_json))
    versions = {"fastokens": FastEncoder.version, "tokenizers": LibraryEncoder.version}
    texts = characters = 0
    try:
        fast: Encoder = FastEncoder(tokenizer_json)
        for name, case in [*cases(added_tokens(tokenizer_json)), ("sample", list(sample))]:
            difference = first_difference(name, case, reference, fast)
            texts, characters = texts + len(case), characters + sum(map(len, case))
            if difference:
                return ParityResult(False, **versions, texts=texts, characters=characters, difference=difference)
    except (ValueError, RequestError) as error:
        return ParityResult(False, **versions, texts=texts, characters=characters, refused=str(error))
    return ParityResult(True, **versions, texts=texts, characters=characters)


def first_difference(name: str, texts: list[str], reference: Encoder, fast: Encoder) -> str | None:
    """Encode the texts with both; the first that gets other ids, in words."""
    wanted, seen = reference.encode(texts), fast.encode(texts)
    if all(np.array_equal(one, other) for one, other in zip(wanted, seen, strict=True)):
        return None
    for text, ours, theirs in zip(texts, _documents(wanted), _documents(seen), strict=True):
        if ours != theirs:
            at = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
            shown = shortened(ascii(text), SHOWN_CHARACTERS)
            return f"{name}: {shown}: id {at}: tokenizers gives {ours[at : at + 4]}, fastokens {theirs[at : at + 4]}"
    return f"{name}: other offsets"


def _documents(encoded: tuple[np.ndarray, np.ndarray]) -> list[list[int]]:
    ids, offsets = encoded
    return [ids[start:end].tolist() for start, end in pairwise(offsets)]


def added_tokens(tokenizer_json: bytes) -> list[str]:
    entries = parse_object(tokenizer_json).get("added_tokens") or []
    return [entry["content"] for entry in entries][:MAX_SPELLED]


# ---- the texts -------------------------------------------------------------------------------------------------------


def cases(spelled: Sequence[str]) -> Iterator[Texts]:
    """The fixed texts, cheap ones first; `spelled` are the texts of the added tokens."""
    dice = random.Random(0)
    yield "by hand", BY_HAND
    yield "special tokens", _special(spelled)
    yield "mixed scripts", [_mixed(dice) for _ in range(4000)]
    yield "runs", [*_runs(dice)]
    yield "runs across blocks", [_patchwork(dice, 250_000) for _ in range(3)]
    yield "one after the other", _after_each_other(dice)
    for number, text in enumerate(_parting(dice)):
        yield f"one call after the other, {number}", [text]
    yield "every character", [*_every_character()]


def _special(spelled: Sequence[str]) -> list[str]:
    usual = ["<|endoftext|>", "<|im_start|>", "<|eot_id|>", "</s>", "<s>", "<unk>", "<pad>", "[MASK]"]
    tokens = [*dict.fromkeys([*spelled, *usual])]
    alone = [text for token in tokens for text in (token, f"hi {token} there", f"x{token}{token}y\n", token[:-1])]
    return [*alone, "".join(tokens), " ".join(tokens), "\n".join(token.upper() for token in tokens)]


def _mixed(dice: random.Random) -> str:
    length = dice.randrange(1, 120)
    return "".join(dice.choice(SCRIPTS if dice.random() < 0.4 else ASCII) for _ in range(length))


def _runs(dice: random.Random) -> Iterator[str]:
    for unit in ("a", "A", " ", "\n", "\r\n", "1", "=-", "汉字", "é", "👍"):
        yield unit * (RUN_CHARACTERS // len(unit))
    yield "".join(dice.choices(_BASE64, k=RUN_CHARACTERS))
    yield "".join(dice.choices(_BASE64[:52], k=RUN_CHARACTERS))
    yield "".join(dice.choices(SCRIPTS, k=RUN_CHARACTERS))


def _words(dice: random.Random, characters: int) -> str:
    words = ["".join(dice.choices("etaoinshrdlu", k=dice.randrange(1, 9))) for _ in range(characters // 2)]
    return " ".join(words)[:characters]


def _patchwork(dice: random.Random, characters: int) -> str:
    """Prose, and runs of one kind up to 3,000 characters long, in turns."""
    parts, left = [], characters
    while left > 0:
        unit = dice.choice(["a", " ", "\n", "\t ", "-", "0", "字", "é", " \r\n", "x'"])
        part = _words(dice, int(2 ** dice.uniform(2, 10))) + unit * int(2 ** dice.uniform(0, 11.5))
        parts.append(part)
        left -= len(part)
    return "".join(parts)


def _after_each_other(dice: random.Random) -> list[str]:
    """Texts that share their first thousands of characters with the one before, and part inside of a run."""
    base = f"{_words(dice, 6000)}{' ' * 700}{'x' * 1500}{_words(dice, 14_000)}"
    texts = [base]
    for number, length in enumerate([4096, 6000, 6350, 6699, 6700, 6701, 7900, 15_000]):
        texts += [base[:length] + ("Z", " tail", "\n\nmore", "  ")[number % 4], base, f"{base} {number}"]
    return [*texts, *_parting(dice)]


def _parting(dice: random.Random) -> list[str]:
    start = f"{_words(dice, 5000)}{' ' * 700}"
    return [f"{start}{end}" for end in ("xyz", " ", "xyz", "\n", "x", "\tx", "y", "", "  ", "1")]


def _every_character() -> Iterator[str]:
    """Every character up to U+1FFFF, and some beyond, after a letter, in a contraction and at the end of a line."""
    codes = [*range(0xD800), *range(0xE000, 0x20000), *range(0x20000, 0x110000, 0x101)]
    for first in range(0, len(codes), 64):
        yield "".join(f"a{chr(c)}'{chr(c)}\n" for c in codes[first : first + 64])
