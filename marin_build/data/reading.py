"""The bytes of source files on their way to the units: read, proven, decompressed, and rows turned into units.

A stream that breaks (cut, wrong checksum, no footer) always stops the build: what is missing cannot be counted.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator

import zstandard

from marin_build.data.places import Place, open_place, size_of, unreadable
from marin_build.data.rows import array_units, row_units
from marin_build.data.sources import SourceFile
from marin_build.errors import RequestError
from marin_build.recipe.sources import Arrow, DocumentFormat, JsonArray, Parquet

CHUNK_BYTES = 1 << 20
ZSTD_FEED_BYTES = 16 << 10
"""Compressed bytes given to zstandard at once: it returns all that they hold, up to 32,768 times as much."""
ZSTD_MAX_WINDOW_BYTES = 1 << 31
GZIP, ZSTD = (".gz",), (".zst", ".zstd")
NO_TEXT = (".bz2", ".xz", ".lz4", ".br", ".zip", ".tar", ".tgz", ".7z", ".npy", ".pdf")
ENDINGS = {".parquet": "parquet", ".arrow": "arrow"}
"""Endings of files of rows, and the format that reads them."""


class Reading:
    """One pass over a source file, which hashes and counts its bytes on the way and proves them at the end."""

    def __init__(self, file: SourceFile) -> None:
        self._file, self._digest, self._bytes = file, file.hasher(), 0
        self._raw = read_chunks(file.path, 0, None, self._seen)

    def text(self, format: DocumentFormat) -> Iterator[bytes]:
        """The text's bytes, decompressed; for files of rows a unit at a time (`documents.row_unit`).

        Raises:
            RequestError: the file is cut off, damaged, or not what it claims to be.
            MarinError: it cannot be read, or has other bytes than it should.
        """
        if isinstance(format, Parquet | Arrow):
            return self._rows(format)
        text = decompressed(self._file.path, self._raw)
        return self._array(text, format) if isinstance(format, JsonArray) else text

    def _rows(self, format: Parquet | Arrow) -> Iterator[bytes]:
        """Rows are read out of order, the footer first; so the bytes are proven before, in a pass of their own."""
        for chunk in self._raw:
            self._bytes -= len(chunk)  # counted with the rows
        self.check()
        counted = 0
        for share, units in row_units(self._file.path, format):
            yield from units
            self._bytes += int(share * self._file.bytes) - counted
            counted = int(share * self._file.bytes)

    def _array(self, text: Iterator[bytes], format: JsonArray) -> Iterator[bytes]:
        content = b"".join(text)
        self.check()
        yield from array_units(self._file.path, content, format)

    def _seen(self, chunk: bytes) -> None:
        self._digest.update(chunk)
        self._bytes += len(chunk)

    def news(self) -> int:
        """Bytes since the last call."""
        count, self._bytes = self._bytes, 0
        return count

    def check(self) -> None:
        """Read what nobody has asked for, and raise the error for other bytes than the expected ones."""
        for _ in self._raw:
            pass
        if self._digest.hexdigest() != self._file.digest:
            raise self._file.changed(self._digest.hexdigest())


def is_compressed(name: str) -> bool:
    return name.lower().endswith(GZIP + ZSTD)


def check_format(name: str, format: DocumentFormat) -> None:
    """Refuse a file whose ending says that it is of another format.

    Raises:
        RequestError: with the format that would read it, where one does.
    """
    lower = name.lower()
    if lower.endswith(NO_TEXT):
        raise RequestError(
            f"source file {name} is neither plain text, .gz nor .zst, Parquet nor Arrow; convert it, or narrow the glob"
        )
    fits = next((type for ending, type in ENDINGS.items() if lower.endswith(ending)), None)
    if fits and format.type != fits:
        raise RequestError(f"source file {name} is no {format.type}: write format.type: {fits}, or narrow the glob")
    if isinstance(format, Parquet | Arrow) and is_compressed(name):
        raise RequestError(f"source file {name}: {format.type} is compressed inside; decompress it, or narrow the glob")


def read_chunks(path: Place, start: int, end: int | None, tap: Callable[[bytes], None]) -> Iterator[bytes]:
    """The bytes [start, end) of a file as it lies on the disk, each chunk shown to `tap` first."""
    at = start
    try:
        with open_place(path) as file:
            file.seek(start)
            while chunk := file.read(CHUNK_BYTES if end is None else min(CHUNK_BYTES, end - at)):
                at += len(chunk)
                tap(chunk)
                yield chunk
    except OSError as error:
        raise unreadable(error, path, at) from error


def decompressed(path: Place, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The text's bytes, by the ending of the file's name.

    Raises:
        RequestError: the compressed stream is cut off, or not what it claims to be.
    """
    name = path.name.lower()
    if name.endswith(GZIP):
        return _gunzip(path, chunks)
    return _unzstd(path, chunks) if name.endswith(ZSTD) else iter(chunks)


def _gunzip(path: Place, chunks: Iterable[bytes]) -> Iterator[bytes]:
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


def _unzstd(path: Place, chunks: Iterable[bytes]) -> Iterator[bytes]:
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


def _cut_off(path: Place, format: str) -> RequestError:
    return RequestError(
        f"source file {path} is cut off: its {format} stream does not end\n"
        f"  {size_of(path):,} bytes are there; get it again"
    )
