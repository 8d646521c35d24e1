"""Builds as a user runs them: raw text → tokenizer → shards, each job a process of its own."""

from __future__ import annotations

import json
import os
import shutil

import pytest

RAW = "raw/play/2026.01.01"
BYTES = "tokenizers/bytes/2026.01.01"
TOKENS = "tokenized/play/2026.01.01"
HELD_OUT = "tokenized/held_out/2026.01.01"
TOKENS_DEV = "tokenized/play/dev"


def attempts(repository, target):
    """How often work was begun on a target."""
    return len(list(repository.artifact(target).glob("logs/*.log")))


@pytest.fixture
def snakemake(repository):
    """In a process of its own: jobs write to its terminal."""
    return repository.snakemake


@pytest.fixture(scope="module")
def built_once(tmp_path_factory, new_repository):
    made = new_repository(tmp_path_factory.mktemp("built") / "repository")
    found = made.snakemake(TOKENS)
    assert found.code == 0, found.text
    return made


@pytest.fixture
def built(built_once, repository):
    """The repository with TOKENS and what it needs finished."""
    for name in ("artifacts", ".marin", ".snakemake"):
        shutil.copytree(built_once.folder / name, repository.folder / name)
    return repository


@pytest.mark.row(29)
def test_one_command_builds_the_chain_and_the_next_finds_nothing_to_do(built, snakemake):
    for target in (RAW, BYTES, TOKENS):
        assert built.record(target).target.version == "2026.01.01"
        assert json.loads(built.mirror(target).read_text())["fingerprint"] == built.record(target).fingerprint
    assert snakemake(TOKENS).is_idle
    shutil.rmtree(built.folder / ".snakemake")
    assert snakemake(TOKENS).is_idle
    shutil.rmtree(built.folder / ".marin")
    assert snakemake(TOKENS).is_idle
    assert [attempts(built, target) for target in (RAW, BYTES, TOKENS)] == [1, 1, 1]


def test_a_job_runs_without_an_activated_environment(repository):
    bare = ":".join(folder for folder in os.environ["PATH"].split(":") if not os.path.exists(f"{folder}/snakemake"))
    found = repository.snakemake(BYTES, PATH=bare)
    assert found.code == 0, found.text


def test_force_rebuilds_what_is_named_and_keeps_the_old_until_then(built, snakemake):
    old = built.record(TOKENS)
    assert snakemake("-f", TOKENS).code == 0
    new = built.record(TOKENS)
    assert new.provenance["attempt"] != old.provenance["attempt"]
    assert new.digest == old.digest
    assert attempts(built, RAW) == 1
    assert not list((built.folder / ".marin/forced").rglob("*.json")), "what is done is no longer marked"
    assert snakemake(TOKENS).is_idle


def test_forcing_a_rule_rebuilds_all_its_targets_of_the_closure(built, snakemake):
    before = {target: built.record(target).provenance["attempt"] for target in (RAW, BYTES, TOKENS)}
    assert snakemake("-R", "tokenizer", "tokenize", "--", TOKENS).code == 0
    after = {target: built.record(target).provenance["attempt"] for target in (RAW, BYTES, TOKENS)}
    assert [target for target in before if before[target] != after[target]] == [BYTES, TOKENS]


def test_a_forced_rebuild_that_fails_leaves_the_old_artifact(built, snakemake):
    old = built.record(TOKENS)
    built.edit(TOKENS, "text_key: text", "text_key: no_such_key")
    found = snakemake("-f", TOKENS)
    assert found.code == 1
    assert built.record(TOKENS) == old
    assert (built.artifact(TOKENS) / old.files[0]["path"]).exists()
    built.edit(TOKENS, "text_key: no_such_key", "text_key: text")
    assert snakemake(TOKENS).is_idle


def test_a_mark_left_by_a_dead_run_forces_nothing_later(built, snakemake):
    mark = built.folder / f".marin/forced/{TOKENS}.json"
    mark.parent.mkdir(parents=True)
    mark.write_text('{"run": "0123456789ab"}')
    (built.artifact(RAW) / "train.jsonl").unlink()
    assert snakemake(TOKENS).code == 0
    assert not mark.exists()
    assert attempts(built, TOKENS) == 1


