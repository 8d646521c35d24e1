"""Long documents in pieces: cut only where the tokenizer certainly splits, so that the ids are those of the whole.

A tokenizer encodes its pre-tokens one by one. Where a boundary between two of them is certain whatever stands before
and after, each side can be encoded alone. That holds between a small Latin letter and a space before a Latin letter
when nothing changes the text first, when no added token holds a space or looks at its neighbours, and when every
alternative of the splitting pattern is one of `ALTERNATIVES`:

- none of them matches a letter followed by a space, so a match that holds the letter ends there;
- one of them matches every small letter, so there is such a match;
- none looks back, so what follows is split as at the start of a text;
- only `\\s+(?!\\S)` looks ahead, over white space, and at one character: that is never beyond the letter.

Any other tokenizer gets its documents whole. So does a run without such a place, like a million letters: it is one
pre-token, and its byte pairs can only be merged together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

PIECE_CHARACTERS = 1 << 20
"""A document is cut at the first place after so many."""
_PLACE = re.compile(r"[a-z](?= [A-Za-z])")

_LETTERS = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"[^\r\n\p{L}\p{N}]?+\p{L}+",
    r" ?\p{L}+",
    r"\p{L}+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
)
"""Each matches every run of small letters."""
ALTERNATIVES = frozenset(
    (
        *_LETTERS,
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        *(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"'(?i:[sdmt]|ll|ve|re)", r"'(?:[sdmt]|ll|ve|re)"),
        *(r"'s", r"'t", r"'re", r"'ve", r"'m", r"'ll", r"'d"),
        *(r"\p{N}", r"\p{N}+", r"\p{N}{1,3}", r"\p{N}{1,3}+", r" ?\p{N}+"),
        *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]++[\r\n]*"),
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+", r"\s++$"),
    )
)
"""Of the patterns of GPT-2, cl100k, Llama 3, Qwen and o200k."""
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What a ByteLevel pre-tokenizer splits by where nothing has split before."""


def may_be_cut(specification: dict[str, Any]) -> bool:
    """Whether a document can be cut after a small letter before a space and a letter, as this tokenizer.json is."""
    return (
        specification["model"].get("type") == "BPE"
        and specification["normalizer"] is None
        and _splits_there(_patterns(specification["pre_tokenizer"] or {}))
        and not any(_reaches_over(token) for token in specification["added_tokens"] if not token["special"])
    )


def _patterns(part: dict[str, Any]) -> list[str | None]:
    """The patterns that split one after the other; None for what is not known."""
    kind = part.get("type")
    if kind == "Sequence":
        return [pattern for inner in part.get("pretokenizers", ()) for pattern in _patterns(inner)]
    if kind == "ByteLevel" and part.get("add_prefix_space") is False:
        return [GPT2] if part.get("use_regex", True) else []
    if kind == "Split" and part.get("behavior") == "Isolated" and part.get("invert") is False:
        return [part["pattern"].get("Regex")]
    return [None]


def _splits_there(patterns: list[str | None]) -> bool:
    """One pattern: a second would split what the first has split, and look at each part alone."""
    if len(patterns) != 1 or patterns[0] is None:
        return False
    alternatives = set(_alternatives(patterns[0]))
    return alternatives <= ALTERNATIVES and not alternatives.isdisjoint(_LETTERS)


def _alternatives(pattern: str) -> Iterator[str]:
    """What stands between the `|` outside of all brackets."""
    depth = start = 0
    for match in re.finditer(r"\\.|[()\[\]|]", pattern, re.DOTALL):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(match[0], 0)
        if match[0] == "|" and depth == 0:
            yield pattern[start : match.start()]
            start = match.end()
    yield pattern[start:]


def _reaches_over(token: dict[str, Any]) -> bool:
    """Whether an added token may hold the place of a cut, or depend on what is beyond it."""
    return " " in token["content"] or any(token.get(flag) for flag in ("lstrip", "rstrip", "single_word"))


def cut(text: str, characters: int = PIECE_CHARACTERS) -> Iterator[str]:
    """The text in pieces of about so many characters, longer where there is no place to cut."""
    start = 0
    while len(text) - start > characters and (place := _PLACE.search(text, start + characters - 1)):
        yield text[start : place.end()]
        start = place.end()
    yield text[start:]


def groups(pieces: Sequence[str], characters: int = PIECE_CHARACTERS) -> Iterator[list[str]]:
    """The pieces in their order, so many at a time that they have about so many characters."""
    group: list[str] = []
    size = 0
    for piece in pieces:
        if group and size + len(piece) > characters:
            yield group
            group, size = [], 0
        group.append(piece)
        size += len(piece)
    if group:
        yield group
