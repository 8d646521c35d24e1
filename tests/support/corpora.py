"""Files of texts in every format that is read."""

from __future__ import annotations

import gzip
import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

BY_NAME = {
    "parquet": "parquet",
    "arrow": "arrow stream",
    "json": "json array",
    "jsonl": "jsonl",
    "jsonl.gz": "jsonl.gz",
    "jsonl.zst": "jsonl.zst",
}


def table(values: list[Any], type: pa.DataType | None = None) -> pa.Table:
    return pa.table({"other": pa.array(range(len(values))), "text": pa.array(values, type=type)})


def written(kind: str, values: list[Any], type: pa.DataType | None = None, rows: int = 300) -> bytes:
    """A file of this kind, or with this name, with a column `text`, in groups of so many rows."""
    output, kind = io.BytesIO(), BY_NAME.get(kind.partition(".")[2], kind)
    if kind.startswith("jsonl"):
        lines = b"".join(json.dumps({"text": value}).encode() + b"\n" for value in values)
        return {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstandard.compress}[kind](lines)
    if kind == "json array of texts":
        return json.dumps(values).encode()
    if kind == "json array":
        return json.dumps([{"other": 1, "text": value} for value in values]).encode()
    if kind == "parquet":
        pq.write_table(table(values, type), output, row_group_size=rows, write_page_checksum=True)
        return output.getvalue()
    make = pa.ipc.new_stream if kind == "arrow stream" else pa.ipc.new_file
    with make(output, table(values, type).schema) as writer:
        writer.write_table(table(values, type), max_chunksize=rows)
    return output.getvalue()
