"""The check of the fast encoder in a run: planned, built before token sets, and never in the way of what is there."""

from __future__ import annotations

import json

import pytest
from repository import RAW

from marin_build.recipe import derived

WORDS, SET = "tokenizers/words/2026.01.01", "tokenized/words/2026.01.01"
CHECK = "checks/encoder/words/2026.01.01"
TRAINED = f"""
tokenizer:
  method: byte_level_bpe
  text:
    - {{target: {RAW}, files: [validation.jsonl], format: {{type: jsonl, text_key: text}}}}
  vocabulary_size: 300
  split_regex: '\\p{{L}}+|\\p{{N}}+|[^\\p{{L}}\\p{{N}}]+'
  special_tokens: {{bos: <|bos|>, eos: <|eos|>, pad: null}}
"""
TOKENIZED = f"""
tokenizer: {WORDS}
source: {{type: artifact, target: {RAW}, files: [validation.jsonl]}}
format: {{type: jsonl, text_key: text}}
add_bos: true
add_eos: true
shard_bytes: 50000
token_budget: null
max_bad_documents: 0
"""


@pytest.fixture
def words(repository):
    repository.write(WORDS, TRAINED)
    repository.write(SET, TOKENIZED)
    return repository


def test_a_token_set_is_made_with_the_fast_encoder_after_its_check_and_with_the_reference_where_that_is_asked_for(
    words,
):
    found = words.snakemake("--cores", "2", SET)
    assert found.code == 0, found.text
    check = words.record(CHECK)
    assert check.metrics["equal"] == 1
    assert json.loads((words.artifact(CHECK) / "parity.json").read_bytes())["encoder"] == "fastokens"
    record = words.record(SET)
    assert record.provenance["encoder"]["name"] == "fastokens"
    assert CHECK not in [f"{entry['name']}/{entry['version']}" for entry in record.dependencies]
    assert words.snakemake("--cores", "2", SET).is_idle
    again = words.snakemake("--cores", "2", "-f", SET, "--config", "encoder=tokenizers")
    assert again.code == 0, again.text
    assert words.record(SET).provenance["encoder"]["name"] == "tokenizers"
    assert words.record(SET).digest == record.digest


def test_the_plan_has_one_check_a_tokenizer_and_none_without(words, snakemake):
    words.write("tokenized/more/2026.01.01", TOKENIZED)
    found = snakemake("-n", SET, "tokenized/more/2026.01.01")
    assert [target for target in found.table if target.startswith("checks/")] == [CHECK]
    found = snakemake("-n", SET, "--config", "encoder=tokenizers")
    assert set(found.table) == {RAW, WORDS, SET}


def test_a_check_of_another_library_is_made_anew_only_when_a_set_is_to_be_made(words, snakemake, monkeypatch):
    words.finish(RAW, WORDS)
    monkeypatch.setattr(derived, "installed", lambda library: "0.0.1")
    words.finish(CHECK)
    monkeypatch.undo()
    words.finish(SET)
    assert snakemake("-n", SET).table == {}
    words.write("tokenized/more/2026.01.01", TOKENIZED)
    table = snakemake("-n", SET, "tokenized/more/2026.01.01").table
    assert set(table) == {CHECK, "tokenized/more/2026.01.01"}
    assert table[CHECK].startswith("drifted (built from another recipe")
