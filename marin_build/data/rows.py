"""Files of rows as units, one a row: Parquet, Arrow (streams and files) and JSON arrays.

A row becomes the unit `documents.row_unit` of it, which carries the row's number; from there on such a file is read
like any other. Parquet and Arrow are read a few rows at a time and the one column alone, so memory is that of a batch
(Arrow: of a record batch as it was written); a JSON array is read whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from marin_build.data.documents import Rejection, checked_text, missing_key, row_unit
from marin_build.data.places import Place, open_place, unreadable
from marin_build.errors import RequestError
from marin_build.foreign import shortened
from marin_build.recipe.sources import Arrow, JsonArray, Parquet

BATCH_ROWS = 256
BUFFER_BYTES = 1 << 20
"""Of a column chunk, read at once."""
ARROW_MAGIC = b"ARROW1"
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
SHOWN_COLUMNS = 12
MAX_BYTES_WANTED = 1 << 40
"""Memory that no machine has: a file that asks for more of it is damaged."""
_WANTED_BYTES = re.compile(r"size (\d+)")

_AS_BYTES = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}

Units = tuple[float, list[bytes]]
"""How far the file is then, 0 to 1, and the units of some rows."""


def row_units(path: Place, format: Parquet | Arrow) -> Iterator[Units]:
    """The units of all rows, in order.

    Raises:
        RequestError: the file is cut off, damaged, no such file, or has no such column of text.
        MarinError: it cannot be read.
    """
    try:
        with open_place(path) as file:
            bounded = cast(BinaryIO, _Bounded(file))
            yield from (_parquet if isinstance(format, Parquet) else _arrow)(path, bounded, format.text_key)
    except OSError as error:  # of the system; those of pyarrow are explained where they come
        raise unreadable(error, path, 0) from error


class _Bounded:
    """A file of which never more is asked for than there is, whatever a damaged header says."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._size = file, file.seek(0, 2)
        self.closed, self.seek, self.tell = False, file.seek, file.tell
        file.seek(0)

    def read(self, count: int = -1) -> bytes:
        there = max(0, self._size - self._file.tell())
        return self._file.read(there if count < 0 else min(count, there))

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


class _Damage:
    """Turns what pyarrow raises into an error that names the file and the part of it."""

    def __init__(self, path: Place, what: str) -> None:
        self._path, self._what = path, what
        self.part = ""

    def __enter__(self) -> _Damage:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if _is_about_the_file(error):
            reason = shortened(str(error).partition("\n")[0], 300)
            raise RequestError(
                f"source file {self._path} is damaged, cut off or no {self._what}: {self.part}{reason}"
            ) from None


def _is_about_the_file(error: BaseException | None) -> bool:
    if isinstance(error, MemoryError):
        wanted = _WANTED_BYTES.search(str(error))
        return bool(wanted) and int(wanted[1]) > MAX_BYTES_WANTED
    return isinstance(error, pa.ArrowException) or (isinstance(error, OSError) and error.errno is None)


def _parquet(path: Place, file: BinaryIO, key: str) -> Iterator[Units]:
    row = 0
    with _Damage(path, "Parquet file") as damage:
        parquet = pq.ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)
        _check_column(path, parquet.schema_arrow, key)
        total = parquet.metadata.num_rows
        for group in range(parquet.num_row_groups):
            damage.part = f"row group {group}: "
            batches = parquet.iter_batches(BATCH_ROWS, row_groups=[group], columns=[key], use_threads=False)
            for batch in batches:
                units = _units(row, batch.column(batch.schema.get_field_index(key)), key)
                row += len(batch)
                yield row / total, units


def _arrow(path: Place, file: BinaryIO, key: str) -> Iterator[Units]:
    row, size = 0, file.seek(0, 2)
    file.seek(0)
    with _Damage(path, "Arrow stream or file") as damage:
        for number, batch in enumerate(_record_batches(path, file, key)):
            damage.part = f"after record batch {number}: "
            column = batch.column(batch.schema.get_field_index(key))
            for start in range(0, len(batch), BATCH_ROWS):
                piece = column.slice(start, BATCH_ROWS)
                units = _units(row, piece, key)
                row += len(piece)
                yield min(1.0, file.tell() / max(size, 1)), units


