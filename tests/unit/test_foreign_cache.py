"""A token cache that others made is adopted where it lies, read as our own shards are, and never taken on trust."""

from __future__ import annotations

import json
import shutil
from itertools import chain
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pytest
from builders import Workbench
from llamas import llama_yaml

from marin_build.artifact.context import Dependency
from marin_build.artifact.fsspec_bucket import open_bucket
from marin_build.artifact.record import read_record, write_record
from marin_build.artifact.store import open_store
from marin_build.cli import main
from marin_build.data.foreign_cache import CacheFile, open_set
from marin_build.data.loader import TrainingLoader
from marin_build.data.mixture import Mixture
from marin_build.data.shards import TokenizedSet
from marin_build.errors import DamageError
from marin_build.recipe.load import RecipeBook
from marin_build.recipe.mixture_schedule import schedule_of
from marin_build.recipe.target import parse_target
from marin_build.training.inputs import open_inputs

RAW, TOKENIZER = "raw/notes/2026.01.01", "tokenizers/bytes/2026.01.01"
OWN, THEIRS, MODEL = "tokenized/own/2026.01.01", "tokenized/theirs/2026.01.01", "checkpoints/tiny/2026.01.01"
BOS, EOS = 256, 257
TEXTS = [f"note {number} of {number * number}" + " and more" * (number % 7) for number in range(2500)]
DOCUMENTS = [[BOS, *text.encode(), EOS] for text in TEXTS]
TOKENS = f"""
tokenizer: {TOKENIZER}
source: {{type: artifact, target: {RAW}, files: ["*"]}}
format: {{type: jsonl, text_key: text}}
add_bos: true
add_eos: true
shard_bytes: 20000
token_budget: null
max_bad_documents: 0
"""
TRAINING = f"""
data:
  tokenizer: {TOKENIZER}
  train: {{notes: {{target: {THEIRS}, weight: 1}}}}
  sequence_length: 100
  mixture_block: 1
  attention_across_documents: false
{llama_yaml(258)}
steps: 30
global_batch_size: 8
measure: {{keep_every_steps: 30}}
"""
RECIPES = {
    RAW: "source: {type: files, paths: [texts/*], digest: unresolved}\n",
    TOKENIZER: "tokenizer:\n  method: bytes\n  special_tokens: {bos: <|bos|>, eos: <|eos|>, pad: null}\n",
    OWN: TOKENS,
    THEIRS: TOKENS,
    MODEL: TRAINING,
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Text, a byte tokenizer, a token set of our own, and the same tokens as `datasets` saves them."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("MARIN_PREFIX", raising=False)
        for target, text in RECIPES.items():
            write(target, text)
        Path("texts").mkdir()
        Path("texts/a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        assert main(["pin", RAW]) == 0
        for target in (RAW, TOKENIZER, OWN):
            assert main(["build", target]) == 0
        datasets.Dataset.from_dict({"input_ids": DOCUMENTS}).save_to_disk("saved", num_shards=2)
    return folder


@pytest.fixture
def place(built, tmp_path, monkeypatch):
    folder = tmp_path / "here"
    shutil.copytree(built, folder)
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MARIN_PREFIX", raising=False)
    return folder


def write(target: str, text: str) -> None:
    path = Path(f"config/{target}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def adopted(folder: str = "saved", target: str = THEIRS) -> Dependency:
    assert main(["adopt", folder, target, "--reason", "made elsewhere"]) == 0
    return dependency(target)


def dependency(target: str) -> Dependency:
    store = open_store("artifacts", Path(".marin"))
    record = read_record(store, parse_target(target))
    return Dependency(record.target, store.fetch(record), record.to_dict())


def refusal(capsys, folder: str = "saved") -> str:
    capsys.readouterr()
    assert main(["adopt", folder, THEIRS, "--reason", "made elsewhere"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def batch_of(lists: pyarrow.Array, name: str = "input_ids") -> pyarrow.RecordBatch:
    return pyarrow.record_batch([lists], names=[name])


def write_arrow(path: str, *batches: pyarrow.RecordBatch, kind=pyarrow.ipc.new_stream, **options) -> None:
    Path(path).parent.mkdir(exist_ok=True)
    with kind(path, batches[0].schema, **options) as stream:
        for batch in batches:
            stream.write_batch(batch)


def flat(token_set: TokenizedSet) -> list[int]:
    return list(chain.from_iterable(shard.ids.tolist() for shard in token_set.shards))


def lists_of(token_set: TokenizedSet) -> list[list[int]]:
    return [
        shard.ids[start:end].tolist()
        for shard in token_set.shards
        for start, end in zip(shard.offsets[:-1].tolist(), shard.offsets[1:].tolist(), strict=True)
    ]


# ---- adopted and read ------------------------------------------------------------------------------------------------


def test_a_saved_dataset_is_adopted_where_it_lies_and_says_what_nobody_can_prove(place, capsys):
    before = {path: path.read_bytes() for path in (place / "saved").iterdir()}
    record = adopted().record
    said = capsys.readouterr().out
    assert f"not proven: that the ids are of {TOKENIZER}: seen is that each is below 258" in said
    assert "not proven: that the text is what source, format, split" in said
    assert {path: path.read_bytes() for path in (place / "saved").iterdir()} == before
    assert record["external"] == str(place / "saved")
    assert record["metrics"] == {"documents": 2500, "tokens": sum(map(len, DOCUMENTS)), "shards": 2}
    assert len(record["provenance"]["adopted"]["unproven"]) == 3
    assert main(["show", THEIRS]) == 0
    shown = capsys.readouterr().out
    assert "not proven" in shown
    assert "ledger" not in shown


def test_each_record_batch_is_a_shard_and_a_file_is_mapped_once(place, monkeypatch):
    opened, real = [], pyarrow.memory_map
    monkeypatch.setattr(pyarrow, "memory_map", lambda path: opened.append(path) or real(path))
    one = adopted()
    opened.clear()
    theirs = open_set(one.folder, one.record)
    assert [shard.documents for shard in theirs.shards] == [1000, 250, 1000, 250]
    assert lists_of(theirs) == DOCUMENTS
    assert len(opened) == 2
    assert not any(shard.ids.flags.owndata or shard.ids.flags.writeable for shard in theirs.shards)
    assert (theirs.tokens, theirs.documents, theirs.vocab_size) == (sum(map(len, DOCUMENTS)), 2500, 258)


def test_training_reads_the_same_batches_as_from_our_own_shards(place):
    recipe = RecipeBook(Path("config")).load(parse_target(MODEL))
    theirs, own = adopted(), dependency(OWN)
    context = Workbench(place).context(MODEL, recipe, theirs, dependency(TOKENIZER))
    loader = open_inputs(context, recipe, 4).loader
    options = {"sequence_length": 100, "segments": True}
    ours = TrainingLoader({"notes": open_set(own.folder, own.record)}, schedule_of(recipe), **options)
    for step in (0, 1, 2, 29, 7):
        one, other = loader.batch(step), ours.batch(step)
        assert one.tokens.dtype == np.int32
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.segment_ids, other.segment_ids)
    assert isinstance(loader.mixture, Mixture)
    assert loader.plan_digest == ours.plan_digest


@pytest.mark.parametrize("kind", [pyarrow.ipc.new_stream, pyarrow.ipc.new_file])
@pytest.mark.parametrize("ids", [pyarrow.uint16(), pyarrow.uint32(), pyarrow.int64(), pyarrow.uint64()], ids=str)
@pytest.mark.parametrize("make", [pyarrow.list_, pyarrow.large_list])
def test_plain_arrow_files_of_any_width_are_read_by_name(place, kind, ids, make):
    batches = [batch_of(pyarrow.array(DOCUMENTS[n : n + 30], make(ids))) for n in range(0, 90, 30)]
    empty = batch_of(pyarrow.array([], make(ids)))
    write_arrow("plain/b.arrow", *batches[1:], kind=kind)
    write_arrow("plain/a.arrow", empty, batches[0], kind=kind)
    one = adopted("plain")
    theirs = open_set(one.folder, one.record)
    assert lists_of(theirs) == DOCUMENTS[:90]
    assert {str(shard.ids.dtype) for shard in theirs.shards} == {str(ids)}
    recipe = RecipeBook(Path("config")).load(parse_target(MODEL))
    loader = TrainingLoader({"notes": theirs}, schedule_of(recipe), sequence_length=100, segments=True)
    for (_, window), row in zip(loader.sources(0), loader.batch(0).tokens, strict=True):
        assert row.tolist() == flat(theirs)[window * 100 : window * 100 + 101]


@pytest.mark.usefixtures("memory_prefix")
def test_a_cache_behind_a_url_is_adopted_read_and_peeked_into(place, capsys):
    bucket = open_bucket("memory://elsewhere/saved")
    for path in Path("saved").iterdir():
        bucket.upload(path, path.name)
    one = adopted("memory://elsewhere/saved")
    assert one.record["external"] == "memory://elsewhere/saved"
    assert lists_of(open_set(one.folder, one.record)) == DOCUMENTS
    capsys.readouterr()
    assert main(["peek", THEIRS, "--shard", "1", "--rows", "1"]) == 0
    assert f"⟦<|bos|>⟧{TEXTS[1250]}⟦<|eos|>⟧" in capsys.readouterr().out


def test_rows_of_one_length_are_read_too(place):
    rows = np.arange(5 * 8, dtype=np.int32) % 200
    column = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(rows), 8)
    write_arrow("plain/a.arrow", batch_of(column))
    write(THEIRS, TOKENS.replace("add_bos: true", "add_bos: false").replace("add_eos: true", "add_eos: false"))
    one = adopted("plain")
    assert lists_of(open_set(one.folder, one.record)) == rows.reshape(5, 8).tolist()


def test_peek_shows_documents_across_record_batches(place, capsys):
    adopted()
    capsys.readouterr()
    assert main(["peek", THEIRS, "--from", "999", "--rows", "2"]) == 0
    said = capsys.readouterr().out
    assert f"{THEIRS}: documents 2,500, tokens " in said
    assert "shards 2" in said
    for number in (999, 1000):
        assert f"document {number:,}, shard data-00000-of-00002.arrow, document of shard {number:,}" in said
        assert f"⟦<|bos|>⟧{TEXTS[number]}⟦<|eos|>⟧" in said
    assert main(["peek", THEIRS, "--shard", "1", "--rows", "1"]) == 0
    assert "document 1,250, shard data-00001-of-00002.arrow, document of shard 0" in capsys.readouterr().out
    assert main(["peek", MODEL, "--rows", "1"]) == 0


def test_a_flipped_byte_is_found(place, capsys):
    adopted()
    assert main(["verify", "--full", THEIRS]) == 0
    path = Path("saved/data-00001-of-00002.arrow")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert main(["verify", "--full", THEIRS]) == 4
    assert "data-00001-of-00002.arrow" in capsys.readouterr().out


def test_it_cannot_be_made_again_and_gives_no_shards_to_others(place, capsys):
    adopted()
    assert main(["verify", "--rebuild", "1", THEIRS]) == 2
    said = capsys.readouterr().err
    assert f"{THEIRS} cannot be made again and compared: it was adopted as others had made it" in said
    more = "tokenized/more/2026.01.01"
    write(more, TOKENS.replace("max_bad_documents: 0", "max_bad_documents: 1"))
    assert main(["build", more]) == 0
    assert "has no shards to give" not in capsys.readouterr().err


def test_a_ledger_in_a_record_names_no_file_elsewhere_and_not_more_than_there_is(place):
    adopted()
    store = open_store("artifacts", Path(".marin"))
    record = read_record(store, parse_target(THEIRS))
    shards = record.provenance["adopted"]["ledger"]["shards"]
    shards[0]["documents"].append(1)
    write_record(store, record)
    one = dependency(THEIRS)
    with pytest.raises(DamageError, match=r"is damaged: its record: ledger"):
        open_set(one.folder, one.record)
    shards[0]["tokens"].append(1)
    theirs = open_set(one.folder, record.to_dict())
    with pytest.raises(DamageError, match=r"data-00000-of-00002.arrow has no record batch 2"):
        flat(theirs)
    shards[0]["file"] = "../../etc/passwd"
    with pytest.raises(DamageError, match=r"is damaged: its record: ledger"):
        open_set(one.folder, record.to_dict())


# ---- refused ---------------------------------------------------------------------------------------------------------


def test_what_is_no_token_cache_is_refused_with_what_would_be_one(place, capsys):
    for name, words in {
        "shard_ledger.json": "it is a zarr store, as Levanter keeps its caches",
        "a.parquet": "it has no Arrow files; seen: a.parquet",
    }.items():
        Path("other").mkdir()
        Path("other", name).write_text("{}")
        said = refusal(capsys, "other")
        assert words in said
        assert "a folder that `save_to_disk` of `datasets` wrote" in said
        shutil.rmtree("other")
    write_arrow("other/a.arrow", batch_of(pyarrow.array([[1]]), "text"))
    assert "has no column input_ids" in refusal(capsys, "other")
    write_arrow("other/a.arrow", batch_of(pyarrow.array(["text"])))
    assert "it holds string and not lists of integers" in refusal(capsys, "other")
    write_arrow("other/a.arrow", batch_of(pyarrow.array([[0.5]])))
    assert "not lists of integers" in refusal(capsys, "other")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"input_ids": DOCUMENTS[:1]})}).save_to_disk("several")
    assert f"adopt one of them, such as {place}/several/train" in refusal(capsys, "several")


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        ([[BOS, 258, EOS]], "row 31 of a.arrow has the id 258; ids of its tokenizer are 0 to 257"),
        ([[BOS, -1, EOS]], "row 31 of a.arrow has the id -1"),
        ([[1, 2, EOS]], "row 31 of a.arrow does not begin with id 256, and add_bos of its recipe is true"),
        ([[BOS, 1, 2]], "row 31 of a.arrow does not end with id 257, and add_eos of its recipe is true"),
        ([[]], "row 31 of a.arrow does not begin with id 256"),
        ([None], "record batch 1, input_ids: 1 of its rows are null"),
        ([[BOS, None, EOS]], "record batch 1, input_ids: it holds 1 nulls"),
    ],
)
def test_ids_that_the_recipe_cannot_have_made_are_refused_by_row(place, capsys, documents, words):
    first = batch_of(pyarrow.array(DOCUMENTS[:30], pyarrow.list_(pyarrow.int32())))
    second = batch_of(pyarrow.array([[BOS, EOS], *documents], pyarrow.list_(pyarrow.int32())))
    write_arrow("plain/a.arrow", first, second)
    assert words in refusal(capsys, "plain")
    assert not Path("artifacts", THEIRS, ".artifact.json").exists()


