"""A recipe's text as plain values with line numbers: the small, strict part of YAML that means one thing only.

Scalars follow YAML 1.2, so `1e-4` is a number and `no` is text. What could make one text mean two things, or a small
file a huge value, is refused: duplicate keys, anchors and aliases, tags, keys that are not text, numbers beyond 64
bits, control characters, deep nesting, a second document.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import yaml

from marin_build.errors import RecipeError
from marin_build.foreign import shortened

Path = tuple[str | int, ...]

MAX_BYTES = 1 << 20
MAX_DEPTH = 24

_NOT_PRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_WORDS = {word: value for value in (True, False) for word in (str(value), str(value).lower(), str(value).upper())}
_WORDS |= dict.fromkeys(("", "~", "null", "Null", "NULL"))  # type: ignore[arg-type]

_HINTS = {
    "mapping values are not allowed in this context": "put quotes around text that holds ': ', and indent blocks alike",
    "did not find expected key": "indent the keys of one block alike",
    "did not find expected <document start>": "begin the file's first key at the left margin",
    "did not find expected ',' or ']'": "close the list with ']'",
    "did not find expected ',' or '}'": "close the block with '}'",
}


@dataclass(frozen=True)
class Document:
    """The values of one recipe file, and the line (from 1) on which each path begins."""

    file: str
    value: dict[str, Any]
    lines: dict[Path, int]

    def line(self, path: Path) -> int:
        """The line of `path`, or of the nearest block around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def at(self, path: Path) -> Any:
        """The value at `path`; None where there is none."""
        value: Any = self.value
        for part in path:
            if isinstance(value, dict):
                value = value.get(part)
            elif isinstance(value, list) and isinstance(part, int) and part < len(value):
                value = value[part]
            else:
                return None
        return value


def parse_document(content: bytes, file: str) -> Document:
    """Read the one mapping that `content` holds; `file` is the name to show.

    Raises:
        RecipeError: `file:line: ` and what is not allowed there.
    """
    if len(content) > MAX_BYTES:
        raise RecipeError(f"{file}: is larger than {MAX_BYTES} bytes; recipes are short pages")
    text = _decode(content, file)
    reader = _Reader(text, file)
    try:
        value = reader.document()
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text, file) from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{file}: is not YAML: {error}") from None
    return Document(file, value, reader.lines)


def _decode(content: bytes, file: str) -> str:
    try:
        text = content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = content[error.start]
        raise RecipeError(f"{file}:{line}: is not UTF-8: byte 0x{byte:02x} at offset {error.start}") from None
    if found := _NOT_PRINTABLE.search(text):
        line = text.count("\n", 0, found.start()) + 1
        raise RecipeError(f"{file}:{line}: holds the control character U+{ord(found[0]):04X}")
    return text


def _syntax_error(error: yaml.MarkedYAMLError, text: str, file: str) -> RecipeError:
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    lines = text.splitlines()
    seen = lines[line - 1].strip() if line <= len(lines) else ""
    problem = error.problem or "cannot be read"
    hint = "tabs cannot indent: use spaces" if line <= len(lines) and "\t" in lines[line - 1] else _HINTS.get(problem)
    context = f" {error.context}" if error.context else ""
    since = (
        f" (from line {error.context_mark.line + 1})"
        if error.context_mark and error.context_mark.line + 1 < line
        else ""
    )
    message = f"{file}:{line}: is not YAML: {problem}{context}{since}, seen {shown(seen)}"
    return RecipeError(f"{message}\n  {hint}" if hint else message)


