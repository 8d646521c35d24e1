"""`marin-build peek`: what is in an artifact, with everything that is no text told from text that looks like it."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from marin_build.artifact import publish
from marin_build.artifact.fsspec_bucket import open_bucket
from marin_build.artifact.object_store import ObjectStore
from marin_build.artifact.record import read_record, write_record
from marin_build.artifact.store import open_store
from marin_build.build import builder_of
from marin_build.cli import main
from marin_build.data import peek
from marin_build.data.loader import TrainingLoader
from marin_build.data.peek_text import excerpts as excerpts_of
from marin_build.data.shards import Shard, TokenizedSet
from marin_build.recipe.load import RecipeBook
from marin_build.recipe.mixture_schedule import schedule_of
from marin_build.recipe.target import parse_target
from marin_build.settings import Settings

RAW, TOKENIZER = "raw/notes/2026.01.01", "tokenizers/bytes/2026.01.01"
NOTES, MORE = "tokenized/bytes/notes/2026.01.01", "tokenized/bytes/more/2026.01.01"
TRAINING = "checkpoints/tiny/2026.01.01"
BOS, EOS = 256, 257
TEXTS = [
    "A first note.",
    "It spells <|bos|> and <|end|>, and ⟦marks⟧ │ of ours.",
    "Bell \x07, colour \x1b[31m, turned \u202e around.",
    "My key is hf_abcdefghijklmnop.",
    "long " * 200,
    "Ünïcode: 数据",
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Raw text, a byte tokenizer and two token sets of two shards each, built."""
    folder = tmp_path_factory.mktemp("peek")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("MARIN_PREFIX", raising=False)
        files = {"a.jsonl": TEXTS[:4], "b.jsonl": TEXTS[4:], "more.jsonl": [f"note {n}" for n in range(60)]}
        for name, texts in files.items():
            Path(name).write_text("".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts))
        write(RAW, "source: {type: files, paths: ['*.jsonl'], digest: unresolved}\n")
        write(TOKENIZER, "tokenizer: {method: bytes, special_tokens: {bos: <|bos|>, eos: <|end|>, pad: null}}\n")
        write(NOTES, token_set("[a.jsonl, b.jsonl]"))
        write(MORE, token_set("[more.jsonl]"))
        tiny = (Path(__file__).parents[1] / "golden/recipes/checkpoints/tiny/2026.06.28.yaml").read_text()
        tiny = tiny.replace("tokenizers/bpe/2026.06.28", TOKENIZER).replace(
            "sequence_length: 64", "sequence_length: 24"
        )
        tiny = tiny.replace("tokenized/bpe/train/2026.06.28", NOTES).replace("tokenized/bpe/notes/2026.06.28", MORE)
        write(TRAINING, tiny.replace("tokenized/bpe/validation/2026.06.28", MORE).replace("weight: 3}", "weight: 1}"))
        assert main(["pin", RAW]) == 0
        for target in (RAW, TOKENIZER, NOTES, MORE):
            assert main(["build", target]) == 0
    return folder


@pytest.fixture
def place(built, monkeypatch):
    monkeypatch.chdir(built)
    monkeypatch.delenv("MARIN_PREFIX", raising=False)
    return built