def test_special_ids_around_each_document_that_the_recipe_does_not_have_are_refused(place, capsys):
    write(THEIRS, TOKENS.replace("add_bos: true", "add_bos: false"))
    assert "each of its rows begins with id 256, and add_bos of its recipe is false" in refusal(capsys)


def test_padding_loss_masks_and_compression_are_refused(place, capsys):
    ids, masks = DOCUMENTS[:2], [[1] * len(DOCUMENTS[0]), [1] * (len(DOCUMENTS[1]) - 1) + [0]]
    datasets.Dataset.from_dict({"input_ids": ids, "attention_mask": masks}).save_to_disk("padded")
    assert "row 1 of data-00000-of-00001.arrow has padding" in refusal(capsys, "padded")
    datasets.Dataset.from_dict({"input_ids": ids, "loss_mask": masks}).save_to_disk("masked")
    assert "has a column loss_mask" in refusal(capsys, "masked")
    batch = batch_of(pyarrow.array(DOCUMENTS, pyarrow.list_(pyarrow.int32())))
    write_arrow("small/a.arrow", batch, options=pyarrow.ipc.IpcWriteOptions(compression="zstd"))
    assert "is compressed, so it cannot be read where it lies" in refusal(capsys, "small")
    masks[1][-1] = 1
    datasets.Dataset.from_dict({"input_ids": ids, "attention_mask": masks, "labels": ids}).save_to_disk("whole")
    claims = adopted("whole").record["provenance"]["adopted"]["unproven"]
    assert claims[-1] == "that all tokens are to be trained on: not read are attention_mask, labels"


