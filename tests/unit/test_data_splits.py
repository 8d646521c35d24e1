"""Which documents of a source are taken: the first of each file, and one side of a split that never changes."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import cast

import pytest
from builders import Workbench, texts_of, tokenized
from corpora import written
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marin_build.artifact.digest import file_entries, list_files
from marin_build.artifact.proof import Made, Sample
from marin_build.artifact.record import Record
from marin_build.data.documents import is_on_side
from marin_build.data.held_out import sign_of_held_out
from marin_build.data.retokenize import remake
from marin_build.data.shards import TokenizedSet
from marin_build.errors import DamageError
from marin_build.recipe.schema import ValidationSplit
from marin_build.recipe.sources import Arrow, JsonArray, JsonLines, Parquet, PlainText

TEXTS = [f"text {number} " + "x" * (number % 40) for number in range(400)]
FORMATS = {
    "c.jsonl": JsonLines(type="jsonl", text_key="text"),
    "c.jsonl.gz": JsonLines(type="jsonl", text_key="text"),
    "c.jsonl.zst": JsonLines(type="jsonl", text_key="text"),
    "c.parquet": Parquet(type="parquet", text_key="text"),
    "c.arrow": Arrow(type="arrow", text_key="text"),
    "c.json": JsonArray(type="json_array", text_key="text"),
}


def limited(name: str, count: int):
    return FORMATS[name].model_copy(update={"max_documents_per_file": count})


def side(part: str, fraction: float = 0.2, seed: int = 0) -> ValidationSplit:
    return ValidationSplit(part=part, validation_fraction=fraction, seed=seed)


def token_set(workbench: Workbench, files: dict[str, bytes], folder: str, **fields) -> TokenizedSet:
    raw = workbench.raw(files, f"raw/{folder}/dev")
    made, _ = workbench.tokenize(raw, workbench.bytes_tokenizer(), folder=folder, files=("*",), **fields)
    return TokenizedSet.open(made)


# ---- a limit of documents --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("count", [1, 37, 400, 1000])
def test_the_first_documents_of_a_file_are_taken_exactly_however_it_is_cut(workbench, name, count):
    for number, shard_bytes in enumerate((500, 1 << 20)):
        found = tokenized(
            workbench,
            written(name, TEXTS),
            name,
            folder=f"set{number}",
            format=limited(name, count),
            shard_bytes=shard_bytes,
        )
        assert texts_of(found) == TEXTS[:count]


def test_a_limit_holds_for_each_file_whatever_the_processes(workbench, monkeypatch):
    from marin_build.data import tokenize

    monkeypatch.setattr(tokenize, "BYTES_WORTH_A_PROCESS", 1)
    files = {f"{number}.jsonl": written("c.jsonl", TEXTS[100 * number : 100 * number + 100]) for number in range(4)}
    expected = [text for number in range(4) for text in TEXTS[100 * number : 100 * number + 7]]
    digests = set()
    for processes in (1, 2):
        found = token_set(workbench, files, f"p{processes}", format=limited("c.jsonl", 7), processes=processes)
        assert texts_of(found) == expected
        digests.add(found.ledger["digest"])
    assert len(digests) == 1


def test_documents_without_text_count_and_blank_lines_do_not(workbench):
    data = b'{"text": null}\n\n{"text": "a"}\n\n\n{"text": "b"}\n{"text": "c"}\n'
    found = tokenized(workbench, data, "c.jsonl", format=limited("c.jsonl", 3))
    assert texts_of(found) == ["a", "b"]
    assert found.ledger["skipped"] == {"null": 1}


@pytest.mark.parametrize(("document", "texts"), [("line", ["a", "b"]), ("paragraph", ["a\nb", "c"])])
def test_lines_and_paragraphs_are_counted_too(workbench, document, texts):
    format = PlainText(type="text", document=document, max_documents_per_file=2)
    assert texts_of(tokenized(workbench, b"a\nb\n\nc\n\nd\n", "c.txt", format=format)) == texts


def test_what_is_beyond_a_limit_is_proven_and_not_judged(workbench):
    data = written("c.jsonl", TEXTS[:5]) + b"no JSON at all\n" * 1000
    format = limited("c.jsonl", 5)
    assert texts_of(tokenized(workbench, data, "c.jsonl", format=format)) == TEXTS[:5]
    raw = workbench.raw({"d.jsonl": data})
    (raw.folder / "d.jsonl").write_bytes(data[:-2] + b"X\n")
    with pytest.raises(DamageError, match=r"raw/bench/dev is damaged: d.jsonl is not what its record says"):
        workbench.tokenize(raw, workbench.bytes_tokenizer(), files=("d.jsonl",), format=format)


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.zst", "c.parquet"])
def test_shards_of_a_limited_file_are_kept_and_made_again_as_the_same_bytes(workbench, name):
    fields = {"format": limited(name, 150), "shard_bytes": 2000}
    raw, tokenizer = workbench.raw({name: written(name, TEXTS)}), workbench.bytes_tokenizer()
    folder, first = workbench.tokenize(raw, tokenizer, **fields)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert first.details["shards_made"] > 2
    (folder / f"{name}-00001.arrow").unlink()
    _, result = workbench.tokenize(raw, tokenizer, **fields)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert result.details["shards_made"] == 1


@pytest.mark.parametrize("name", ["c.jsonl", "c.jsonl.zst", "c.parquet"])
def test_any_shard_is_made_again_alone(workbench, name):
    """As `verify --rebuild` does, also of a file with a limit and of one side of a split."""
    raw, tokenizer = workbench.raw({name: written(name, TEXTS)}), workbench.bytes_tokenizer()
    fields = {"format": limited(name, 150), "shard_bytes": 2000, "split": side("train")}
    folder, _ = workbench.tokenize(raw, tokenizer, **fields)
    recipe = workbench.tokenized_recipe(raw, tokenizer, **fields)
    entries = file_entries(folder, list_files(folder))
    context = workbench.context(workbench.TOKENS, recipe, raw, tokenizer, folder="again")
    record = SimpleNamespace(files=entries, target=workbench.TOKENS, to_dict=lambda: {"provenance": {}})
    made = Made(cast(Record, record), folder)
    assert remake(context, made, Sample(100, 0)).difference is None


# ---- splits ----------------------------------------------------------------------------------------------------------


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1), max_size=60),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**63 - 1),
)
def test_every_text_is_on_one_side_whatever_else_there_is(texts, fraction, seed):
    sides = {text: is_on_side(text.encode(), side("validation", fraction, seed)) for text in texts}
    for text in texts:
        assert is_on_side(text.encode(), side("train", fraction, seed)) != sides[text]
        assert is_on_side(text.encode(), side("validation", min(0.99, fraction + 0.005), seed)) >= sides[text]


@pytest.mark.parametrize("name", FORMATS)
def test_both_parts_are_all_documents_and_none_is_in_both_however_they_are_cut(workbench, name):
    parts = {}
    for part, shard_bytes in (("train", 700), ("validation", 1 << 20)):
        parts[part] = token_set(
            workbench,
            {name: written(name, TEXTS)},
            part,
            format=FORMATS[name],
            split=side(part),
            shard_bytes=shard_bytes,
        )
    train, validation = (texts_of(parts[part]) for part in ("train", "validation"))
    assert sorted(train + validation) == sorted(TEXTS)
    assert 40 < len(validation) < 120
    assert [text for text in TEXTS if text in set(train)] == train
    assert parts["train"].ledger["skipped"] == {"other_part": len(validation)}
    assert parts["train"].ledger["rejections"] == []
    assert parts["train"].ledger["policy"]["split"] == {"part": "train", "validation_fraction": 0.2, "seed": 0}


def test_more_files_other_names_formats_and_processes_move_no_document(workbench, monkeypatch):
    from marin_build.data import tokenize

    first = set(texts_of(token_set(workbench, {"a.jsonl": written("c.jsonl", TEXTS)}, "one", split=side("validation"))))
    shuffled = random.Random(0).sample(TEXTS, len(TEXTS))
    files = {
        "b.jsonl": written("c.jsonl", ["new"] * 3 + shuffled[:150]),
        "c.jsonl": written("c.jsonl", shuffled[150:] + [f"more {number}" for number in range(500)]),
    }
    monkeypatch.setattr(tokenize, "BYTES_WORTH_A_PROCESS", 1)
    again = token_set(workbench, files, "two", split=side("validation"), processes=2, shard_bytes=3000)
    assert set(texts_of(again)) & set(TEXTS) == first


def test_another_seed_is_another_split_and_a_larger_fraction_takes_more(workbench):
    sides = {
        key: {text for text in TEXTS if is_on_side(text.encode(), side("validation", *key))}
        for key in ((0.2, 0), (0.2, 1), (0.4, 0))
    }
    assert sides[0.2, 0] != sides[0.2, 1]
    assert sides[0.2, 0] < sides[0.4, 0]


def test_known_sides_never_change():
    """Published sets stand on them."""
    chosen = [number for number in range(60) if is_on_side(f"text {number}".encode(), side("validation", 0.1, 7))]
    assert chosen == [4, 6, 17, 25, 59]


# ---- training on what is held out ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "files", "sign"),
    [
        ({"split": {"part": "validation"}}, ["a.jsonl"], "its recipe takes the validation part of a split"),
        ({"split": {"part": "train"}}, ["a.jsonl"], None),
        ({"source": {"files": ["c4/val/val*.jsonl.gz"]}}, ["a.jsonl"], "it is made from 'c4/val/val*.jsonl.gz'"),
        ({"source": {"paths": ["/data/x-test.jsonl"]}}, [], "it is made from '/data/x-test.jsonl'"),
        ({"source": {"files": ["*"]}}, ["ok.jsonl", "b/validation-00000.jsonl"], "it is made from 'b/validation-0"),
        ({"source": {"files": ["latest/*", "contest.jsonl", "value/*"]}}, ["greatest.jsonl"], None),
    ],
)
def test_a_training_set_that_looks_held_out_is_told(recipe, files, sign):
    found = sign_of_held_out(recipe, {"shards": [{"source": {"file": name}} for name in files]})
    assert found == sign if sign is None else found.startswith(sign)
