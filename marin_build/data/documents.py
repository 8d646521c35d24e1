"""Documents out of the text of source files, and what is done about bad input.

The text is a stream of bytes (`reading`); the stream is cut into *units* that tile it (a line, a paragraph with the
blank lines around it, the whole file, a row); a unit holds one document, none (a blank line of JSON lines), or a
rejection that names its byte or row and the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from io import BytesIO
from reprlib import repr as _short
from typing import Any

import orjson
import xxhash

from marin_build.recipe.schema import ValidationSplit
from marin_build.recipe.sources import ROW_FORMATS, Chat, DocumentFormat, JsonLines, PlainText, TextFormat

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

NOT_BAD = frozenset({"null", "empty", "other_part"})
"""Reasons that are counted but are no fault: the record says that it has no text, or another set has it."""


@dataclass(frozen=True)
class Rejection:
    """A unit that gives no document: at which byte of the (decompressed) file, or in which of its rows, and why."""

    byte: int
    reason: str
    """null, empty, malformed_json, invalid_utf8, lone_surrogate, not_an_object, missing_key or not_text; of
    conversations also not_messages, unknown_role, unsupported_key, template_refused, template_failed, unfollowed_text
    or nothing_trained."""
    detail: str
    row: int | None = None
    """Counted from 0; none: the file has no rows, and `byte` is the place."""

    @property
    def is_bad(self) -> bool:
        return self.reason not in NOT_BAD

    def to_dict(self) -> dict[str, Any]:
        """Its place, either `byte` or `row`, with the reason and the detail."""
        other = "row" if self.row is None else "byte"
        return {key: value for key, value in asdict(self).items() if key != other}


def place_of(rejection: dict[str, Any]) -> str:
    """The place of a rejection as a dict: `byte 1,234`, or `row 12`."""
    unit = "row" if "row" in rejection else "byte"
    return f"{unit} {rejection[unit]:,}"


# ---- units -----------------------------------------------------------------------------------------------------------


def units(chunks: Iterable[bytes], format: DocumentFormat) -> Iterator[bytes]:
    """Cut a stream into units; joined, they are the stream, or its beginning where the format has a limit."""
    if format.max_documents_per_file is None:
        return _all_units(chunks, format)
    return _first_units(_all_units(chunks, format), format, format.max_documents_per_file)


def _first_units(units: Iterator[bytes], format: DocumentFormat, limit: int) -> Iterator[bytes]:
    """Units up to the one that holds the last document of the limit."""
    count = 0
    for unit in units:
        yield unit
        count += bool(unit.strip()) or not isinstance(format, JsonLines | Chat)
        if count == limit:
            return


def _all_units(chunks: Iterable[bytes], format: DocumentFormat) -> Iterator[bytes]:
    if isinstance(format, ROW_FORMATS):
        return iter(chunks)  # each is a unit already
    if not isinstance(format, PlainText) or format.document == "line":
        return lines(chunks)
    return paragraphs(lines(chunks)) if format.document == "paragraph" else whole(chunks)


def can_be_cut(format: DocumentFormat) -> bool:
    """Whether a plain file of this format may be read in ranges: not where its documents must be counted."""
    if format.max_documents_per_file is not None:
        return False
    return not (isinstance(format, ROW_FORMATS) or (isinstance(format, PlainText) and format.document == "file"))


def is_lines(format: TextFormat) -> bool:
    """Whether a unit is a line as it lies in the file, so that one can be found from any byte on."""
    return can_be_cut(format) and not (isinstance(format, PlainText) and format.document == "paragraph")


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines with their `\\n`, in time linear in the length of the longest."""
    pieces: list[bytes] = []
    for chunk in chunks:
        complete = BytesIO(chunk).readlines()
        rest = [complete.pop()] if complete and not complete[-1].endswith(b"\n") else []
        if not complete:
            pieces += rest
            continue
        complete[0] = b"".join([*pieces, complete[0]])
        yield from complete
        pieces = rest
    if line := b"".join(pieces):
        yield line


