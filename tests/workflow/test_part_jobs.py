"""Part jobs under Snakemake: planned, run, killed, forced, with the same set at the end."""

from __future__ import annotations

import os
import signal

import pytest

RAW = "raw/play/2026.01.01"
BYTES = "tokenizers/bytes/2026.01.01"
TOKENS = "tokenized/play/2026.01.01"
HELD_OUT = "tokenized/held_out/2026.01.01"
THREE = ("--config", "tokenize_parts=3")


def part(number, parts=3):
    return f"parts/play/{number:05d}-of-{parts:05d}/2026.01.01"


def jobs(found, rule):
    counts = [line.split() for line in found.text.splitlines() if line.split()[:1] == [rule]]
    return int(counts[0][1]) if counts else 0


def test_a_plan_says_into_how_many_parts_the_work_is_shared(snakemake):
    found = snakemake("-n", TOKENS, *THREE)
    assert found.code == 0, found.text
    assert found.table[TOKENS] == "missing, joined from 3 part jobs"
    assert jobs(found, "tokenize_part") == 3
    assert part(2) in found.text


def test_in_a_plan_of_very_many_parts_one_stands_for_all(snakemake):
    found = snakemake("-n", TOKENS, "--config", "tokenize_parts=5000")
    assert found.code == 0, found.text
    assert found.table[TOKENS] == "missing, joined from 5,000 part jobs"
    assert jobs(found, "tokenize_part") == 1


def test_a_recipe_says_it_for_a_platform_and_a_setting_for_all(repository, snakemake):
    repository.path(TOKENS).write_text(repository.path(TOKENS).read_text() + "execution:\n  slurm: {parts: 4}\n")
    assert jobs(snakemake("-n", TOKENS), "tokenize_part") == 0
    assert jobs(snakemake("-n", TOKENS, "--config", "platform=slurm"), "tokenize_part") == 4
    assert jobs(snakemake("-n", TOKENS, "--config", "platform=slurm", "tokenize_parts=2"), "tokenize_part") == 2


def test_joined_from_parts_a_set_is_that_of_one_job_and_nothing_is_left_to_do(repository):
    alone = repository.snakemake(HELD_OUT)
    assert alone.code == 0, alone.text
    found = repository.snakemake(TOKENS, *THREE)
    assert found.code == 0, found.text
    assert jobs(found, "tokenize_part") == 3
    assert repository.record(TOKENS).digest == repository.record(HELD_OUT).digest
    assert repository.record(TOKENS).provenance["shards_made"] == 0
    assert all(repository.mirror(part(number)).is_file() for number in range(3))
    assert repository.snakemake(TOKENS, *THREE).is_idle
    assert repository.snakemake(TOKENS, "--config", "tokenize_parts=7").is_idle


@pytest.mark.row(2)
def test_after_kill_9_of_everything_only_the_parts_that_are_missing_are_made(repository, gate):
    made = repository.snakemake(RAW, BYTES, part(0), part(2))
    assert made.code == 0, made.text
    before = [repository.record(part(number)).provenance["attempt"] for number in (0, 2)]
    run = repository.start(TOKENS, *THREE, **gate.environment(WAIT_IN="parts"))
    gate.wait_for("parts", run)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate(timeout=120)
    gate.open()
    found = repository.snakemake(TOKENS, *THREE)
    assert found.code == 0, found.text
    assert jobs(found, "tokenize_part") == 1
    assert [repository.record(part(number)).provenance["attempt"] for number in (0, 2)] == before
    assert repository.record(TOKENS).provenance["shards_made"] == 0


def test_forced_a_set_is_made_from_parts_that_are_made_anew(repository):
    assert repository.snakemake(TOKENS, *THREE).code == 0
    old = {number: repository.record(part(number)).provenance["attempt"] for number in range(3)}
    digest = repository.record(TOKENS).digest
    found = repository.snakemake("-f", TOKENS, *THREE)
    assert found.code == 0, found.text
    assert all(repository.record(part(number)).provenance["attempt"] != old[number] for number in range(3))
    assert repository.record(TOKENS).digest == digest
    assert repository.record(TOKENS).provenance["shards_made"] == 0


def test_a_part_that_fails_says_why_and_where(repository):
    text = repository.path(TOKENS).read_text()
    repository.path(TOKENS).write_text(text.replace("text_key: text", "text_key: words"))
    found = repository.snakemake(TOKENS, *THREE)
    assert found.code == 1
    assert "no key 'words'" in found.text
    assert f"{part(0)} was not finished; the last lines of" in found.text
    assert "Traceback" not in found.text


def test_parts_of_an_edited_recipe_are_made_anew(repository):
    assert repository.snakemake(RAW, BYTES, part(0)).code == 0
    repository.edit(TOKENS, "shard_bytes: 50000", "shard_bytes: 40000")
    found = repository.snakemake(TOKENS, *THREE)
    assert found.code == 0, found.text
    assert jobs(found, "tokenize_part") == 3
    assert repository.record(TOKENS).provenance["shards_made"] == 0


@pytest.mark.row(12)
def test_a_second_clone_of_one_prefix_refuses_while_a_part_is_being_made(repository, gate, tmp_path, new_repository):
    assert repository.snakemake(RAW, BYTES).code == 0
    run = repository.start(TOKENS, *THREE, **gate.environment(WAIT_IN="parts"))
    gate.wait_for("parts", run)
    other = new_repository(tmp_path / "clone")
    refused = other.snakemake(TOKENS, *THREE, f"prefix={repository.folder}/artifacts")
    assert refused.code == 1
    assert "somebody else is building what would run" in refused.text
    assert "parts/play/0000" in refused.text
    assert "localrule" not in refused.text, "no job was started"
    gate.open()
    run.communicate(timeout=120)
    assert run.returncode == 0
