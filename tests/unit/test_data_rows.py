"""Parquet, Arrow and JSON arrays, row by row: what is read, what stops a build, and how memory stays flat."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import subprocess
import sys
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import zstandard
from builders import texts_of, tokenized
from corpora import table, written

from marin_build.data.documents import read_document, units
from marin_build.data.reading import Reading
from marin_build.data.sources import SourceFile, hash_source
from marin_build.errors import DamageError, MarinError, RequestError
from marin_build.recipe.sources import Arrow, JsonArray, JsonLines, Parquet

TEXTS = [f"good {number}" for number in range(1000)]
FORMATS = {
    "parquet": Parquet(type="parquet", text_key="text"),
    "arrow stream": Arrow(type="arrow", text_key="text"),
    "arrow file": Arrow(type="arrow", text_key="text"),
    "json array": JsonArray(type="json_array", text_key="text"),
    "json array of texts": JsonArray(type="json_array", text_key=None),
}
NAMES = {"parquet": "c.parquet", "arrow stream": "c.arrow", "arrow file": "d.arrow"}


def made(workbench, kind: str, data: bytes, **fields):
    return tokenized(workbench, data, NAMES.get(kind, "c.json"), format=FORMATS[kind], **fields)


# ---- what is read ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
def test_every_row_is_a_document_in_order(workbench, kind):
    token_set = made(workbench, kind, written(kind, TEXTS))
    assert texts_of(token_set) == TEXTS
    assert token_set.ledger["skipped"] == {}


@pytest.mark.parametrize("kind", FORMATS)
def test_all_formats_give_the_ids_of_json_lines_however_they_are_cut(workbench, kind):
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)
    plain = tokenized(workbench, lines, "c.jsonl", folder="plain", format=JsonLines(type="jsonl", text_key="text"))
    rows = made(workbench, kind, written(kind, TEXTS), shard_bytes=5000)
    assert len(rows.shards) > 2
    assert rows.ledger["content_digest"] == plain.ledger["content_digest"]


@pytest.mark.parametrize(
    "type", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int16(), pa.string())], ids=str
)
@pytest.mark.parametrize("kind", ["parquet", "arrow stream", "arrow file"])
def test_every_type_of_text_column_is_read(workbench, kind, type):
    values = ["á", "b" * 1000, "c"]
    assert texts_of(made(workbench, kind, written(kind, values, type))) == values


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_json_arrays_may_be_compressed(workbench, suffix):
    data = written("json array", TEXTS)
    data = gzip.compress(data) if suffix == "gz" else zstandard.compress(data)
    token_set = tokenized(workbench, data, f"c.json.{suffix}", format=FORMATS["json array"])
    assert texts_of(token_set) == TEXTS


def test_a_byte_order_mark_and_nan_elsewhere_in_an_array_are_fine(workbench):
    data = b"\xef\xbb\xbf" + b'[{"text": "a", "score": NaN},\n {"text": "b"}]\n'
    assert texts_of(made(workbench, "json array", data)) == ["a", "b"]


def test_what_datasets_writes_is_read(workbench, tmp_path):
    import datasets

    whole = datasets.Dataset.from_dict({"text": TEXTS})
    whole.save_to_disk(tmp_path / "saved")
    whole.to_parquet(tmp_path / "c.parquet")
    saved = next((tmp_path / "saved").glob("*.arrow")).read_bytes()
    assert texts_of(made(workbench, "arrow stream", saved)) == TEXTS
    assert texts_of(made(workbench, "parquet", (tmp_path / "c.parquet").read_bytes())) == TEXTS


def test_feather_is_an_arrow_file(workbench, tmp_path):
    pyarrow.feather.write_feather(table(TEXTS), str(tmp_path / "x"), compression="lz4")
    assert texts_of(made(workbench, "arrow file", (tmp_path / "x").read_bytes())) == TEXTS


# ---- bad rows --------------------------------------------------------------------------------------------------------


def with_row(kind: str, case: Any) -> bytes:
    """Ten good rows, one that is given, ten more."""
    values = [*TEXTS[:10], case, *TEXTS[10:20]]
    if isinstance(case, bytes):
        values = [value.encode() if isinstance(value, str) else value for value in values]
    return written(kind, values, pa.binary() if isinstance(case, bytes) else None, rows=4)


INVALID = [(kind, b"caf\xe9!", "invalid_utf8: invalid continuation byte, 0xe9 at byte 3") for kind in NAMES]
BAD = [
    *INVALID,
    ("json array of texts", 5, "not_text: the text is a int: 5"),
    ("json array of texts", ["a"], "not_text: the text is a list"),
    ("json array of texts", "a\ud800b", "lone_surrogate: the text holds '\\ud800'"),
    ("json array", 5, "not_text: 'text' is a int: 5"),
    ("json array", "a\ud800b", "lone_surrogate"),
]


@pytest.mark.parametrize(("kind", "value", "reason"), BAD, ids=str)
@pytest.mark.row(25)
def test_a_bad_row_stops_the_build_and_is_named_by_its_number(workbench, kind, value, reason):
    data = with_row(kind, value)
    with pytest.raises(RequestError) as error:
        made(workbench, kind, data)
    first = str(error.value).splitlines()[0]
    assert f"{NAMES.get(kind, 'c.json')}, row 10: {reason}" in first
    assert first.startswith("tokenized/bench/dev: 1 unusable documents, max_bad_documents allows 0")


@pytest.mark.parametrize(("kind", "value", "reason"), BAD, ids=str)
@pytest.mark.row(25)
def test_a_bad_row_within_the_limit_is_skipped_counted_and_listed(workbench, kind, value, reason):
    token_set = made(workbench, kind, with_row(kind, value), max_bad_documents=1)
    assert texts_of(token_set) == TEXTS[:20]
    word = reason.partition(":")[0]
    assert token_set.ledger["skipped"] == {word: 1}
    [listed] = token_set.ledger["rejections"]
    assert listed.keys() == {"file", "row", "reason", "detail"}
    assert (listed["row"], listed["reason"]) == (10, word)


@pytest.mark.parametrize(
    ("element", "reason"), [({"other": "a"}, "missing_key"), ("a", "not_an_object"), ([1], "not_an_object")]
)
def test_an_element_of_an_array_that_is_no_object_with_the_key_is_bad(workbench, element, reason):
    data = json.dumps([{"text": "a"}, element, {"text": "b"}]).encode()
    with pytest.raises(RequestError, match=rf"c.json, row 1: {reason}"):
        made(workbench, "json array", data)
    assert texts_of(made(workbench, "json array", data, max_bad_documents=1)) == ["a", "b"]


@pytest.mark.parametrize(("value", "reason"), [(None, "null"), ("", "empty")])
@pytest.mark.parametrize("kind", FORMATS)
def test_null_and_empty_rows_are_counted_and_leave_no_lone_eos(workbench, kind, value, reason):
    token_set = made(workbench, kind, with_row(kind, value))
    assert texts_of(token_set) == TEXTS[:20]
    assert token_set.ledger["skipped"] == {reason: 1}
    assert token_set.ledger["rejections"] == []


# ---- files that are not what they should be --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "arrow stream", "arrow file"])
def test_a_missing_column_is_named_with_those_that_are_there(workbench, kind):
    format = FORMATS[kind].model_copy(update={"text_key": "content"})
    with pytest.raises(
        RequestError, match=r"has no column 'content', the format.text_key; it has: other, text$"
    ) as error:
        tokenized(workbench, written(kind, TEXTS), NAMES[kind], format=format)
    assert NAMES[kind] in str(error.value)


@pytest.mark.parametrize("kind", ["parquet", "arrow stream", "arrow file"])
def test_a_column_of_something_else_is_refused_with_those_of_text(workbench, kind):
    format = FORMATS[kind].model_copy(update={"text_key": "other"})
    with pytest.raises(RequestError, match=r"column 'other', .* holds int64 and no text\n  columns of text: text$"):
        tokenized(workbench, written(kind, TEXTS), NAMES[kind], format=format)


@pytest.mark.parametrize(
    ("name", "format", "hint"),
    [
        ("c.parquet", "json array", "c.parquet is no json_array: write format.type: parquet"),
        ("c.ARROW", "parquet", "c.ARROW is no parquet: write format.type: arrow"),
        ("c.parquet.gz", "parquet", "parquet is compressed inside"),
    ],
)
def test_an_ending_of_another_format_is_refused_with_the_right_one(workbench, name, format, hint):
    with pytest.raises(RequestError, match=hint):
        tokenized(workbench, b"x", name, format=FORMATS[format])


@pytest.mark.parametrize("kind", FORMATS)
def test_a_file_without_rows_is_an_error_that_names_it(workbench, kind):
    with pytest.raises(RequestError, match=rf"source file .*{NAMES.get(kind, 'c.json')} is empty"):
        made(workbench, kind, written(kind, [], pa.string()))


def spoiled_page(whole: bytes, group: int = 0) -> bytes:
    """With other bytes in the first page of the texts of a row group."""
    at = pq.ParquetFile(io.BytesIO(whole)).metadata.row_group(group).column(1).dictionary_page_offset + 60
    return whole[:at] + bytes(byte ^ 0xFF for byte in whole[at : at + 20]) + whole[at + 20 :]


def half(whole: bytes) -> bytes:
    return whole[: len(whole) // 2]


def flipped(whole: bytes) -> bytes:
    """Bytes in the first data page or record batch."""
    at = whole.index(b"good 100")
    return whole[:at] + bytes(byte ^ 0xFF for byte in whole[at : at + 8]) + whole[at + 8 :]


DAMAGE = {
    "a parquet cut in half": ("parquet", half),
    "a parquet without its last byte": ("parquet", lambda whole: whole[:-1]),
    "a parquet without a footer": ("parquet", lambda whole: whole[:4]),
    "a parquet that is none": ("parquet", lambda whole: b"text" * 100),
    "a parquet with a flipped byte": ("parquet", spoiled_page),
    "an arrow stream cut in half": ("arrow stream", half),
    "an arrow stream without its end": ("arrow stream", lambda whole: whole[:-8]),
    "an arrow stream without its last byte": ("arrow stream", lambda whole: whole[:-1]),
    "an arrow stream that is none": ("arrow stream", lambda whole: b"text" * 100),
    "an arrow stream with a spoiled schema": ("arrow stream", lambda whole: whole[:8] + b"\xff" * 60 + whole[68:]),
    "an arrow file cut in half": ("arrow file", half),
    "an arrow file without its last byte": ("arrow file", lambda whole: whole[:-1]),
    "an arrow file that is nothing but its start": ("arrow file", lambda whole: whole[:8]),
    "an array cut in half": ("json array", half),
    "an array without its bracket": ("json array", lambda whole: whole[:-1]),
    "an array with an invalid byte": ("json array", lambda whole: whole[:-20] + b"\xff" + whole[-20:]),
    "JSON lines in the place of an array": ("json array", lambda whole: b'{"text": "a"}\n{"text": "b"}\n'),
    "an object in the place of an array": ("json array", lambda whole: b'{"text": "a"}'),
    "an array nested too deeply": ("json array", lambda whole: b"[" * 100_000 + b"]" * 100_000),
}


@pytest.mark.parametrize("case", DAMAGE)
@pytest.mark.parametrize("max_bad_documents", [0, 10**9])
@pytest.mark.row(25)
def test_a_damaged_file_always_stops_the_build_and_is_named(workbench, case, max_bad_documents):
    kind, spoil = DAMAGE[case]
    name = NAMES.get(kind, "c.json")
    with pytest.raises(RequestError, match=rf"source file .*{name} (is|holds|has)") as error:
        made(workbench, kind, spoil(written(kind, TEXTS)), max_bad_documents=max_bad_documents)
    assert "\n\n" not in str(error.value)
    assert len(str(error.value)) < 1000


def test_a_spoiled_page_names_its_row_group(workbench):
    whole = written("parquet", [random.Random(row).randbytes(50).hex() for row in range(1000)])
    with pytest.raises(RequestError, match=r"c.parquet is damaged, cut off or no Parquet file: row group 2: "):
        made(workbench, "parquet", spoiled_page(whole, 2))


@pytest.mark.parametrize("kind", ["parquet", "arrow stream", "arrow file"])
def test_no_byte_that_is_flipped_is_a_traceback_or_a_crash(workbench, kind, tmp_path):
    """Read without the digest that would find all of them: damage is told, or the text differs, or it is the same."""
    whole = written(kind, TEXTS[:50], rows=20)
    stream, path = random.Random(5), tmp_path / NAMES[kind]
    outcomes = set()
    for _ in range(300):
        spoiled = bytearray(whole)
        spoiled[stream.randrange(len(whole))] ^= 1 << stream.randrange(8)
        path.write_bytes(spoiled)
        reading = Reading(SourceFile(path.name, path, *hash_source(path, lambda _: None)))
        try:
            texts = [
                read_document(unit, 0, FORMATS[kind]) for unit in units(reading.text(FORMATS[kind]), FORMATS[kind])
            ]
            outcomes.add("same" if texts == TEXTS[:50] else "other")
        except MarinError as error:
            outcomes.add(path.name in str(error))
    assert True in outcomes
    assert False not in outcomes


@pytest.mark.parametrize("kind", ["parquet", "arrow stream", "json array"])
@pytest.mark.row(25)
def test_a_flipped_byte_in_a_raw_artifact_is_damage_before_any_row_is_read(workbench, kind):
    data = written(kind, TEXTS)
    raw = workbench.raw({"c.data": data})
    (raw.folder / "c.data").write_bytes(flipped(data) if kind != "parquet" else data[:-1] + b"x")
    with pytest.raises(DamageError, match=r"raw/bench/dev is damaged: c.data is not what its record says"):
        workbench.tokenize(raw, workbench.bytes_tokenizer(), format=FORMATS[kind])


# ---- resuming, memory, training a tokenizer --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "arrow stream", "json array"])
def test_a_shard_of_rows_is_kept_or_made_again_as_the_same_bytes(workbench, kind):
    raw, tokenizer = workbench.raw({"c.data": written(kind, TEXTS)}), workbench.bytes_tokenizer()
    folder, _ = workbench.tokenize(raw, tokenizer, format=FORMATS[kind], shard_bytes=5000)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "c.data-00001.arrow").unlink()
    _, result = workbench.tokenize(raw, tokenizer, format=FORMATS[kind], shard_bytes=5000)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert result.details["shards_made"] == 1


MEMORY = """
import resource, sys
from pathlib import Path
from marin_build.data.documents import units
from marin_build.data.reading import Reading
from marin_build.data.sources import SourceFile, hash_source
from marin_build.recipe.sources import Parquet, Arrow
path = Path(sys.argv[1])
format = Parquet(type="parquet", text_key="text") if path.suffix == ".parquet" else Arrow(type="arrow", text_key="text")
file = SourceFile(path.name, path, *hash_source(path, lambda _: None))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
total = sum(len(unit) for unit in units(Reading(file).text(format), format))
print(total, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_memory_does_not_grow_with_the_file(tmp_path, ending):
    grown = {}
    for rows in (4_000, 40_000):
        values = [random.Random(row).randbytes(1500).hex() for row in range(rows)]
        path = tmp_path / f"{rows}.{ending}"
        path.write_bytes(written("parquet" if ending == "parquet" else "arrow stream", values, rows=1000))
        run = subprocess.run([sys.executable, "-c", MEMORY, path], capture_output=True, text=True, check=True)
        total, grown[rows] = map(int, run.stdout.split())
        assert total > 3000 * rows
        os.unlink(path)
    assert grown[40_000] < grown[4_000] + (30 << 20)  # of a text of 120 MB
