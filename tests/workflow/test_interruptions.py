"""Runs that are killed, interrupted or doubled: one plain rerun converges, and nothing is built twice at once."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

RAW = "raw/play/2026.01.01"
BYTES = "tokenizers/bytes/2026.01.01"
TOKENS = "tokenized/play/2026.01.01"


def end(run: subprocess.Popen[str]) -> str:
    return run.communicate(timeout=120)[0]


def attempts(repository, target):
    return len(list(repository.artifact(target).glob("logs/*.log")))


def wait_until(condition, what):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.05)


@pytest.fixture
def waiting(repository, gate):
    """A run whose first real work, on the raw text, waits at the gate."""
    run = repository.start(TOKENS, **gate.environment(WAIT_IN="raw"))
    gate.wait_for("raw", run)
    yield run
    gate.open()
    end(run)


def test_after_kill_9_of_snakemake_and_job_the_same_command_goes_on(repository, waiting):
    os.killpg(waiting.pid, signal.SIGKILL)
    end(waiting)
    found = repository.snakemake(TOKENS)
    assert found.code == 0, found.text
    assert repository.record(TOKENS) is not None


@pytest.mark.row(12)
def test_after_kill_9_of_snakemake_alone_its_job_is_not_doubled(repository, waiting, gate):
    os.kill(waiting.pid, signal.SIGKILL)
    found = repository.snakemake(TOKENS)
    assert found.code == 1
    assert "somebody else is building what would run" in found.text
    assert RAW in found.text
    assert "--config wait=true" in found.text
    assert "Traceback" not in found.text
    gate.open()
    wait_until(lambda: repository.record(RAW) is not None, "the orphan finishes")
    assert repository.snakemake(TOKENS).code == 0
    assert attempts(repository, RAW) == 1


@pytest.mark.row(12)
def test_a_second_clone_of_one_prefix_refuses_or_waits(repository, waiting, gate, tmp_path, new_repository):
    other = new_repository(tmp_path / "clone")
    shared = f"prefix={repository.folder}/artifacts"
    refused = other.snakemake(TOKENS, "--config", shared)
    assert refused.code == 1
    assert "somebody else is building" in refused.text
    second = other.start(TOKENS, "--config", shared, "wait=true")
    gate_open = time.monotonic() + 3
    while time.monotonic() < gate_open:
        assert second.poll() is None, end(second)
        time.sleep(0.1)
    gate.open()
    said = end(second)
    assert second.returncode == 0, said
    end(waiting)
    assert waiting.returncode == 0
    assert attempts(repository, RAW) == 1


def test_without_hooks_the_job_itself_refuses(repository, waiting, tmp_path, new_repository):
    other = new_repository(tmp_path / "clone")
    found = other.snakemake(RAW, "--no-hooks", "--config", f"prefix={repository.folder}/artifacts")
    assert found.code == 1
    assert "is being built by" in found.text
    assert attempts(repository, RAW) == 1


def test_a_dry_run_beside_a_live_builder_says_who_builds(repository, waiting):
    found = repository.snakemake("-n", TOKENS)
    assert found.code == 0
    assert "is building it" in found.table[RAW]


def test_control_c_stops_resumably(repository, waiting):
    os.killpg(waiting.pid, signal.SIGINT)
    said = end(waiting)
    assert waiting.returncode != 0
    assert "Traceback" not in said
    assert repository.snakemake(TOKENS).code == 0


def test_a_stop_is_tried_again_in_the_same_run(repository, gate):
    found = repository.snakemake(TOKENS, **gate.environment(STOP_ONCE="tokenized"))
    assert found.code == 0, found.text
    assert "pretended pre-emption" in found.text
    assert "Trying to restart job" in found.text
    assert attempts(repository, TOKENS) == 2


def test_a_lock_left_in_the_working_directory_stops_nobody(repository, waiting):
    os.killpg(waiting.pid, signal.SIGKILL)
    end(waiting)
    assert repository.snakemake("-n", TOKENS).code == 0
    assert "LockException" not in repository.snakemake(BYTES).text


def test_sigterm_to_all_stops_resumably_and_starts_nothing_anew(repository, waiting):
    os.killpg(waiting.pid, signal.SIGTERM)
    said = end(waiting)
    assert waiting.returncode != 0
    assert "Traceback" not in said
    assert attempts(repository, RAW) == 1, said
    assert repository.snakemake(TOKENS).code == 0