def test_what_is_cut_off_or_damaged_or_missing_is_refused(place, capsys):
    path = Path("saved/data-00001-of-00002.arrow")
    data = path.read_bytes()
    path.write_bytes(data[:-8])
    assert "is cut off: its stream does not end" in refusal(capsys)
    for harmed in (b"", b"no Arrow at all", data[: len(data) // 2] + data[-8:]):
        path.write_bytes(harmed)
        assert "data-00001-of-00002.arrow" in refusal(capsys)
    path.unlink()
    assert "its state.json names 'data-00001-of-00002.arrow', which is not there" in refusal(capsys)


def test_offsets_that_lead_back_are_refused(place, capsys):
    offsets = np.array([0, 5, 2, 6], np.int32)
    lists = pyarrow.ListArray.from_arrays(pyarrow.array(offsets), pyarrow.array(np.full(6, BOS, np.int32)))
    write_arrow("plain/a.arrow", batch_of(lists))
    assert "is damaged in record batch 0" in refusal(capsys, "plain")


def test_offsets_that_do_not_begin_at_zero_are_read_from_where_they_begin(place):
    lists = pyarrow.array([[9, 9], [1, 2], [3]], pyarrow.list_(pyarrow.int32())).slice(1)
    file = CacheFile(Path("unused"))
    file.__dict__["_opened"] = (_Everywhere(), [batch_of(lists)])
    ids, offsets = file.lists(0)
    assert (ids.tolist(), offsets.tolist()) == ([1, 2, 3], [0, 2, 3])


class _Everywhere:
    """A mapping that holds every address."""

    address, size = 0, 1 << 64
