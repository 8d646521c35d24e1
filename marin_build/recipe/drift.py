"""Which fields differ between the recipe that an artifact was built from and the one that stands there now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from marin_build.foreign import shortened
from marin_build.recipe.document import Path, dotted
from marin_build.recipe.fingerprint import canonical_bytes

MAX_SHOWN = 1000
"""Characters of a value that a line shows."""
_ABSENT = object()


@dataclass(frozen=True)
class Change:
    """One field, as `optimizer.learning_rate: 0.003 → 0.001`; None stands for null and, with its flag, for absence."""

    field: str
    old: Any
    new: Any
    added: bool = False
    """The old recipe did not have the field."""
    removed: bool = False
    """The new recipe does not have the field."""

    def __str__(self) -> str:
        old = "(not there)" if self.added else shortened(spelled(self.old), MAX_SHOWN)
        new = "(not there)" if self.removed else shortened(spelled(self.new), MAX_SHOWN)
        return f"{self.field}: {old} → {new}"


def compare(old_body: Mapping[str, Any], new_body: Mapping[str, Any]) -> list[Change]:
    """Every field that differs between two identity bodies, in the order of the new one; none when they are equal."""
    return list(_changes(dict(old_body), dict(new_body), ()))


def spelled(value: Any) -> str:
    """A plain value as one would write it in a recipe, on one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {spelled(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(spelled, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return repr(value) if isinstance(value, str) and not _is_plain(value) else str(value)


def _changes(old: Any, new: Any, path: Path) -> Iterator[Change]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*new, *(key for key in old if key not in new)]:
            yield from _changes(old.get(key, _ABSENT), new.get(key, _ABSENT), (*path, key))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from _changes(before, after, (*path, index))
    elif old is _ABSENT:
        yield Change(dotted(path), None, new, added=True)
    elif new is _ABSENT:
        yield Change(dotted(path), old, None, removed=True)
    elif canonical_bytes(old) != canonical_bytes(new):
        yield Change(dotted(path), old, new)


def _is_plain(text: str) -> bool:
    return bool(text) and text.isprintable() and not any(c in text for c in " ,[]{}'\"#→")