def _record_batches(path: Place, file: BinaryIO, key: str) -> Iterator[pa.RecordBatch]:
    if file.read(len(ARROW_MAGIC)) == ARROW_MAGIC:
        schema = pa.ipc.open_file(file).schema
        reader = pa.ipc.open_file(file, options=_only(path, schema, key))
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        return
    _check_end(path, file)
    schema = pa.ipc.open_stream(file).schema
    file.seek(0)
    yield from pa.ipc.open_stream(file, options=_only(path, schema, key))


def _check_end(path: Place, file: BinaryIO) -> None:
    """A stream that is cut between two messages reads like a whole one, were it not for the mark at its end."""
    size = file.seek(0, 2)
    file.seek(max(0, size - len(END_OF_STREAM)))
    end = file.read()
    file.seek(0)
    if end != END_OF_STREAM and size:
        raise RequestError(
            f"source file {path} is cut off, or no Arrow: its stream does not end\n"
            f"  {size:,} bytes are there; get it again"
        )


def _only(path: Place, schema: pa.Schema, key: str) -> pa.ipc.IpcReadOptions:
    _check_column(path, schema, key)
    return pa.ipc.IpcReadOptions(use_threads=False, included_fields=[schema.get_field_index(key)])


def _check_column(path: Place, schema: pa.Schema, key: str) -> None:
    """Refuse a file without this column, or with something other than text in it."""
    count = schema.names.count(key)
    if count != 1:
        shown = ", ".join(shortened(name, 100) for name in schema.names[:SHOWN_COLUMNS])
        more = ", …" if len(schema.names) > SHOWN_COLUMNS else ""
        problem = "no column" if not count else f"{count} columns"
        raise RequestError(f"source file {path} has {problem} {key!r}, the format.text_key; it has: {shown}{more}")
    type = schema.field(key).type
    if not _is_text(type):
        texts = [name for name in schema.names if _is_text(schema.field(schema.names.index(name)).type)]
        raise RequestError(
            f"source file {path}: column {key!r}, the format.text_key, holds {shortened(str(type), 100)} and no text\n"
            f"  columns of text: {', '.join(shortened(name, 100) for name in texts[:SHOWN_COLUMNS]) or 'none'}"
        )


def _is_text(type: pa.DataType) -> bool:
    if pa.types.is_dictionary(type):
        return _is_text(type.value_type)
    kinds = (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view())
    return type in (*kinds, pa.null())


def _units(row: int, column: pa.Array, key: str) -> list[bytes]:
    """Units of a piece of a column whose first row has this number."""
    if column.type in _AS_BYTES:  # what is no UTF-8 is a bad document, not a damaged file
        column = column.view(_AS_BYTES[column.type])
    column.validate(full=True)
    values = column.cast(pa.large_binary()).to_pylist()
    null = Rejection(0, "null", f"{key!r} is null")
    return [row_unit(number, null if value is None else value) for number, value in enumerate(values, row)]


# ---- JSON arrays -----------------------------------------------------------------------------------------------------


def array_units(path: Place, content: bytes, format: JsonArray) -> Iterator[bytes]:
    """The units of the elements of an array.

    Raises:
        RequestError: the file holds no JSON array.
    """
    if not content:
        return
    array = _parsed(path, content)
    if not isinstance(array, list):
        hint = "; for one object a line write format.type: jsonl" if isinstance(array, dict) else ""
        raise RequestError(f"source file {path} holds a {type(array).__name__} and no JSON array{hint}")
    for number, element in enumerate(array):
        yield row_unit(number, _element(element, format.text_key))


def _parsed(path: Place, content: bytes) -> object:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        pass  # NaN and half characters are accepted, and the rest gets a reason
    try:
        return json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        hint = "; for one object a line write format.type: jsonl" if "Extra data" in reason else ""
        raise RequestError(f"source file {path} is cut off, damaged or no JSON array: {reason}{hint}") from None


def _element(element: object, key: str | None) -> bytes | Rejection:
    if key is not None and not isinstance(element, dict):
        return Rejection(0, "not_an_object", f"a {type(element).__name__} instead of an object with the key {key!r}")
    if isinstance(element, dict) and key is not None:
        if key not in element:
            return missing_key(element, 0, key)
        element = element[key]
    text = checked_text(element, 0, key)
    return text.encode() if isinstance(text, str) else text
