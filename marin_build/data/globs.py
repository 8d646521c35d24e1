"""Globs over relative paths with `/`, wherever the files lie."""

from __future__ import annotations

import re

from marin_build.errors import RequestError
from marin_build.foreign import shortened

WILDCARD = re.compile(r"[*?\[]")


class Glob:
    """A glob over relative paths: `*` stays within a folder, `**` is any number of folders. No pattern takes long.

    Raises:
        RequestError: a set whose range runs backwards.
    """

    def __init__(self, pattern: str) -> None:
        *folders, last = pattern.split("/")
        parts = [*folders, *(("**", "*") if last == "**" else (last,))]
        try:
            self._parts = [None if part == "**" else re.compile(_segment(part), re.DOTALL) for part in parts]
        except re.error as error:
            raise RequestError(f"the glob {shortened(pattern, 200)!a} means nothing: {error.msg}") from None

    def matches(self, name: str) -> bool:
        segments, at = name.split("/"), {0}
        for part in self._parts:
            if part is None:
                at = set(range(min(at), len(segments)))
            else:
                at = {place + 1 for place in at if place < len(segments) and part.fullmatch(segments[place])}
            if not at:
                return False
        return len(segments) in at


def _segment(text: str) -> str:
    """One part of a glob between two slashes. What is between two stars is found once, and not tried again later."""
    pieces = re.findall(r"\[!?+.[^\]]*+\]|.", text, re.DOTALL)
    spelled = ["." if piece == "?" else _set(piece) if len(piece) > 1 else re.escape(piece) for piece in pieces]
    runs = [""]
    for piece, expression in zip(pieces, spelled, strict=True):
        if piece == "*":
            runs.append("")
        else:
            runs[-1] += expression
    if len(runs) == 1:
        return runs[0]
    first, *middle, last = runs
    return first + "".join(f"(?>.*?{run})" for run in middle if run) + f".*{last}"


def _set(piece: str) -> str:
    """`[abc]`, `[a-c]` or `[!abc]`; never a slash."""
    negated, members = piece[1] == "!", piece[1:-1].removeprefix("!")
    escaped = re.sub(r"([\\\[\]^&~|])", r"\\\1", members)
    return f"(?!/)[{'^' if negated else ''}{escaped}]"