def paragraphs(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Runs of lines that are not blank, each with the blank lines after it; the first with those before it, too."""
    pieces: list[bytes] = []
    has_text = after_blank = False
    for line in lines:
        blank = not line.strip()
        if has_text and after_blank and not blank:
            yield b"".join(pieces)
            pieces, has_text = [], False
        pieces.append(line)
        has_text, after_blank = has_text or not blank, blank
    if pieces:
        yield b"".join(pieces)


def whole(chunks: Iterable[bytes]) -> Iterator[bytes]:
    if content := b"".join(chunks):
        yield content


# ---- documents -------------------------------------------------------------------------------------------------------


def read_document(unit: bytes, at: int, format: TextFormat) -> str | Rejection | None:
    """The text of a unit that begins at byte `at`, a rejection, or None where there is nothing to be one."""
    if isinstance(format, ROW_FORMATS):
        return read_row(unit, at, format.text_key)
    unit, at = without_mark(unit, at)
    if isinstance(format, JsonLines):
        return _json_document(unit, at, format.text_key) if unit.strip() else None
    content = _content(unit, format)
    try:
        return content.decode() or Rejection(at, "empty", "no text")
    except UnicodeDecodeError as error:
        return _invalid_utf8(error, unit, at + unit.find(content))


def without_mark(unit: bytes, at: int) -> tuple[bytes, int]:
    """A unit and its place, without the byte order mark that a file may begin with."""
    marked = at == 0 and unit.startswith(BYTE_ORDER_MARK)
    return (unit[len(BYTE_ORDER_MARK) :], len(BYTE_ORDER_MARK)) if marked else (unit, at)


def _content(unit: bytes, format: PlainText) -> bytes:
    """What of a unit is text: not the end of its last line, and for a paragraph not the blank lines around it."""
    if format.document == "file":
        return unit
    if format.document == "line":
        return unit.removesuffix(b"\n").removesuffix(b"\r")
    kept = unit.split(b"\n")
    while kept and not kept[0].strip():
        kept.pop(0)
    while kept and not kept[-1].strip():
        kept.pop()
    return b"\n".join(kept).removesuffix(b"\r")


def _json_document(line: bytes, at: int, key: str) -> str | Rejection:
    record = json_record(line, at)
    if isinstance(record, Rejection):
        return record
    if key not in record:
        return missing_key(record, at, key)
    return checked_text(record[key], at, key)


def json_record(line: bytes, at: int) -> dict[str, Any] | Rejection:
    """The object that a line holds."""
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        record = _lenient_json(line, at)  # NaN is accepted, and the others get a reason
        if isinstance(record, Rejection):
            return record
    if not isinstance(record, dict):
        return Rejection(at, "not_an_object", f"a {type(record).__name__} instead of an object; {_ONE_A_LINE}")
    return record


_ONE_A_LINE = "JSON lines need one object a line"


def missing_key(record: dict[str, object], at: int, key: str) -> Rejection:
    return Rejection(at, "missing_key", f"no key {key!r}; it has: {', '.join(map(_short, list(record)[:8]))}")


def _name(key: str | None) -> str:
    return "the text" if key is None else repr(key)


def checked_text(value: object, at: int, key: str | None) -> str | Rejection:
    """The value under a key, or the value itself, if it is text."""
    name = _name(key)
    if value is None:
        return Rejection(at, "null", f"{name} is null")
    if not isinstance(value, str):
        return Rejection(at, "not_text", f"{name} is a {type(value).__name__}: {_short(value)}")
    if not value.isascii():  # which costs nothing, and most texts are
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return Rejection(at, "lone_surrogate", f"{name} holds {value[error.start]!r}, half of a character")
    return value or Rejection(at, "empty", f"{name} is empty")


def _lenient_json(line: bytes, at: int) -> object:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return _invalid_utf8(error, line, at)
    try:
        return json.loads(text)
    except RecursionError:
        return Rejection(at, "malformed_json", "nested too deeply")
    except ValueError as error:
        hint = f"; {_ONE_A_LINE}" if text.lstrip()[:1] == "[" else ""
        return Rejection(at, "malformed_json", f"{error}{hint}")


def _invalid_utf8(error: UnicodeDecodeError, unit: bytes, at: int) -> Rejection:
    hint = ""
    if unit.startswith(b"\x1f\x8b"):
        hint = "; it looks compressed by gzip: give it the ending .gz"
    elif unit.startswith(b"\x28\xb5\x2f\xfd"):
        hint = "; it looks compressed by zstd: give it the ending .zst"
    elif unit.startswith((b"\xff\xfe", b"\xfe\xff")):
        hint = "; it looks like UTF-16: convert it to UTF-8"
    return Rejection(at + error.start, "invalid_utf8", f"{error.reason}, 0x{error.object[error.start]:02x}{hint}")


# ---- splits ----------------------------------------------------------------------------------------------------------

OTHER_PART = "other_part"
"""What is counted of documents on the other side of a split."""


def is_on_side(content: bytes, split: ValidationSplit) -> bool:
    """Whether a document is on the side of a split that is asked for: by a hash of its content with the seed.

    Equal documents are on one side, so none is trained on and measured; and no other document plays a part.
    """
    threshold = int(split.validation_fraction * (1 << 64))
    is_validation = xxhash.xxh3_64_intdigest(content, seed=split.seed) < threshold
    return is_validation == (split.part == "validation")


# ---- rows ------------------------------------------------------------------------------------------------------------


_ROW = re.compile(rb"(\d+)([ !])")


def row_unit(row: int, document: bytes | Rejection) -> bytes:
    """A row of a file as a unit of its text: its number and, after a space, the bytes of its text; or after an
    exclamation mark why it has none."""
    if isinstance(document, bytes):
        return b"%d " % row + document
    return b"%d!" % row + orjson.dumps([document.reason, document.detail])


def read_row(unit: bytes, at: int, key: str | None) -> str | Rejection:
    found = _ROW.match(unit)
    assert found, "units of rows are made by row_unit"
    row, content = int(found[1]), unit[found.end() :]
    if found[2] == b"!":
        return Rejection(at, *orjson.loads(content), row=row)
    try:
        return content.decode() or Rejection(at, "empty", f"{_name(key)} is empty", row=row)
    except UnicodeDecodeError as error:
        detail = f"{error.reason}, 0x{content[error.start]:02x} at byte {error.start} of it"
        return Rejection(at, "invalid_utf8", detail, row=row)