def test_a_typed_dev_is_rebuilt_each_time_and_a_needed_one_is_not(built, snakemake):
    assert snakemake(TOKENS_DEV).code == 0
    first = built.record(TOKENS_DEV).provenance["attempt"]
    assert snakemake(TOKENS_DEV).code == 0
    second = built.record(TOKENS_DEV).provenance["attempt"]
    assert second != first
    assert attempts(built, RAW) == 1


@pytest.mark.row(7, 9)
def test_damage_is_repaired_by_the_next_plain_run(built, snakemake):
    shard = next(built.artifact(TOKENS).glob("*.arrow"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-8])
    other = built.artifact(RAW) / "train.jsonl"
    other.unlink()
    found = snakemake(TOKENS)
    assert found.code == 0, found.text
    assert shard.read_bytes() == whole
    assert other.exists()
    assert snakemake(TOKENS).is_idle


def test_a_record_that_is_garbage_is_repaired_too(built, snakemake):
    (built.artifact(TOKENS) / ".artifact.json").write_text("{")
    assert snakemake(TOKENS).code == 0
    assert built.record(TOKENS) is not None


def test_a_failed_job_shows_its_error_once_and_names_the_log(repository, snakemake):
    repository.edit(TOKENS, "text_key: text", "text_key: no_such_key")
    found = snakemake(TOKENS)
    assert found.code == 1
    assert "no_such_key" in found.text
    assert f"{TOKENS} was not finished; the last lines of" in found.text
    assert f"artifacts/{TOKENS}/logs/" in found.text
    assert "Traceback" not in found.text


def test_a_final_failure_is_not_tried_again(repository, snakemake):
    repository.edit(TOKENS, "text_key: text", "text_key: no_such_key")
    assert snakemake(TOKENS).code == 1
    assert attempts(repository, TOKENS) == 1, "retries of the same run stop at once"
    assert snakemake(TOKENS).code == 1
    assert attempts(repository, TOKENS) == 2, "another run tries again"


def test_other_targets_are_untouched_by_a_failure(repository, snakemake):
    repository.edit(TOKENS, "text_key: text", "text_key: no_such_key")
    assert snakemake("--keep-going", TOKENS, HELD_OUT).code == 1
    assert repository.record(HELD_OUT) is not None


def test_several_targets_are_built_together(repository, snakemake):
    assert snakemake(TOKENS, f"./{HELD_OUT}/").code == 0
    assert repository.record(TOKENS).digest == repository.record(HELD_OUT).digest


def test_until_builds_no_further(repository, snakemake):
    assert snakemake(TOKENS, "--until", "raw").code == 0
    assert repository.record(RAW) is not None
    assert repository.record(TOKENS) is None


def test_an_unwritable_prefix_is_a_clear_line(repository, snakemake):
    (repository.folder / "blocked").write_text("a file where a folder should be")
    found = snakemake(BYTES, "--config", "prefix=blocked")
    assert found.code == 1
    assert "blocked" in found.text
    assert "Traceback" not in found.text


def test_the_settings_of_the_call_reach_the_job(repository, snakemake):
    assert snakemake(BYTES, "--config", "prefix=elsewhere").code == 0
    assert (repository.folder / "elsewhere" / BYTES / ".artifact.json").exists()
    assert not (repository.folder / "artifacts").exists()


def test_settings_with_spaces_quotes_and_braces_reach_the_job(repository, snakemake):
    prefix = "my 'own' $HOME {artifacts}"
    found = snakemake(BYTES, "--config", f"prefix={prefix}", "mesh={data: 1, fsdp: 1}")
    assert found.code == 0, found.text
    assert (repository.folder / prefix / BYTES / ".artifact.json").exists()


def test_a_working_directory_with_spaces_is_no_problem(tmp_path, new_repository):
    made = new_repository(tmp_path / "my models ü")
    assert made.snakemake(BYTES).code == 0
    assert made.snakemake(f"{made.folder}/artifacts/{BYTES}").is_idle
