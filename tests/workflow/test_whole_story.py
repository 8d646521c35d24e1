"""From raw text to a trained model, and what happens to it then: the promise of this project, with a tiny model."""

from __future__ import annotations

import os
import shutil
import signal
import time

import pytest

RAW = "raw/play/2026.01.01"
BYTES = "tokenizers/bytes/2026.01.01"
TOKENS = "tokenized/play/2026.01.01"
HELD_OUT = "tokenized/held_out/2026.01.01"
MODEL = "checkpoints/tiny/2026.01.01"
MODEL_2 = "checkpoints/tiny/2026.01.01.1"


@pytest.fixture(scope="module")
def trained(tmp_path_factory, new_repository):
    """A repository in which the model was trained by its path; also where XLA keeps what it compiled."""
    made = new_repository(tmp_path_factory.mktemp("story") / "repository")
    found = made.snakemake(MODEL, *quick(made))
    assert found.code == 0, found.text
    return made


@pytest.fixture
def after(trained, repository):
    """What is there after the training, in a directory of its own."""
    shutil.copytree(trained.folder / "artifacts", repository.folder / "artifacts")
    return repository


def quick(made):
    return ["--config", f"compilation_cache={made.folder.parent}/compiled", "wandb=disabled"]


def test_one_command_trains_and_records_the_scores(trained):
    record = trained.record(MODEL)
    assert {f"{entry['name']}/{entry['version']}" for entry in record.dependencies} == {BYTES, TOKENS}
    assert record.metrics["eval/bpb"] > 0
    assert (trained.artifact(MODEL) / "metrics.jsonl").exists()


def test_then_there_is_nothing_to_do_with_or_without_history(after, snakemake):
    assert snakemake(MODEL).is_idle
    shutil.rmtree(after.folder / ".snakemake")
    assert snakemake(MODEL).is_idle


def test_a_changed_learning_rate_is_refused_and_bumped_and_reuses_the_tokens(after, snakemake, trained):
    after.edit(MODEL, "learning_rate: 3e-3", "learning_rate: 1e-3")
    refused = snakemake(MODEL)
    assert refused.code == 1
    assert "optimizer.learning_rate: 0.003" in refused.text
    bumped = after.command("marin-build", "bump", MODEL, "--version", MODEL_2.rpartition("/")[2])
    assert bumped.code == 0, bumped.text
    after.edit(MODEL, "learning_rate: 1e-3", "learning_rate: 3e-3")
    assert list(snakemake("-n", MODEL_2).table) == [MODEL_2]
    found = after.snakemake(MODEL_2, *quick(trained))
    assert found.code == 0, found.text
    assert after.record(MODEL_2).fingerprint != after.record(MODEL).fingerprint
    assert after.record(MODEL_2).digest != after.record(MODEL).digest


def test_killed_in_the_middle_it_goes_on_and_ends_with_the_same_bits(after, trained):
    after.write(MODEL_2, after.path(MODEL).read_text().replace("steps: 20", "steps: 400").replace("10\n", "400\n"))
    often = [*quick(trained), "rolling_checkpoint_steps=20"]
    run = after.start(MODEL_2, *often)
    until = time.monotonic() + 300
    while not list(after.artifact(MODEL_2).glob("checkpoints/*/manifest.json")):
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.02)
    os.killpg(run.pid, signal.SIGKILL)
    run.communicate()
    assert after.record(MODEL_2) is None
    again = after.snakemake(MODEL_2, *often)
    assert again.code == 0, again.text
    assert "starting at step 0" not in again.text
    digest = after.record(MODEL_2).digest
    undisturbed = after.snakemake("-f", MODEL_2, *quick(trained))
    assert undisturbed.code == 0, undisturbed.text
    assert after.record(MODEL_2).digest == digest


def test_a_flipped_byte_is_found_named_and_repaired(after, snakemake):
    shard = sorted(after.artifact(TOKENS).glob("*.arrow"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    assert snakemake(MODEL).is_idle, "a plain run asks for sizes only"
    checked = after.command("marin-build", "verify", "--full", TOKENS)
    assert checked.code == 4
    assert shard.name in checked.text
    assert list(snakemake("-n", MODEL).table) == [TOKENS]
    assert after.snakemake(MODEL).code == 0
    assert shard.read_bytes() == whole
    assert after.command("marin-build", "verify", "--full", TOKENS).code == 0
    assert snakemake(MODEL).is_idle, "the same bytes came back: the model is as it was"


def test_a_model_that_is_beyond_repair_keeps_its_record_and_is_not_trained_anew_unasked(after, trained):
    """Twice: the first refusal must leave no state from which the second would train from nothing."""
    checkpoints = after.artifact(MODEL) / "checkpoints"
    os.rename(checkpoints, after.folder / "taken")
    for _ in range(2):
        refused = after.command("marin-build", "build", MODEL, *quick(trained))
        assert refused.code == 4, refused.text
        assert "train from nothing with -f" in refused.text
        assert after.record(MODEL).metrics == trained.record(MODEL).metrics
    shutil.rmtree(checkpoints, ignore_errors=True)
    os.rename(after.folder / "taken", checkpoints)
    assert after.command("marin-build", "verify", "--full", MODEL).code == 0
