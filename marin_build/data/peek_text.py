"""A look into raw text: some lines, rows or paragraphs of a file of an artifact, which is read no further than that."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from io import BufferedReader
from itertools import chain, islice
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

from marin_build.artifact.files import Files, LocalFiles
from marin_build.artifact.store import LOGS, Store
from marin_build.data.documents import lines, paragraphs
from marin_build.data.peek import finished
from marin_build.data.places import Place, open_place
from marin_build.data.reading import CHUNK_BYTES, GZIP, NO_TEXT, ZSTD, decompressed, read_chunks
from marin_build.data.rows import ARROW_MAGIC
from marin_build.errors import DamageError, RequestError
from marin_build.foreign import shortened
from marin_build.recipe.target import Target

JSON_LINES = (".jsonl", ".ndjson", ".json")
RECORDS = (*JSON_LINES, ".parquet", ".arrow")
MAX_UNIT_BYTES = 64 << 20
"""Of a line or paragraph: more is no text that a person looks at."""


@dataclass(frozen=True)
class Excerpt:
    """One line, row or paragraph."""

    file: str
    number: int
    """Counted from 0, in its file."""
    fields: Mapping[str, str]
    """The fields of a record, as text; a paragraph has one without a name."""


def excerpts(
    store: Store, target: Target, *, file: str | None, first: int, rows: int
) -> tuple[list[Excerpt], Mapping[str, Any]]:
    """`rows` excerpts from number `first` on of the first file that matches, and what the artifact holds.

    Raises:
        RequestError: not finished, no such file or excerpt, or no text in it.
        DamageError: the file is not as recorded.
    """
    record = finished(store, target)
    texts = [entry for entry in record.files if not entry["path"].startswith(f"{LOGS}/")]
    bytes_of = {entry["path"]: entry["bytes"] for entry in texts}
    name = _chosen(target, list(bytes_of), file)
    files = store.files(record)
    place = files.folder / name if isinstance(files, LocalFiles) else _Stored(files, name, bytes_of[name])
    try:
        found = islice(_fields(place), first, first + rows)
        read = [Excerpt(name, number, fields) for number, fields in enumerate(found, first)]
    except UnicodeDecodeError as error:
        raise RequestError(f"{target}: {name} holds bytes that are no UTF-8 text: {error.reason}") from None
    except (OSError, pyarrow.ArrowException) as error:
        raise DamageError(
            f"{target}: {name} cannot be read: {shortened(str(error), 300)}\n  marin-build verify --full {target}"
        ) from None
    if not read:
        raise RequestError(f"{target}: {name} has no row {first:,}")
    return read, {"files": len(bytes_of), "bytes": sum(bytes_of.values())}


def _chosen(target: Target, names: list[str], wanted: str | None) -> str:
    """The first file that matches, or without a wish the first of records, or else of text."""
    if wanted is not None:
        matching = [name for name in names if name == wanted or fnmatchcase(name, wanted)]
    else:
        matching = [name for name in names if _plain(name).endswith(RECORDS)]
        matching += [name for name in names if not name.lower().endswith(NO_TEXT)]
    if not matching:
        some = ", ".join(names[:8]) + (f" and {len(names) - 8:,} more" if len(names) > 8 else "")
        raise RequestError(f"{target} has no file {wanted or 'with text'!r}; it has: {some}")
    return matching[0]


@dataclass(frozen=True)
class _Stored:
    """A file of an artifact in a store, as a place to read from."""

    files: Files
    path: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.files.shown}/{self.path}"

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def open(self) -> BinaryIO:
        return BufferedReader(self.files.open(self.path), CHUNK_BYTES)


def _fields(place: Place) -> Iterator[Mapping[str, str]]:
    lower = place.name.lower()
    if lower.endswith(".parquet"):
        return _rows(_parquet_batches(place))
    if lower.endswith(".arrow"):
        return _rows(_arrow_batches(place))
    text = decompressed(place, read_chunks(place, 0, None, lambda _: None))
    if _plain(place.name).endswith(JSON_LINES):
        return _json(text)
    return ({"": _bounded(unit).decode().strip("\n")} for unit in paragraphs(lines(text)))


def _plain(name: str) -> str:
    """A name in small letters, without the ending of a compression."""
    lower = name.lower()
    return next((lower.removesuffix(ending) for ending in GZIP + ZSTD if lower.endswith(ending)), lower)


def _json(text: Iterator[bytes]) -> Iterator[Mapping[str, str]]:
    """JSON lines, or the elements of an array."""
    first = next(text, b"")
    if first.lstrip()[:1] == b"[":
        content = first
        for chunk in text:
            content = _bounded(content + chunk)
        with contextlib.suppress(ValueError, RecursionError):
            yield from map(_element, json.loads(content))
            return
        first = content
    for line in lines(chain([first], text)):
        if line.strip():
            yield _record(_bounded(line))


def _bounded(unit: bytes) -> bytes:
    if len(unit) > MAX_UNIT_BYTES:
        raise RequestError(f"a line or paragraph of {len(unit):,} bytes is too long to look at")
    return unit


def _record(line: bytes) -> Mapping[str, str]:
    """A line of JSON by its keys, or as it is where it holds no object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    return _element(value) if isinstance(value, dict) else {"": line.decode().rstrip("\n")}


def _element(value: Any) -> Mapping[str, str]:
    return {str(k): _spelled(v) for k, v in value.items()} if isinstance(value, dict) else {"": _spelled(value)}


def _rows(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[Mapping[str, str]]:
    for batch in batches:
        for number in range(len(batch)):
            columns = zip(batch.schema.names, batch.columns, strict=True)
            yield {name: _spelled(column[number].as_py()) for name, column in columns}


def _parquet_batches(place: Place) -> Iterator[pyarrow.RecordBatch]:
    with open_place(place) as file:
        yield from pyarrow.parquet.ParquetFile(file, pre_buffer=False).iter_batches(16, use_threads=False)


def _arrow_batches(place: Place) -> Iterator[pyarrow.RecordBatch]:
    with open_place(place) as file:
        if file.read(len(ARROW_MAGIC)) == ARROW_MAGIC:
            whole = pyarrow.ipc.open_file(file)
            yield from (whole.get_batch(number) for number in range(whole.num_record_batches))
            return
        file.seek(0)
        yield from pyarrow.ipc.open_stream(file)


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
