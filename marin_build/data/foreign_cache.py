"""Token caches that others made, adopted where they lie: Arrow files of many record batches with a column `input_ids`.

Each record batch is read as a shard. A file is mapped into memory once, for all of its batches, and its ids stay in the
width that they have. Such a folder has no ledger: what adoption found lies in the record, batch by batch, so that a
set opens without a look at its files.

Shapes: N documents and T ids of a record batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from marin_build.artifact.bodies import Count, FileName, check
from marin_build.data.rows import ARROW_MAGIC, END_OF_STREAM
from marin_build.data.shards import (
    LEDGER,
    LedgerTokenizer,
    LedgerTotals,
    Lists,
    Shard,
    TokenizedSet,
    as_numpy,
    check_size,
)
from marin_build.errors import DamageError
from marin_build.foreign import shortened

INPUT_IDS, ATTENTION_MASK = "input_ids", "attention_mask"
START_OF_FILE = 8
"""Bytes of an Arrow file before its stream: the magic, padded."""


@dataclass(frozen=True)
class CacheFile:
    """An Arrow stream or file, mapped into memory at first use."""

    path: Path

    @property
    def batches(self) -> list[pyarrow.RecordBatch]:
        """Its record batches: of their columns the ids, and an attention mask where there is one.

        Raises:
            DamageError: it is cut off, damaged, no Arrow, or has no column of ids.
        """
        return self._opened[1]

    @cached_property
    def other_columns(self) -> list[str]:
        schema = self._schema(self._opened[0])
        return [name for name in schema.names if name != INPUT_IDS]

    @cached_property
    def _opened(self) -> tuple[pyarrow.Buffer, list[pyarrow.RecordBatch]]:
        try:
            with pyarrow.memory_map(str(self.path)) as file:  # the mapping outlives the file, the descriptor does not
                whole = file.read_buffer()
            return whole, self._read(whole)
        except (OSError, pyarrow.ArrowException, KeyError) as error:
            raise self.problem(f"cannot be read: {shortened(str(error), 300)}") from error

    def _schema(self, whole: pyarrow.Buffer) -> pyarrow.Schema:
        return (pyarrow.ipc.open_file if _is_file(whole) else pyarrow.ipc.open_stream)(whole).schema

    def _read(self, whole: pyarrow.Buffer) -> list[pyarrow.RecordBatch]:
        names = self._schema(whole).names
        if names.count(INPUT_IDS) != 1:
            raise self.problem(f"has no column {INPUT_IDS}, or several: {shortened(', '.join(names), 200)}")
        fields = [number for number, name in enumerate(names) if name in (INPUT_IDS, ATTENTION_MASK)]
        options = pyarrow.ipc.IpcReadOptions(use_threads=False, included_fields=fields)
        if _is_file(whole):  # it holds a stream; read as a file, a choice of columns would be copied
            batches = list(pyarrow.ipc.open_stream(whole[START_OF_FILE:], options=options))
            if len(batches) != pyarrow.ipc.open_file(whole).num_record_batches:
                raise self.problem("is damaged: it holds another number of record batches than its end says")
            return batches
        if whole[-len(END_OF_STREAM) :].to_pybytes() != END_OF_STREAM:
            raise self.problem("is cut off: its stream does not end")
        return list(pyarrow.ipc.open_stream(whole, options=options))

    def lists(self, number: int, name: str = INPUT_IDS) -> Lists:
        """Flat values [T] of a record batch and its offsets [N + 1], without a copy.

        Raises:
            DamageError: no lists of integers, nulls, or compressed, so that they would have to be copied.
        """
        column = self.batches[number].column(name)
        try:
            values, offsets = self._flat(column)
        except pyarrow.ArrowException as error:
            raise self.problem(f"record batch {number}, {name}: {shortened(str(error), 300)}") from None
        if len(values) and not self._is_mapped(values.ctypes.data):
            raise self.problem("is compressed, so it cannot be read where it lies; write it without compression")
        if len(offsets) == 0 or (offsets[0], offsets[-1]) == (0, len(values)):
            return values, offsets if len(offsets) else np.zeros(1, np.int32)
        return values[offsets[0] : offsets[-1]], offsets - offsets[0]

    def _flat(self, column: pyarrow.Array) -> Lists:
        column.validate()  # that the buffers are as long as they have to be, without a look at what is in them
        kind, is_fixed = column.type, pyarrow.types.is_fixed_size_list(column.type)
        is_list = is_fixed or pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)
        if not is_list or not pyarrow.types.is_integer(kind.value_type):
            raise pyarrow.ArrowInvalid(f"it holds {shortened(str(kind), 80)} and not lists of integers")
        if column.null_count:
            raise pyarrow.ArrowInvalid(f"{column.null_count:,} of its rows are null")
        if is_fixed:
            return as_numpy(column.values), np.arange(len(column) + 1, dtype=np.int64) * kind.list_size
        return as_numpy(column.values), as_numpy(column.offsets)

    def _is_mapped(self, address: int) -> bool:
        whole = self._opened[0]
        return whole.address <= address < whole.address + whole.size

    def problem(self, text: str) -> DamageError:
        return DamageError(f"shard {self.path} {text}")


def _is_file(whole: pyarrow.Buffer) -> bool:
    """Whether it is an Arrow file; else it can be a stream."""
    return whole[: len(ARROW_MAGIC)].to_pybytes() == ARROW_MAGIC


@dataclass(frozen=True)
class CacheShard(Shard):
    """One record batch of a file of others; all of its tokens are trained on."""

    file: CacheFile
    batch: int

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray, None]:
        if self.batch >= len(self.file.batches):
            raise self.file.problem(f"has no record batch {self.batch}")
        ids, offsets = self.file.lists(self.batch)
        if (len(ids), len(offsets) - 1) != (self.tokens, self.documents):
            raise self.file.problem(
                f"holds {len(ids):,} ids in {len(offsets) - 1:,} documents in record batch {self.batch}, "
                f"its record says {self.tokens:,} in {self.documents:,}"
            )
        return ids, offsets, None


def shard_of(path: Path, entry: Mapping[str, Any], files: dict[Path, CacheFile]) -> Shard:
    """The shard of an entry of a ledger; `files` keeps those that hold several."""
    if "batch" not in entry:
        return Shard(path, entry["tokens"], entry["documents"])
    file = files.setdefault(path, CacheFile(path))
    return CacheShard(path, entry["tokens"], entry["documents"], file, entry["batch"])


def open_set(folder: Path, record: Mapping[str, Any]) -> TokenizedSet:
    """The token set that `record` is of, as `TokenizedSet.open` does it, whoever made it.

    Raises:
        DamageError: no ledger, or a shard that is missing or has another size.
        RequestError: a layout of a newer version.
    """
    ledger, files = recorded_ledger(record), dict[Path, CacheFile]()
    if ledger is None:
        return TokenizedSet.open(folder)
    for name, size in {entry["file"]: entry["bytes"] for entry in ledger["shards"]}.items():
        check_size(folder / name, size)
    return TokenizedSet(folder, [shard_of(folder / entry["file"], entry, files) for entry in ledger["shards"]], ledger)


# ---- what the record says --------------------------------------------------------------------------------------------


class _File(TypedDict):
    file: FileName
    bytes: Count
    documents: list[Count]
    tokens: list[Count]


class _Recorded(TypedDict):
    shards: list[_File]
    totals: LedgerTotals
    tokenizer: LedgerTokenizer


_recorded_form = TypeAdapter(_Recorded)


def recorded_ledger(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The ledger of a cache of others, with an entry for each record batch; None for a set with a ledger of its own.

    Raises:
        DamageError: it says what no ledger can say.
    """
    found = (record.get("provenance") or {}).get("adopted", {}).get("ledger")
    names = {entry["path"] for entry in record.get("files", ())}
    if found is None or LEDGER in names:
        return None
    try:
        check(_recorded_form, found)
        return {**found, "shards": list(chain.from_iterable(_batches(entry, names) for entry in found["shards"]))}
    except ValueError as error:
        raise DamageError(f"{record['name']}/{record['version']} is damaged: its record: ledger {error}") from None


def _batches(entry: Mapping[str, Any], names: set[str]) -> list[dict[str, Any]]:
    if entry["file"] not in names:
        raise ValueError(f"names {entry['file']!a}, which is no file of it")
    counts = zip(entry["documents"], entry["tokens"], strict=True)
    return [
        {"file": entry["file"], "bytes": entry["bytes"], "batch": batch, "documents": documents, "tokens": tokens}
        for batch, (documents, tokens) in enumerate(counts)
    ]
