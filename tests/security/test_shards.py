"""Shards, sidecars and ledgers from somewhere else: read, made again or damaged in one line; never a way out.

Documents are text: what they spell is never a special token.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest

from marin_build.artifact.digest import hash_bytes
from marin_build.data.documents import read_document
from marin_build.data.durable import json_bytes
from marin_build.data.globs import Glob
from marin_build.data.ledger import Policy, read_sidecar, stamp, write_sidecar
from marin_build.data.shards import Shard, TokenizedSet, read_ledger, write_shard
from marin_build.data.sources import SourceFile
from marin_build.errors import DamageError, RequestError
from marin_build.recipe.sources import JsonLines

POLICY = Policy("0" * 32, 300, None, 256, JsonLines(type="jsonl", text_key="text"), 1000)
FILE = SourceFile("a.jsonl", Path("a.jsonl"), 10, "1" * 32)
LEDGER = {
    "format": 1,
    "shards": [{"file": "a-00000.arrow", "documents": 1, "tokens": 3, "bytes": 1}],
    "totals": {"documents": 1, "tokens": 3},
    "tokenizer": {"vocabulary_size": 257},
}


class Bomb:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (self.command,)


@pytest.mark.parametrize("name", ["arrow.py_extension_type", "pandas", "datasets.features.features.Array2D"])
def test_metadata_of_a_schema_is_not_unpickled(tmp_path: Path, name: str):
    bomb = pickle.dumps(Bomb(f"touch {tmp_path}/ran"))
    metadata = {"ARROW:extension:name": name, "ARROW:extension:metadata": bomb, "pandas": bomb, "huggingface": bomb}
    field = pyarrow.field("input_ids", pyarrow.list_(pyarrow.uint16()), metadata=metadata)
    batch = pyarrow.record_batch([pyarrow.array([[1, 2, 3]], field.type)], pyarrow.schema([field], metadata=metadata))
    with pyarrow.ipc.new_stream(str(tmp_path / "x.arrow"), batch.schema) as stream:
        stream.write_batch(batch)
    assert Shard(tmp_path / "x.arrow", 3, 1).ids.tolist() == [1, 2, 3]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array(["abc"]),
        pyarrow.array([[1.5]]),
        pyarrow.array([[1, 2, 3]], pyarrow.list_(pyarrow.int64())),
        pyarrow.array([[1], None], pyarrow.list_(pyarrow.uint16())),
        pyarrow.array([[[1]]]),
        pyarrow.array([{"a": 1}]),
        pyarrow.array([1, 2, 3]),
        pyarrow.array([[1, 2, 3], [4]], pyarrow.list_(pyarrow.uint16())).slice(1),
    ],
    ids=lambda column: str(column.type),
)
def test_a_shard_of_other_columns_is_damaged(tmp_path: Path, column: pyarrow.Array):
    with pyarrow.ipc.new_stream(str(tmp_path / "x.arrow"), pyarrow.schema([("input_ids", column.type)])) as stream:
        stream.write_batch(pyarrow.record_batch([column], names=["input_ids"]))
    with pytest.raises(DamageError, match=r"shard .*x\.arrow"):
        _ = Shard(tmp_path / "x.arrow", 3, 1).ids


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pyarrow.array([[1, 0], [1]], pyarrow.list_(pyarrow.uint8())), "begin at different places"),
        (pyarrow.array([[1], [0, 1, 1]], pyarrow.list_(pyarrow.uint8())), "begin at different places"),
        (pyarrow.array([[True], [False, True]]), "and not lists of loss_mask"),
        (pyarrow.array([[1], None], pyarrow.list_(pyarrow.uint8())), "and not lists of loss_mask"),
        (pyarrow.array(["a", "b"]), "and not lists of loss_mask"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_loss_mask_of_another_shape_is_damage(tmp_path: Path, column: pyarrow.Array, message: str):
    ids = pyarrow.array([[1], [2, 3]], pyarrow.list_(pyarrow.uint16()))
    batch = pyarrow.record_batch([ids, column], names=["input_ids", "loss_mask"])
    with pyarrow.ipc.new_stream(str(tmp_path / "x.arrow"), batch.schema) as stream:
        stream.write_batch(batch)
    with pytest.raises(DamageError, match=message):
        _ = Shard(tmp_path / "x.arrow", 3, 2).loss_mask


def test_every_flipped_byte_and_every_cut_of_a_shard_is_harmless_or_damage(tmp_path: Path):
    path = tmp_path / "x.arrow"
    write_shard(path, np.arange(6, dtype=np.uint16), np.array([2, 4]))
    data = path.read_bytes()
    hurt = [data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :] for at in range(len(data))]
    for content in [*hurt, *(data[:length] for length in range(0, len(data), 7))]:
        path.write_bytes(content)
        shard = Shard(path, 6, 2)
        with contextlib.suppress(DamageError):
            assert len(shard.ids) == 6
            assert (shard.offsets[0], shard.offsets[-1]) == (0, 6)


# ---- ledgers and sidecars --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"format": "1"},
        {"shards": "x"},
        {"shards": [{**LEDGER["shards"][0], "file": "/etc/passwd"}]},
        {"shards": [{**LEDGER["shards"][0], "file": "../x.arrow"}]},
        {"shards": [{**LEDGER["shards"][0], "file": "a/../../x.arrow"}]},
        {"shards": [{**LEDGER["shards"][0], "file": "x.arrow\n"}]},
        {"shards": [{**LEDGER["shards"][0], "tokens": -1}]},
        {"shards": [{**LEDGER["shards"][0], "bytes": 1.0}]},
        {"totals": {}},
        {"tokenizer": {"vocabulary_size": 0}},
        {"tokenizer": None},
    ],
    ids=ascii,
)
def test_a_ledger_that_no_builder_writes_is_damaged(tmp_path: Path, change: dict[str, Any]):
    (tmp_path / "ledger.json").write_text(json.dumps({**LEDGER, **change}))
    with pytest.raises(DamageError, match=r"ledger\.json is damaged: ") as error:
        TokenizedSet.open(tmp_path)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("data", [b"[" * 100_000, b"[]", b'{"format": 1, "format": 1}', b'{"format": NaN}', b""])
def test_what_is_no_ledger_is_damaged(tmp_path: Path, data: bytes):
    (tmp_path / "ledger.json").write_bytes(data)
    with pytest.raises(DamageError, match=r"ledger\.json is damaged"):
        read_ledger(tmp_path)


def sidecar(folder: Path) -> dict[str, Any]:
    write_shard(folder / "a.jsonl-00000.arrow", np.arange(3, dtype=np.uint16), np.array([3]))
    data = (folder / "a.jsonl-00000.arrow").read_bytes()
    return {
        **{"stamp": stamp(POLICY, FILE, 0), "file": "a.jsonl-00000.arrow", "number": 0, "last": True, "documents": 1},
        **{"tokens": 3, "max_id": 2, "text_bytes": 3, "bytes": len(data), "xxh3_128": hash_bytes(data)},
        "source": {"file": "a.jsonl", "start": 0, "end": 10, "xxh3_128": "0" * 32},
        **{"skipped": {}, "rejections": [], "content": {"documents": 1, "value": "0" * 32}},
    }


@pytest.mark.parametrize(
    "change",
    [
        {"file": "../outside.arrow"},
        {"file": "/etc/passwd"},
        {"tokens": "3"},
        {"tokens": -1},
        {"documents": None},
        {"skipped": []},
        {"skipped": {"x": "1"}},
        {"rejections": [{"byte": "x"}]},
        {"rejections": [{"row": -1, "reason": "null", "detail": ""}]},
        {"content": {"documents": 1, "value": "0"}},
        {"source": []},
        {"source": {"file": "/etc/passwd", "start": 0, "end": 10, "xxh3_128": "0" * 32}},
        {"number": 1},
        {"last": 1},
        {"max_id": 1 << 40},
        {"stamp": "0" * 32},
    ],
    ids=ascii,
)
def test_a_forged_sidecar_with_a_correct_checksum_is_none(tmp_path: Path, change: dict[str, Any]):
    honest = sidecar(tmp_path)
    write_sidecar(tmp_path, honest)
    assert read_sidecar(tmp_path, POLICY, FILE, 0) == honest
    forged = {**honest, **change}
    body = {**forged, "checksum": hash_bytes(json_bytes(forged))}
    (tmp_path / "a.jsonl-00000.json").write_bytes(json_bytes(body))
    assert read_sidecar(tmp_path, POLICY, FILE, 0) is None


@pytest.mark.parametrize("data", [b"[" * 100_000, b"[]", b'{"checksum": NaN}', b'{"a": "\\ud800"}', b"\xff"])
def test_what_is_no_sidecar_is_none(tmp_path: Path, data: bytes):
    sidecar(tmp_path)
    (tmp_path / "a.jsonl-00000.json").write_bytes(data)
    assert read_sidecar(tmp_path, POLICY, FILE, 0) is None


# ---- documents and globs ---------------------------------------------------------------------------------------------


def test_documents_of_any_nesting_are_text_or_rejected_in_one_line():
    for unit in (
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"text": ' + b"9" * 5000 + b"}",
        b'{"text": "\\ud800"}',
        b'{"\x1b": 1}',
    ):
        rejection = read_document(unit, 0, POLICY.format)
        assert rejection is not None
        assert not isinstance(rejection, str)
        assert rejection.detail.isprintable()
        assert len(rejection.detail) < 500


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "pattern", ["**/" * 300 + "x", "*a" * 200 + "b", "?" * 900, "[a-z]*" * 100 + "0", "**/*a*/" * 80 + "x"]
)
def test_no_glob_takes_for_ever(pattern: str):
    glob = Glob(pattern)
    assert not glob.matches("/".join(["aaaaaaaaaa"] * 80))
    assert not glob.matches("a" * 250)


def test_a_glob_means_what_it_meant():
    for pattern, name, matches in [
        ("**/*.txt", "a/b/c.txt", True),
        ("**/*.txt", "c.txt", True),
        ("**/**/*.txt", "a/c.txt", True),
        ("*.txt", "a/c.txt", False),
        ("a*b*c", "aXbYc", True),
        ("a*b*c", "abbcbc", True),
        ("a*b", "abab", True),
        ("a*b", "ab/b", False),
        ("*", "x", True),
        ("a**b", "aXb", True),
        ("x/**", "x/a/b", True),
    ]:
        assert Glob(pattern).matches(name) == matches, (pattern, name)


def test_a_set_that_runs_backwards_is_refused():
    with pytest.raises(RequestError, match="means nothing"):
        Glob("[z-a]")