def write(target: str, text: str) -> None:
    path = Path(f"config/{target}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def token_set(files: str) -> str:
    return f"""tokenizer: {TOKENIZER}
source: {{type: artifact, target: {RAW}, files: {files}}}
format: {{type: jsonl, text_key: text}}
add_bos: true
add_eos: true
shard_bytes: 1000000
token_budget: null
max_bad_documents: 0
"""


def shown(capsys, *arguments: str) -> str:
    capsys.readouterr()
    assert main(["peek", *arguments]) == 0
    return capsys.readouterr().out


def rows(capsys, *arguments: str) -> list[dict]:
    return json.loads(shown(capsys, *arguments, "--json"))["rows"]


def refused(capsys, *arguments: str) -> str:
    assert main(["peek", *arguments]) in (2, 4)
    return capsys.readouterr().err


def ids_of(row: dict) -> list[int]:
    return [number for piece in row["pieces"] for number in piece.get("ids", ())]


# ---- token sets ------------------------------------------------------------------------------------------------------


def test_documents_are_shown_with_their_special_ids_and_place(place, capsys):
    text = shown(capsys, NOTES, "--rows", "1")
    assert f"{NOTES}: documents 6, tokens " in text
    assert "document 0, shard a.jsonl-00000.arrow, document of shard 0: 15 tokens" in text
    assert "⟦<|bos|>⟧A first note.⟦<|end|>⟧" in text


def test_text_that_spells_a_special_token_or_a_mark_is_told_from_the_real_one(place, capsys):
    text = shown(capsys, NOTES, "--from", "1", "--rows", "1")
    assert "⟦<|bos|>⟧It spells <|bos|> and <|end|>, and \\u27e6marks\\u27e7 \\u2502 of ours.⟦<|end|>⟧" in text
    (row,) = rows(capsys, NOTES, "--from", "1", "--rows", "1", "--ids")
    assert [(piece.get("special"), piece.get("text")) for piece in row["pieces"]] == [
        ("<|bos|>", None),
        (None, TEXTS[1]),
        ("<|end|>", None),
    ]
    assert ids_of(row) == [BOS, *TEXTS[1].encode(), EOS]


def test_nothing_that_a_terminal_would_obey_is_printed_and_no_credentials(place, capsys):
    text = shown(capsys, NOTES, "--from", "2", "--rows", "2", "--tokens")
    assert not set(text) & {"\x07", "\x1b", "\u202e"}
    assert "\\x07" in text
    assert "hf_abcdefghijklmnop" not in text.replace("│", "")
    assert "My key is [hidden]" in text
    assert "hf_abc" not in "".join(str(row) for row in rows(capsys, NOTES, "--from", "2", "--tokens"))


def test_tokens_are_set_apart_and_ids_listed(place, capsys):
    text = shown(capsys, NOTES, "--rows", "1", "--tokens", "--ids")
    assert "⟦<|bos|>⟧A│ │f│i│r│s│t│ │n│o│t│e│.⟦<|end|>⟧" in text
    assert " ".join(map(str, [BOS, *b"A first note.", EOS])) in text
    (row,) = rows(capsys, NOTES, "--from", "5", "--rows", "1", "--tokens")
    assert row["pieces"][1]["tokens"][:3] == ["\\xc3", "\\x9c", "n"]
    assert row["pieces"][1]["text"] == TEXTS[5]


def test_a_long_document_is_shortened_unless_it_is_asked_for_whole(place, capsys):
    (short,) = rows(capsys, NOTES, "--from", "4", "--rows", "1", "--ids")
    assert [piece["omitted_tokens"] for piece in short["pieces"] if "omitted_tokens" in piece] == [1002 - 250]
    assert len(ids_of(short)) == 250
    assert short["pieces"][-1]["special"] == "<|end|>"
    assert "752 tokens more; --full shows them" in shown(capsys, NOTES, "--from", "4", "--rows", "1")
    (whole,) = rows(capsys, NOTES, "--from", "4", "--rows", "1", "--ids", "--full")
    assert bytes(ids_of(whole)[1:-1]).decode() == TEXTS[4]


def test_a_look_begins_where_it_is_told_to(place, capsys):
    for arguments in (["--shard", "1"], ["--shard", "b.jsonl-00000.arrow"], ["--from", "4"]):
        found = rows(capsys, NOTES, *arguments)
        assert [(row["document"], row["shard"], row["document_of_shard"]) for row in found] == [
            (4, "b.jsonl-00000.arrow", 0),
            (5, "b.jsonl-00000.arrow", 1),
        ]
    assert [row["document"] for row in rows(capsys, NOTES, "--shard", "1", "--from", "1")] == [5]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([NOTES, "--from", "6"], "has no document 6: it has 0 to 5"),
        ([NOTES, "--shard", "2"], "has no shard '2': it has 0 to 1: a.jsonl-00000.arrow, b.jsonl"),
        ([NOTES, "--step", "2"], "--step is for checkpoints; tokenized/bytes/notes/2026.01.01 is of kind tokenized"),
        ([RAW, "--ids"], "--ids is for tokenized and checkpoints; raw/notes/2026.01.01 is of kind raw"),
        ([RAW, "--file", "c*"], "has no file 'c*'; it has: a.jsonl, b.jsonl, more.jsonl"),
        ([RAW, "--from", "99"], "raw/notes/2026.01.01: a.jsonl has no row 99"),
        ([TOKENIZER], "is of kind tokenizers; peek looks into raw, tokenized, checkpoints"),
        ([TRAINING, "--step", "100"], "has no row 0 of step 100: steps are 0 to 99, rows of each 0 to 7"),
        ([TRAINING, "--from", "8"], "has no row 8 of step 0"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(place, capsys, arguments, said):
    assert said in refused(capsys, *arguments)


def test_what_is_trained_on_is_marked_where_a_set_says_so(place, capsys, monkeypatch):
    mask = np.zeros(1000, np.uint8)
    mask[8:15] = 1  # " note." and <|end|>
    monkeypatch.setattr(Shard, "loss_mask", property(lambda self: mask[: self.tokens]))
    text = shown(capsys, NOTES, "--rows", "1")
    assert "⟦<|bos|>⟧A first⟪ note.⟦<|end|>⟧⟫" in text
    assert "⟪trained on⟫" in text
    assert ": 15 tokens, 7 trained on" in text
    (row,) = rows(capsys, NOTES, "--rows", "1")
    assert [piece["trained"] for piece in row["pieces"]] == [False, False, True, True]
    assert row["trained"] == 7


def test_a_set_that_is_not_finished_or_whose_tokenizer_is_gone_says_so(place, capsys, monkeypatch):
    monkeypatch.setenv("MARIN_PREFIX", "elsewhere")
    assert f"{NOTES} is not finished, so there is nothing to look into\n  snakemake {NOTES}" in refused(capsys, NOTES)
    monkeypatch.delenv("MARIN_PREFIX", raising=False)
    monkeypatch.setattr(
        peek, "read_record", lambda store, target: read_record(store, target) if target.kind != "tokenizers" else None
    )
    assert f"the tokenizer of {NOTES}, {TOKENIZER}, is not here" in refused(capsys, NOTES)


def test_a_tokenizer_that_is_another_one_now_is_not_believed(place, capsys, monkeypatch):
    real = peek.read_tokens
    monkeypatch.setattr(peek, "read_tokens", lambda path: replace(real(path), digest="0" * 32))
    assert f"{TOKENIZER} is another tokenizer now than the one that {NOTES} was made with" in refused(capsys, NOTES)


def test_an_id_without_a_token_is_shown_as_such(place, capsys, monkeypatch):
    real = peek.read_tokens

    def fewer(path):
        tokens = real(path)
        return replace(tokens, texts={number: text for number, text in tokens.texts.items() if number != ord("f")})

    monkeypatch.setattr(peek, "read_tokens", fewer)
    assert "⟦<|bos|>⟧A ⟦unknown id 102⟧irst note.⟦<|end|>⟧" in shown(capsys, NOTES, "--rows", "1")


def test_of_an_artifact_that_lies_in_a_bucket_only_what_is_shown_is_brought(place, capsys):
    store, target = open_store("artifacts"), parse_target(NOTES)
    record, place_of = read_record(store, target), "memory://peek/notes"
    bucket = open_bucket(place_of)
    for entry in record.content:
        bucket.upload(place / "artifacts" / NOTES / entry["path"], entry["path"])
    expected = rows(capsys, NOTES, "--shard", "1")
    there = ["--config", f"object_cache={place / 'cache'}"]
    try:
        write_record(store, replace(record, external=place_of, files=record.content))
        assert rows(capsys, NOTES, "--shard", "1", *there) == expected
    finally:
        write_record(store, record)
    brought = {path.name for path in (place / "cache").rglob("*") if path.is_file()}
    assert brought == {"ledger.json", "b.jsonl-00000.arrow"}


def test_an_object_store_is_looked_into_as_a_disk_is(place, tmp_path):
    store = ObjectStore(open_bucket(f"memory://peek/{tmp_path.name}"), tmp_path / "cache")
    book, settings = RecipeBook("config"), Settings()
    for text in (RAW, TOKENIZER, NOTES, MORE):
        target = parse_target(text)
        publish.build(target, book, store, settings, builder_of(target.kind), forced_run=None, run=None, command=[])
    shutil.rmtree(tmp_path / "cache")
    disk = open_store("artifacts")
    recipe = book.load(parse_target(TRAINING))
    for look in (
        lambda store: peek.documents(store, parse_target(NOTES), first=3, shard=None, rows=9, full=True),
        lambda store: peek.training_rows(store, parse_target(TRAINING), recipe, step=3, first=0, rows=8, full=True),
        lambda store: excerpts_of(store, parse_target(RAW), file="b*", first=0, rows=9),
    ):
        assert look(store) == look(disk)


# ---- rows of a training ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 57])
def test_the_rows_of_a_step_are_those_that_the_training_reads(place, capsys, step):
    recipe = RecipeBook("config").load(parse_target(TRAINING))
    sets = {
        name: TokenizedSet.open(Path("artifacts", component.target)) for name, component in recipe.data.train.items()
    }
    loader = TrainingLoader(sets, schedule_of(recipe), sequence_length=24, segments=True)
    batch, sources = loader.batch(step), loader.sources(step)
    found = rows(capsys, TRAINING, "--step", str(step), "--rows", "8", "--ids", "--full")
    assert [ids_of(row) for row in found] == batch.tokens.tolist()
    assert [(row["component"], row["window"]) for row in found] == sources
    for row, segments in zip(found, batch.segment_ids, strict=True):
        assert sum("document" in piece for piece in row["pieces"]) == segments.max() + 1
    assert [row["row"] for row in rows(capsys, TRAINING, "--step", str(step), "--from", "6")] == [6, 7]


def test_a_row_of_a_training_names_its_documents_and_the_tokenizer_is_read_once(place, capsys, monkeypatch):
    read, real = [], peek.read_tokens
    monkeypatch.setattr(peek, "read_tokens", lambda path: read.append(path) or real(path))
    text = shown(capsys, TRAINING, "--rows", "8")
    assert "step 0, row 0, component " in text
    assert "document 12: " in text
    assert text.count("component more/notes") > 0 < text.count("component train")
    assert len(read) == 1


def test_a_training_whose_sets_are_not_built_names_one(place, capsys, monkeypatch):
    monkeypatch.setenv("MARIN_PREFIX", "elsewhere")
    assert f"{MORE} is not finished, so there is nothing to look into" in refused(capsys, TRAINING)


# ---- raw text --------------------------------------------------------------------------------------------------------


def excerpts(capsys, tmp_path, name: str, data: bytes, *arguments: str) -> list[dict]:
    """Rows of a raw artifact of one file."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / name).write_bytes(data)
    write_raw(tmp_path, name)
    return rows(capsys, "raw/one/dev", *arguments)


def write_raw(tmp_path: Path, name: str) -> None:
    write("raw/one/dev", f"source: {{type: files, paths: ['source/{name}'], digest: unresolved}}\n")
    assert main(["pin", "raw/one/dev"]) == 0
    assert main(["build", "raw/one/dev"]) == 0


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MARIN_PREFIX", raising=False)
    return tmp_path


def test_records_of_raw_text_are_shown_by_their_keys(place, capsys):
    text = shown(capsys, RAW, "--file", "b*", "--rows", "2")
    assert f"{RAW}: files 3, bytes" in text
    assert "b.jsonl, row 1\ntext: Ünïcode: 数据\nn: 1" in text
    assert "\x1b" not in shown(capsys, RAW, "--rows", "9")
    assert "hf_abc" not in shown(capsys, RAW, "--rows", "9")
    assert [row["fields"]["text"] for row in rows(capsys, RAW, "--rows", "2", "--from", "1")] == TEXTS[1:3]


LINES = b'{"text": "one", "meta": {"n": 1}}\n\n{"text": "two"}\nno json\n'
FIELDS = [{"text": "one", "meta": '{"n": 1}'}, {"text": "two"}, {"": "no json"}]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", LINES),
        ("a.jsonl.gz", gzip.compress(LINES)),
        ("a.json.zst", zstandard.compress(LINES)),
    ],
    ids=["plain", "gzip", "zstd"],
)
def test_json_lines_are_read_compressed_too(empty, capsys, name, data):
    assert [row["fields"] for row in excerpts(capsys, empty, name, data)] == FIELDS


def test_an_array_of_json_is_read_by_its_elements(empty, capsys):
    data = json.dumps([{"text": "one"}, "two", 3], indent=1).encode()
    assert [row["fields"] for row in excerpts(capsys, empty, "a.json", data)] == [
        {"text": "one"},
        {"": "two"},
        {"": "3"},
    ]


def test_text_is_read_by_its_paragraphs(empty, capsys):
    found = excerpts(capsys, empty, "a.txt", b"One\nline.\n\n\nTwo.\n")
    assert [(row["row"], row["fields"]) for row in found] == [(0, {"": "One\nline."}), (1, {"": "Two."})]


@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
def test_rows_of_columns_are_read(empty, capsys, kind):
    table = pyarrow.table({"text": ["one", "two"], "tags": [["a"], None]})
    path = empty / ("a.parquet" if kind == "parquet" else "a.arrow")
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        make = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
        with make(path, table.schema) as writer:
            writer.write_table(table)
    found = excerpts(capsys, empty, path.name, path.read_bytes())
    assert [row["fields"] for row in found] == [{"text": "one", "tags": '["a"]'}, {"text": "two", "tags": "null"}]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet", "a.arrow"])
def test_raw_text_in_a_bucket_is_read_there(empty, capsys, name):
    table = pyarrow.table({"text": ["one", "two"]})
    if name.endswith("gz"):
        Path(name).write_bytes(gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'))
    elif name.endswith("parquet"):
        pyarrow.parquet.write_table(table, name)
    else:
        with pyarrow.ipc.new_file(name, table.schema) as writer:
            writer.write_table(table)
    expected = excerpts(capsys, empty, name, Path(name).read_bytes())
    store, target, there = open_store("artifacts"), parse_target("raw/one/dev"), f"memory://peek/{name}"
    record = read_record(store, target)
    open_bucket(there).upload(empty / "source" / name, name)
    write_record(store, replace(record, external=there, files=record.content))
    found = rows(capsys, "raw/one/dev", "--config", f"object_cache={empty / 'cache'}")
    assert found == expected
    assert [row["fields"] for row in found] == [{"text": "one"}, {"text": "two"}]
    assert not (empty / "cache").exists()


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet", "a.arrow"])
def test_a_damaged_file_is_an_error_that_names_it(empty, capsys, name):
    excerpts(capsys, empty, "a.txt", b"text\n")
    (empty / "source" / name).write_bytes(b"\x1f\x8bno such thing")
    write_raw(empty, name)
    text = refused(capsys, "raw/one/dev")
    assert name in text
    assert "damaged" in text or "cannot be read" in text


def test_what_is_no_text_is_refused(empty, capsys):
    (empty / "source").mkdir()
    (empty / "source" / "a.bin").write_bytes(b"\x80\xff\n")
    write_raw(empty, "a.bin")
    assert "a.bin holds bytes that are no UTF-8 text" in refused(capsys, "raw/one/dev")


def test_a_field_that_is_long_is_shortened(empty, capsys):
    (empty / "source").mkdir()
    (empty / "source" / "a.jsonl").write_text(json.dumps({"text": "x" * 5000}))
    write_raw(empty, "a.jsonl")
    assert "… (5,000 characters)" in shown(capsys, "raw/one/dev")
    assert "x" * 5000 in shown(capsys, "raw/one/dev", "--full")
