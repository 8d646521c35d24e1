"""SIGTERM while a model is trained: in a step, in a save, while it compiles, twice, and as Snakemake sees it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import training_world
from repository import MODEL
from training_runner import NAMES, PATIENCE_SECONDS, xla_flags

GRACE_SECONDS = 25
ROLLING = ("rolling_checkpoint_steps=5", "log_every_steps=1", "wandb=disabled")


def is_committed(runner, name, step):
    from marin_build.training.checkpoint import first_problem

    return first_problem(runner.world(name).checkpoints / f"{step}") is None


@pytest.mark.row(17)
def test_sigterm_saves_a_whole_checkpoint_and_the_next_run_ends_with_the_bits_of_one_never_stopped(runner, straight):
    run = runner.pause("stopped", "step")
    sent = time.monotonic()
    run.send(signal.SIGTERM)
    output = run.finish(code=6)
    assert time.monotonic() - sent < GRACE_SECONDS
    assert "was stopped at step 5 of 20, which is saved\n  the same command goes on from there" in output
    assert runner.checkpoints("stopped") == ["5"]
    assert is_committed(runner, "stopped", 5)
    result = runner.run("stopped")
    assert result["details"]["resumed_at"] == [5]
    assert result["digest"] == straight["digest"]
    assert runner.losses("stopped") == runner.losses("straight")


@pytest.mark.row(18)
def test_sigterm_during_a_save_commits_it_and_then_the_step_reached(runner):
    run = runner.pause("in_save", "save")
    run.send(signal.SIGTERM)
    output = run.finish(code=6)
    step = int(output.split("was stopped at step ")[1].split()[0])
    assert step >= 6
    assert runner.checkpoints("in_save") == [f"{step}"]
    assert is_committed(runner, "in_save", step)


@pytest.mark.row(18)
def test_a_second_sigterm_ends_at_once_and_the_last_committed_step_stays(runner, straight):
    run = runner.pause("twice", "long save")
    run.send(signal.SIGTERM)
    time.sleep(0.5)
    assert run.code is None
    sent = time.monotonic()
    run.send(signal.SIGTERM)
    run.finish(code=128 + signal.SIGTERM)
    assert time.monotonic() - sent < 5
    assert runner.checkpoints("twice") == ["3", "6"]
    assert is_committed(runner, "twice", 3)
    assert not is_committed(runner, "twice", 6)
    assert runner.run("twice")["digest"] == straight["digest"]
    assert runner.losses("twice") == runner.losses("straight")


@pytest.mark.row(18)
def test_sigterm_while_compiling_ends_promptly_and_the_last_committed_step_stays(runner):
    run = runner.pause("compiling", "step")
    run.send(signal.SIGTERM)
    run.finish(code=6)
    # A whole process: it has to end with its own code although a thread of XLA still compiles.
    options = json.dumps(runner.options({"pause": "compilation"}))
    command = [sys.executable, training_world.__file__, str(runner.folder / "compiling"), options]
    (runner.folder / "compiling" / training_world.PAUSED).unlink()
    environment = {**os.environ, "XLA_FLAGS": xla_flags(1)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until = time.monotonic() + PATIENCE_SECONDS
    while not (runner.folder / "compiling" / training_world.PAUSED).exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.01)
    sent = time.monotonic()
    process.terminate()
    output = process.communicate(timeout=PATIENCE_SECONDS)[0]
    assert process.returncode == 6, output
    assert time.monotonic() - sent < 10
    assert "was stopped at step 5 of 20, which is saved" in output
    assert "Traceback" not in output
    assert runner.checkpoints("compiling") == ["5"]
    assert is_committed(runner, "compiling", 5)


# ---- under Snakemake -------------------------------------------------------------------------------------------------

PLANT = '''
"""Ends a training by SIGKILL at step 7 and by SIGTERM at step 12, once each."""

import os, signal, sys
from pathlib import Path

if "build" in sys.argv[1:2]:
    import marin_build.build as table

    builder_of = table.builder_of

    def planted(kind):
        def build(context):
            from marin_build.training.journal import Journal

            usual = Journal.write

            def write(journal, step, metrics):
                usual(journal, step, metrics)
                name = {7: "SIGKILL", 12: "SIGTERM"}.get(step)
                if name and not (mark := Path(os.environ["MARKS"]) / name).exists():
                    mark.touch()
                    os.kill(os.getpid(), getattr(signal, name))

            Journal.write = write
            return builder_of(kind)(context)

        return build

    table.builder_of = planted
'''


@pytest.mark.soak
@pytest.mark.row(3)
@pytest.mark.row(17)
def test_snakemake_retries_a_training_that_was_killed_and_one_that_was_stopped(prepared, runner, tmp_path):
    undisturbed, disturbed = prepared, tmp_path / "disturbed"
    shutil.copytree(undisturbed.folder, disturbed, symlinks=True)
    settings = [*ROLLING, f"compilation_cache={runner.folder}/cache"]
    done = undisturbed.command(
        sys.executable, "-m", "marin_build", "build", MODEL, "--config", *settings, XLA_FLAGS=xla_flags(1)
    )
    assert done.code == 0, done.text
    repository = type(undisturbed)(disturbed)
    (tmp_path / "python").mkdir()
    (tmp_path / "python/sitecustomize.py").write_text(PLANT)
    path = f"{tmp_path / 'python'}:{os.environ.get('PYTHONPATH', '')}"
    found = repository.snakemake(
        MODEL, "--config", *settings, MARKS=str(tmp_path), PYTHONPATH=path, XLA_FLAGS=xla_flags(1)
    )
    assert found.code == 0, found.text
    assert found.text.count("Trying to restart job") == 2
    assert f"{MODEL} was stopped at step 12 of 20, which is saved" in found.text
    straight, record = undisturbed.record(MODEL), repository.record(MODEL)
    assert record.digest == straight.digest
    assert record.provenance["resumed_at"][-1] == 12
    assert len(record.provenance["attempts"]) == 3
    assert losses(repository) == losses(undisturbed)
    assert repository.snakemake(MODEL).is_idle


def losses(repository):
    lines = (repository.artifact(MODEL) / "metrics.jsonl").read_text().splitlines()
    return [tuple(json.loads(line).get(name, 0.0) for name in NAMES) for line in lines]
