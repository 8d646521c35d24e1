"""Shards: documents as token ids in Arrow files that Hugging Face `datasets` opens, and a folder of them.

A shard is an Arrow IPC *stream* (the form that `Dataset.from_file` maps into memory), uncompressed, with one record
batch and one column `input_ids`; a row is a document with its special tokens. The flat ids are the list's values, and
the document starts are its offsets, so reading copies nothing. Where only some tokens are trained on, as in chat data,
a second column `loss_mask` of the same shape says which.

Shapes: N documents and T ids of a shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import numpy as np
import pyarrow
from pydantic import Field, StringConstraints, TypeAdapter
from typing_extensions import NotRequired, TypedDict  # noqa: UP035 (pydantic needs this one before Python 3.12)

from marin_build.artifact.bodies import Count, check
from marin_build.artifact.strict_json import parse_object
from marin_build.data.encoder import offsets_of
from marin_build.errors import DamageError, RequestError
from marin_build.foreign import shortened

LEDGER = "ledger.json"
FORMAT = 2
"""Version of the layout of a token set; part of every stamp."""
MAX_TOKENS = (1 << 31) - 1
"""Offsets are 32-bit: the form that `datasets` reads without copying."""
UINT16_IDS = 1 << 16
ID_TYPES = (pyarrow.uint16(), pyarrow.int32())
LOSS_MASK = "loss_mask"
MASK_TYPES = (pyarrow.uint8(),)

Lists = tuple[np.ndarray, np.ndarray]
"""Flat values [T] of N lists, and their offsets [N + 1]."""


def id_type(vocabulary_size: int) -> np.dtype:
    """uint16 where all ids fit, which halves disk and page cache; else int32, which torch and JAX take as it is."""
    return np.dtype(np.uint16 if vocabulary_size <= UINT16_IDS else np.int32)


def write_shard(path: str | Path, ids: np.ndarray, lengths: np.ndarray, loss_mask: np.ndarray | None = None) -> None:
    """Write ids [T] (uint16 or int32) of N documents with these lengths [N] as a shard; equal input, equal bytes.

    Args:
        loss_mask: [T] uint8, 1 where a token is trained on; None: the shard has no such column, and all are.

    Raises:
        ValueError: the lengths do not add up, or the ids or the mask have another type or shape.
        RequestError: more ids than a shard can hold.
    """
    with open(path, "wb") as file:
        write_stream(file, ids, lengths, loss_mask)


def write_stream(file: BinaryIO, ids: np.ndarray, lengths: np.ndarray, loss_mask: np.ndarray | None = None) -> None:
    """`write_shard` into an open file."""
    if ids.dtype not in (np.uint16, np.int32) or ids.shape != (int(lengths.sum()),):
        raise ValueError(f"ids {ids.dtype} {ids.shape} do not fit lengths that add up to {int(lengths.sum())}")
    if loss_mask is not None and (loss_mask.dtype != np.uint8 or loss_mask.shape != ids.shape):
        raise ValueError(f"loss mask {loss_mask.dtype} {loss_mask.shape} does not fit ids {ids.shape}")
    if len(ids) > MAX_TOKENS:
        raise RequestError(f"a shard would hold {len(ids):,} ids; at most {MAX_TOKENS:,} fit: lower shard_bytes")
    offsets = offsets_of(lengths).astype(np.int32)
    columns = {"input_ids": ids} if loss_mask is None else {"input_ids": ids, LOSS_MASK: loss_mask}
    lists = [pyarrow.ListArray.from_arrays(_as_arrow(offsets), _as_arrow(flat)) for flat in columns.values()]
    batch = pyarrow.record_batch(lists, names=list(columns))
    with pyarrow.ipc.new_stream(file, batch.schema) as stream:
        stream.write_batch(batch)


def _as_arrow(values: np.ndarray) -> pyarrow.Array:
    """The same memory; `pyarrow.array` would import pandas, which takes a second and 60 MB."""
    values = np.ascontiguousarray(values)
    return pyarrow.Array.from_buffers(
        pyarrow.from_numpy_dtype(values.dtype), len(values), [None, pyarrow.py_buffer(values)]
    )


def as_numpy(values: pyarrow.Array) -> np.ndarray:
    """The same memory, read-only; `to_numpy` would import pandas, too."""
    if values.null_count:
        raise pyarrow.ArrowInvalid(f"it holds {values.null_count:,} nulls")
    kind = np.dtype(values.type.to_pandas_dtype())
    if not len(values):
        return np.empty(0, kind)
    return np.frombuffer(values.buffers()[1], kind, len(values), values.offset * kind.itemsize)


@dataclass(frozen=True)
class Shard:
    """One shard, mapped into memory at first use; the arrays are read-only views of the file."""

    path: Path
    tokens: int
    documents: int

    @property
    def ids(self) -> np.ndarray:
        """[T] uint16 or int32: the ids of all documents, one after the other."""
        return self._arrays[0]

    @property
    def offsets(self) -> np.ndarray:
        """[N + 1] int32: document n is ids[offsets[n]:offsets[n + 1]]."""
        return self._arrays[1]

    @property
    def loss_mask(self) -> np.ndarray | None:
        """[T] uint8: not 0 where the token is trained on; None: the shard does not say, and all are."""
        return self._arrays[2]

    @cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        try:
            with pyarrow.memory_map(str(self.path)) as file:  # the mapping outlives the file, the descriptor does not
                batch = pyarrow.ipc.open_stream(file).read_next_batch()
            batch.validate()  # that the buffers are as long as they have to be, without a look at what is in them
            ids, offsets = self._column(batch, "input_ids", ID_TYPES)
            mask = self._mask(batch, offsets) if LOSS_MASK in batch.schema.names else None
        except (OSError, pyarrow.ArrowException, KeyError, StopIteration) as error:
            raise DamageError(f"shard {self.path} cannot be read: {shortened(str(error), 300)}") from error
        if (len(ids), len(offsets) - 1) != (self.tokens, self.documents):
            raise DamageError(
                f"shard {self.path} holds {len(ids):,} ids in {len(offsets) - 1:,} documents, "
                f"its ledger says {self.tokens:,} in {self.documents:,}"
            )
        if offsets[0] != 0 or offsets[-1] != len(ids):
            raise DamageError(f"shard {self.path}: its documents do not begin at 0 and end at its {len(ids):,} ids")
        if mask is not None and len(mask) != len(ids):
            raise DamageError(f"shard {self.path} holds {len(ids):,} ids, and a loss mask for {len(mask):,}")
        return ids, offsets, mask

    def _column(self, batch: pyarrow.RecordBatch, name: str, types: Sequence[pyarrow.DataType]) -> Lists:
        """The flat values of a column of lists, and its offsets."""
        column = batch.column(name)
        if not pyarrow.types.is_list(column.type) or column.type.value_type not in types or column.null_count:
            raise DamageError(f"shard {self.path} holds {shortened(str(column.type), 80)} and not lists of {name}")
        return as_numpy(column.values), as_numpy(column.offsets)

    def _mask(self, batch: pyarrow.RecordBatch, offsets: np.ndarray) -> np.ndarray:
        mask, mask_offsets = self._column(batch, LOSS_MASK, MASK_TYPES)
        if not np.array_equal(offsets, mask_offsets):
            raise DamageError(f"shard {self.path}: its documents and its loss mask begin at different places")
        return mask


@dataclass(frozen=True)
class TokenizedSet:
    """A finished folder of shards, in the order of its ledger."""

    folder: Path
    shards: list[Shard]
    ledger: Mapping[str, Any]

    @classmethod
    def open(cls, folder: str | Path) -> TokenizedSet:
        """Open a folder after comparing the size of every shard with the ledger.

        Raises:
            DamageError: no ledger, or a shard that is missing or has another size.
            RequestError: a layout of a newer version.
        """
        folder = Path(folder)
        ledger = read_ledger(folder)
        for shard in ledger["shards"]:
            check_size(folder / shard["file"], shard["bytes"])
        shards = [Shard(folder / shard["file"], shard["tokens"], shard["documents"]) for shard in ledger["shards"]]
        return cls(folder, shards, ledger)

    @property
    def tokens(self) -> int:
        return self.ledger["totals"]["tokens"]

    @property
    def documents(self) -> int:
        return self.ledger["totals"]["documents"]

    @property
    def has_loss_mask(self) -> bool:
        """Whether only some of its tokens are trained on."""
        return any(shard.loss_mask is not None for shard in self.shards)

    @property
    def vocab_size(self) -> int:
        """Ids of the tokenizer: every id is below."""
        return self.ledger["tokenizer"]["vocabulary_size"]


ShardName = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z][0-9A-Za-z._\-]*\.arrow$", max_length=250)]


class _Shard(TypedDict):
    file: ShardName
    documents: Count
    tokens: Count
    bytes: Count


class LedgerTotals(TypedDict):
    documents: Count
    tokens: Count
    trained_tokens: NotRequired[Count]


class LedgerTokenizer(TypedDict):
    vocabulary_size: Annotated[int, Field(ge=1, lt=1 << 31)]


class _Ledger(TypedDict):
    format: int
    shards: list[_Shard]
    totals: LedgerTotals
    tokenizer: LedgerTokenizer


_ledger_form = TypeAdapter(_Ledger)


def read_ledger(folder: Path) -> dict[str, Any]:
    path = folder / LEDGER
    try:
        ledger = parse_object(path.read_bytes())
        if isinstance(form := ledger.get("format"), int) and FORMAT < form < 1 << 31:
            raise RequestError(f"{path} has format {form}, this marin_build reads up to {FORMAT}: install a newer one")
        check(_ledger_form, ledger)
    except OSError as error:
        raise DamageError(
            f"{path} cannot be read: {error.strerror}; the token set is not finished or damaged"
        ) from None
    except ValueError as error:
        raise DamageError(f"{path} is damaged: {error}") from None
    return ledger


def check_size(path: Path, expected_bytes: int) -> None:
    seen = path.stat().st_size if path.is_file() else None
    if seen != expected_bytes:
        what = "is missing" if seen is None else f"has {seen:,} bytes instead of {expected_bytes:,}"
        raise DamageError(f"shard {path} {what}")
