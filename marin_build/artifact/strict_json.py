"""JSON that others may have written: read whole or refused in a few words, whatever is in it.

Beyond what `json` checks: UTF-8 only, no key twice (two readers would see two records), finite numbers, limited
nesting, no halves of characters. A `ValueError` says what is wrong; nothing else is ever raised.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

MAX_DEPTH = 100
_NESTING = frozenset({dict, list})
"""What the parser makes of brackets, never a class of theirs: twice as fast as isinstance for half a million items."""
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_TOO_DEEP = f"it is nested deeper than {MAX_DEPTH} levels"


def parse_object(data: bytes, *, half_characters: bool = False) -> dict[str, Any]:
    """The JSON object in `data`; `half_characters` allows what stands for bytes of a file name that are no text.

    Raises:
        ValueError: it holds none, with the reason.
    """
    text = data.decode("utf-8", "surrogatepass" if half_characters else "strict")
    try:
        body = json.loads(text, object_pairs_hook=_mapping, parse_float=_float, parse_constant=_constant)
        if not half_characters and _HALF.search(text):
            json.dumps(body, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except UnicodeEncodeError:
        raise ValueError("it holds half of a character") from None
    if not isinstance(body, dict):
        raise ValueError(f"it is a {type(body).__name__}, not an object")
    if text.count("{") + text.count("[") > MAX_DEPTH:
        _check_depth(body)
    return body


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"it holds the key {ascii(twice)[:100]} twice")
    return body


def _float(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"it holds the number {text[:40]}, which is too large")
    return number


def _constant(text: str) -> Any:
    raise ValueError(f"it holds {text}, which is no number")


def _check_depth(body: dict[str, Any]) -> None:
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for value in level
            for item in (value.values() if isinstance(value, dict) else value)
            if type(item) in _NESTING
        ]
        if not level:
            return
    raise ValueError(_TOO_DEEP)
