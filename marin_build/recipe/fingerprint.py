"""Fingerprints: 128 bits that name what a recipe and everything upstream of it say.

They are hashes of canonical bytes, so that comments, key order and the spelling of numbers count nowhere, and an old
artifact keeps its name when the schema grows (`added_later`). Known ones are pinned in `tests/golden/`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from marin_build.recipe.schema import OUTSIDE_IDENTITY, Recipe

_MAX_DEPTH = 100


def canonical_bytes(value: Any) -> bytes:
    """JSON with sorted keys, no spaces and shortest floats, as UTF-8; equal values give equal bytes.

    Raises:
        ValueError: the value has none: NaN, infinity, a lone surrogate, a key that is not text, another type.
    """
    return json.dumps(_canonical(value, "", 0), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def identity_body(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain values, defaults filled in; without `measure`, `execution` and later fields still neutral."""
    return {key: value for key, value in _plain_model(recipe).items() if key not in OUTSIDE_IDENTITY}


def fingerprint(recipe: Recipe, dependencies: Mapping[str, str]) -> str:
    """32 hex digits of the recipe's identity and of the fingerprints of its `dependencies`, by target."""
    return body_fingerprint(recipe.kind, identity_body(recipe), dependencies)


def body_fingerprint(kind: str, body: Mapping[str, Any], dependencies: Mapping[str, str]) -> str:
    """The fingerprint of an identity body that is at hand as plain values, for example from a record."""
    import xxhash

    content = {"kind": kind, "recipe": dict(body), "dependencies": dict(dependencies)}
    return xxhash.xxh3_128_hexdigest(canonical_bytes(content))


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return _plain_model(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _plain_model(model: BaseModel) -> dict[str, Any]:
    fields = type(model).model_fields
    return {
        name: _plain(value)
        for name, value in model
        if not (_is_later(fields[name].json_schema_extra) and value == fields[name].get_default())
    }


def _is_later(extra: Any) -> bool:
    return isinstance(extra, dict) and extra.get("x-added-later") is True


def _canonical(value: Any, path: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError(f"{path[:80]}… has no canonical bytes: it is nested deeper than {_MAX_DEPTH} levels")
    kind = type(value)
    if value is None or kind is bool or kind is int:
        return value
    if kind is float:
        if not math.isfinite(value):
            raise ValueError(f"{path or 'the value'} has no canonical bytes: {value} is not finite")
        return value + 0.0  # turns -0.0 into 0.0
    if kind is str:
        return _text(value, path)
    if kind is list or kind is tuple:
        return [_canonical(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    if kind is dict:
        return {_key(key, path): _canonical(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
    raise ValueError(f"{path or 'the value'} has no canonical bytes: {kind.__name__} is not a plain value")


def _key(key: Any, path: str) -> str:
    if type(key) is not str:
        raise ValueError(f"{path or 'the value'} has no canonical bytes: the key {key!r} is not text")
    return _text(key, path)


def _text(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"{path or 'the value'} has no canonical bytes: {text!r} holds half of a surrogate pair"
        ) from None
    return text