class _Reader:
    """Turns the parser's events into values, one by one, so that nothing is built before it is allowed."""

    def __init__(self, text: str, file: str) -> None:
        self._next: Callable[[], Any] = yaml.CSafeLoader(text).get_event
        self._file = file
        self.lines: dict[Path, int] = {}

    def document(self) -> dict[str, Any]:
        next_event = self._next
        next_event()  # the stream's start
        if isinstance(next_event(), yaml.StreamEndEvent):
            raise RecipeError(f"{self._file}: is empty; `marin-build new` writes a complete recipe")
        first = next_event()
        if not isinstance(first, yaml.MappingStartEvent):
            self._refuse_reference(first)
            self._fail(first, "a recipe is a block of `key: value` lines")
        value = self._value(first, ())
        next_event()  # the document's end
        rest = next_event()
        if not isinstance(rest, yaml.StreamEndEvent):
            self._fail(rest, "a second document begins; a file holds one recipe")
        assert isinstance(value, dict)
        return value

    def _value(self, event: Any, path: Path) -> Any:
        self._refuse_reference(event)
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if len(path) > MAX_DEPTH:
            self._fail(event, f"is nested deeper than {MAX_DEPTH} levels")
        return self._mapping(path) if isinstance(event, yaml.MappingStartEvent) else self._sequence(path)

    def _mapping(self, path: Path) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            key = self._key(event)
            here = (*path, key)
            if key in values:
                self._fail(event, f"the key {shown(key)} stands here twice, first on line {self.lines[here]}")
            self.lines[here] = event.start_mark.line + 1
            values[key] = self._value(self._next(), here)
        return values

    def _sequence(self, path: Path) -> list[Any]:
        values: list[Any] = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            here = (*path, len(values))
            self.lines[here] = event.start_mark.line + 1
            values.append(self._value(event, here))
        return values

    def _key(self, event: Any) -> str:
        self._refuse_reference(event)
        if not isinstance(event, yaml.ScalarEvent):
            self._fail(event, "a key must be text, not a list or a block")
        if not event.style and event.value == "<<":
            self._fail(event, "merging (`<<`) is not allowed: a recipe states every value itself")
        key = self._scalar(event)
        if not isinstance(key, str):
            self._fail(event, f"the key {shortened(event.value, 100)} is not text; put quotes around it")
        return key

    def _scalar(self, event: Any) -> str | int | float | bool | None:
        text: str = event.value
        if event.style:
            if event.style == '"' and (found := _CONTROL.search(text)):
                self._fail(event, f"holds the control character U+{ord(found[0]):04X}")
            return text
        if text in _WORDS:
            return _WORDS[text]
        if text[0] not in "+-.0123456789":
            return text
        return self._number(event, text)

    def _number(self, event: Any, text: str) -> str | int | float:
        if _NOT_FINITE.fullmatch(text):
            self._fail(event, f"numbers are finite, seen {shown(text)}")
        if _INTEGER.fullmatch(text):
            if len(digits := text.lstrip("+-")) > 1 and digits[0] == "0":
                self._fail(
                    event, f"{shown(text)} begins with a zero: leave it out of a number, put quotes around a text"
                )
            if len(digits) > 19 or not -(1 << 63) <= int(text) < 1 << 63:
                self._fail(event, f"{shown(text)} does not fit into 64 bits; if it is text, put quotes around it")
            return int(text)
        if not _FLOAT.fullmatch(text):
            return text
        if abs(number := float(text)) == float("inf"):
            self._fail(event, f"{shown(text)} is too large for a number; if it is text, put quotes around it")
        return number

    def _refuse_reference(self, event: Any) -> None:
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            name = shown(event.anchor)
            self._fail(
                event, f"anchors and aliases ({name}) are not allowed: a recipe states every value where it is used"
            )
        if getattr(event, "tag", None) is not None:
            self._fail(
                event, f"tags ({shown(event.tag)}) are not allowed: write the plain value, in quotes if it is text"
            )

    def _fail(self, event: Any, message: str) -> NoReturn:
        raise RecipeError(f"{self._file}:{event.start_mark.line + 1}: {message}")


def dotted(path: Path) -> str:
    """`('data', 'train', 0)` as `data.train[0]`."""
    text = ""
    for part in path:
        name = f"[{part}]" if isinstance(part, int) else part if part.isprintable() else repr(part)
        text += f".{name}" if text and isinstance(part, str) else name
    return text if len(text) <= 200 else f"{text[:200]}…"


def shown(value: Any) -> str:
    """A value for a message: as it would be written in a recipe, on one line and not too long."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, dict):
        return "a block" if value else "an empty block"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:100]}… ({len(text) - 2} characters)"
