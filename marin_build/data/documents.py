"""Documents out of source files, and what is done about bad input.

A file is a stream of bytes, plain or compressed; the stream is cut into *units* that tile it (a line, a paragraph with
the blank lines around it, the whole file); a unit holds one document, none (a blank line of JSON lines), or a rejection
that names its byte and reason. A stream that breaks (cut, wrong checksum) always stops the build: what is missing
cannot be counted.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as _short

import orjson
import zstandard

from marin_build.data.sources import unreadable
from marin_build.errors import RequestError
from marin_build.recipe.sources import JsonLines, PlainText, TextFormat

CHUNK_BYTES = 1 << 20
ZSTD_FEED_BYTES = 16 << 10
"""Compressed bytes given to zstandard at once: it returns all that they hold, up to 32,768 times as much."""
ZSTD_MAX_WINDOW_BYTES = 1 << 31
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
GZIP, ZSTD = (".gz",), (".zst", ".zstd")
OTHER_FORMATS = (".parquet", ".bz2", ".xz", ".lz4", ".br", ".zip", ".tar", ".tgz", ".7z", ".arrow", ".npy", ".pdf")

NOT_TEXT = frozenset({"null", "empty"})
"""Reasons that are counted but are no fault: the record says that it has no text."""


@dataclass(frozen=True)
class Rejection:
    """A unit that gives no document: at which byte of the (decompressed) file, and why."""

    byte: int
    reason: str
    """null, empty, malformed_json, invalid_utf8, lone_surrogate, not_an_object, missing_key or not_text."""
    detail: str

    @property
    def is_bad(self) -> bool:
        return self.reason not in NOT_TEXT


# ---- bytes of a file -------------------------------------------------------------------------------------------------


def is_compressed(name: str) -> bool:
    return name.lower().endswith(GZIP + ZSTD)


def supported(format: TextFormat, target: str) -> JsonLines | PlainText:
    """The format, where documents can be read from it.

    Raises:
        RequestError: that is not built yet.
    """
    if isinstance(format, JsonLines | PlainText):
        return format
    raise RequestError(
        f"{target}: format.type {format.type} is not supported yet; convert the files to JSON lines, with type: jsonl"
    )


def check_format(name: str) -> None:
    """Refuse a file whose ending says that it holds no lines of text."""
    if name.lower().endswith(OTHER_FORMATS):
        raise RequestError(f"source file {name} is neither plain text, .gz nor .zst; convert it, or narrow the glob")


def read_chunks(path: Path, start: int, end: int | None, tap: Callable[[bytes], None]) -> Iterator[bytes]:
    """The bytes [start, end) of a file as it lies on the disk, each chunk shown to `tap` first."""
    at = start
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            while chunk := file.read(CHUNK_BYTES if end is None else min(CHUNK_BYTES, end - at)):
                at += len(chunk)
                tap(chunk)
                yield chunk
    except OSError as error:
        raise unreadable(error, path, at) from error


def decompressed(path: Path, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The text's bytes, by the ending of the file's name.

    Raises:
        RequestError: the compressed stream is cut off, or not what it claims to be.
    """
    name = path.name.lower()
    if name.endswith(GZIP):
        return _gunzip(path, chunks)
    return _unzstd(path, chunks) if name.endswith(ZSTD) else iter(chunks)


def _gunzip(path: Path, chunks: Iterable[bytes]) -> Iterator[bytes]:
    inflate, started = zlib.decompressobj(wbits=31), False
    try:
        for chunk in chunks:
            while chunk:
                if inflate.eof:
                    inflate, started = zlib.decompressobj(wbits=31), False
                    chunk = chunk.lstrip(b"\0")  # tapes and some writers pad with zeros
                    continue
                started = True
                yield inflate.decompress(chunk, CHUNK_BYTES)
                chunk = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
    except zlib.error as error:
        raise RequestError(f"source file {path} is damaged: {error}") from None
    if started and not inflate.eof:
        raise _cut_off(path, "gzip")


def _unzstd(path: Path, chunks: Iterable[bytes]) -> Iterator[bytes]:
    # stream_reader ends quietly on a frame that is cut off; decompressobj says whether it reached the end.
    decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_MAX_WINDOW_BYTES)
    frame, started = decompressor.decompressobj(), False
    try:
        for chunk in chunks:
            for at in range(0, len(chunk), ZSTD_FEED_BYTES):
                piece = chunk[at : at + ZSTD_FEED_BYTES]
                while piece:
                    started = True
                    yield frame.decompress(piece)
                    piece = b""
                    if frame.eof:
                        piece = frame.unused_data
                        frame, started = decompressor.decompressobj(), False
    except zstandard.ZstdError as error:
        raise RequestError(f"source file {path} is damaged: {error}") from None
    if started:
        raise _cut_off(path, "zstd")


def _cut_off(path: Path, format: str) -> RequestError:
    return RequestError(
        f"source file {path} is cut off: its {format} stream does not end\n"
        f"  {path.stat().st_size:,} bytes are there; get it again"
    )


# ---- units -----------------------------------------------------------------------------------------------------------


def units(chunks: Iterable[bytes], format: JsonLines | PlainText) -> Iterator[bytes]:
    """Cut a stream into units; joined, they are the stream."""
    if isinstance(format, JsonLines) or format.document == "line":
        return lines(chunks)
    return paragraphs(lines(chunks)) if format.document == "paragraph" else whole(chunks)


def can_be_cut(format: JsonLines | PlainText) -> bool:
    """Whether a plain file of this format may be read in ranges."""
    return isinstance(format, JsonLines) or format.document != "file"


def lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Lines with their `\\n`, in time linear in the length of the longest."""
    pieces: list[bytes] = []
    for chunk in chunks:
        first, newline, rest = chunk.partition(b"\n")
        pieces.append(first + newline)
        if not newline:
            continue
        yield b"".join(pieces)
        *complete, last = rest.split(b"\n")
        for line in complete:
            yield line + b"\n"
        pieces = [last]
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


def read_document(unit: bytes, at: int, format: JsonLines | PlainText) -> str | Rejection | None:
    """The text of a unit that begins at byte `at`, a rejection, or None where there is nothing to be one."""
    if at == 0 and unit.startswith(BYTE_ORDER_MARK):
        unit, at = unit[len(BYTE_ORDER_MARK) :], len(BYTE_ORDER_MARK)
    if isinstance(format, JsonLines):
        return _json_document(unit, at, format.text_key) if unit.strip() else None
    content = _content(unit, format)
    try:
        return content.decode() or Rejection(at, "empty", "no text")
    except UnicodeDecodeError as error:
        return _invalid_utf8(error, unit, at + unit.find(content))


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
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        record = _lenient_json(line, at)  # NaN is accepted, and the others get a reason
        if isinstance(record, Rejection):
            return record
    if not isinstance(record, dict):
        return Rejection(at, "not_an_object", f"a {type(record).__name__} instead of an object; {_ONE_A_LINE}")
    if key not in record:
        return Rejection(at, "missing_key", f"no key {key!r}; it has: {', '.join(map(_short, list(record)[:8]))}")
    return _checked_text(record[key], at, key)


_ONE_A_LINE = "JSON lines need one object a line"


def _checked_text(value: object, at: int, key: str) -> str | Rejection:
    if value is None:
        return Rejection(at, "null", f"{key!r} is null")
    if not isinstance(value, str):
        return Rejection(at, "not_text", f"{key!r} is a {type(value).__name__}: {_short(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return Rejection(at, "lone_surrogate", f"{key!r} holds {value[error.start]!r}, half of a character")
    return value or Rejection(at, "empty", f"{key!r} is empty")


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
