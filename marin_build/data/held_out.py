"""A look at whether a token set that is trained on may hold what others measure on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from marin_build.foreign import shortened

_HELD_OUT = re.compile(r"(?:^|[/_.\-])(test|validation|valid|val|held_?out)(?=[/_.\-\d]|$)", re.IGNORECASE)


def sign_of_held_out(recipe: Mapping[str, Any], ledger: Mapping[str, Any]) -> str | None:
    """What says that a set was made for validation or testing: its split, or the name of one of its files; or None.

    `recipe` is that of its record.
    """
    split = recipe.get("split") or {}
    if split.get("part") == "validation":
        return "its recipe takes the validation part of a split"
    name = next(filter(_HELD_OUT.search, _names(recipe, ledger)), None)
    return f"it is made from {shortened(name, 200)!r}" if name else None


def _names(recipe: Mapping[str, Any], ledger: Mapping[str, Any]) -> Iterator[str]:
    source = recipe.get("source", {})
    yield from source.get("paths", [])
    yield from source.get("files", [])
    yield from (shard["source"]["file"] for shard in ledger.get("shards", []) if "source" in shard)
