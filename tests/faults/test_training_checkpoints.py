"""What may happen to the checkpoints and logs of a training: a full disk, NaN, other devices."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import restore_on_meshes
from compiled import compiled_once
from llamas import on_virtual_devices
from repository import MODEL
from training_runner import PATIENCE_SECONDS, xla_flags

from marin_build.cli import main


def on_a_small_disk(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program that may mount file systems of its own; skips where that is not allowed."""
    may_mount = ["unshare", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*may_mount, "true"], capture_output=True).returncode:
        pytest.skip("this machine lets no small disk be mounted")
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": xla_flags(1)}
    command = [*may_mount, sys.executable, "-c", textwrap.dedent(script), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)


# ---- a full disk -----------------------------------------------------------------------------------------------------


@pytest.mark.row(5)
def test_a_disk_that_fills_while_a_checkpoint_is_saved_is_one_line_and_the_next_attempt_goes_on(runner, straight):
    script = """
        import json, os, subprocess, sys
        from pathlib import Path
        from training_runner import Runner

        with Runner(Path(sys.argv[1])) as runner:
            disk = runner.world("full").context().folder / "checkpoints"
            disk.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], check=True)
            free = os.statvfs(disk)
            (disk / "filler").write_bytes(bytes(free.f_bavail * free.f_frsize - 600_000))
            failed = runner.start("full").finish(code=1)
            manifests = sorted(str(path.relative_to(disk)) for path in disk.rglob("manifest.json"))
            (disk / "filler").unlink()
            print(json.dumps([failed, manifests, runner.run("full")]))
    """
    done = on_a_small_disk(script, str(runner.folder))
    assert done.returncode == 0, done.stderr
    failed, manifests, result = json.loads(done.stdout.splitlines()[-1])
    (line,) = [line for line in failed.splitlines() if line.startswith("the disk is full: ")]
    assert " bytes needed, " in line
    assert line.endswith(" free")
    assert "/marin_build/" not in failed, "a traceback"
    assert manifests == ["3/manifest.json"]
    assert result["details"]["resumed_at"] == [3]
    assert result["digest"] == straight["digest"]


@pytest.mark.row(31)
def test_a_log_on_a_full_disk_stops_with_one_line_and_the_training_goes_on(prepared, runner, monkeypatch):
    script = """
        import os, subprocess, sys
        from pathlib import Path

        logs = Path("artifacts", sys.argv[1], "logs")
        logs.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", logs], check=True)
        (logs / "filler").write_bytes(bytes(8192))
        os.execv(sys.executable, [sys.executable, "-m", "marin_build", "build", *sys.argv[1:]])
    """
    monkeypatch.chdir(prepared.folder)
    settings = ["log_every_steps=1", "wandb=disabled", f"compilation_cache={runner.folder}/cache"]
    done = on_a_small_disk(script, MODEL, "--config", *settings)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the work goes on") == 1, done.stderr
    assert "Traceback" not in done.stderr
    lines = (prepared.artifact(MODEL) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(21))


# ---- NaN -------------------------------------------------------------------------------------------------------------


def poison(monkeypatch, at: int) -> None:
    """Plant NaNs in the parameters that update `at` (from 1) computes its gradient with."""
    import jax

    from marin_build.training import loop

    compile_usual = loop.compile_steps

    def compile(run, graph, optimizer, placed, first):
        steps, number = compile_usual(run, graph, optimizer, placed, first), iter(range(first + 1, 1000))

        def train(state, batch):
            if next(number) == at:
                poisoned = jax.tree.map(lambda x: x.at[(0,) * x.ndim].set(np.nan), state.parameters)
                state = replace(state, parameters=poisoned)
            return steps.train(state, batch)

        return loop.Steps(train, steps.validation)

    monkeypatch.setattr(loop, "compile_steps", compile)


@pytest.mark.row(20)
def test_a_nan_in_a_batch_stops_there_and_a_retry_of_the_run_refuses_at_once(prepared, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(prepared.folder)
    monkeypatch.setenv("GLIBC_TUNABLES", "")  # or the command would start itself anew
    poison(monkeypatch, at=7)
    settings = ["rolling_checkpoint_steps=2", "log_every_steps=100", "wandb=disabled"]
    build = ["build", MODEL, "--run", "1", "--config", *settings, "compilation_cache=null"]
    folder = prepared.artifact(MODEL)
    with compiled_once(tmp_path / "compiled"):
        assert main(build) == 7
    said = capfd.readouterr().err
    assert "train/loss is nan at step 7: training stops, and nothing of this step was saved" in said
    assert f"{folder}/logs/batch-6.npz" in said
    assert prepared.record(MODEL) is None
    assert sorted(os.listdir(folder / "checkpoints")) == ["6"]
    assert_whole_and_finite(folder / "checkpoints/6")
    assert "NaN" not in (folder / "metrics.jsonl").read_text()

    # What was in the batch, and where it came from, can be examined.
    batch = np.load(folder / "logs/batch-6.npz")
    assert batch["tokens"].shape == batch["segment_ids"].shape == (4, 33)
    assert batch["set"].tolist() == ["play"] * 4
    assert len(set(batch["window"].tolist())) == 4
    assert_is_window(prepared, batch["tokens"][0], int(batch["window"][0]))

    attempts = len(list((folder / "logs").glob("*.log")))
    assert main(build) == 7
    assert "train/loss is nan at step 7" in capfd.readouterr().err
    assert len(list((folder / "logs").glob("*.log"))) == attempts, "refused before any work"


def assert_whole_and_finite(step: Path) -> None:
    import jax
    from orbax.checkpoint import v1 as orbax

    from marin_build.training.checkpoint import first_problem

    assert first_problem(step) is None
    loaded = orbax.load_checkpointables(step, {"parameters": None, "optimizer": None})
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(loaded))


def assert_is_window(prepared, tokens: np.ndarray, window: int) -> None:
    from repository import TOKENS

    from marin_build.data.shards import TokenizedSet

    ids = np.concatenate([shard.ids for shard in TokenizedSet.open(prepared.artifact(TOKENS)).shards])
    np.testing.assert_array_equal(tokens, ids[window * 32 : window * 32 + 33])


# ---- other devices ---------------------------------------------------------------------------------------------------


@pytest.mark.row(28)
def test_a_state_restored_on_fewer_and_fewer_devices_is_the_same_to_the_bit_and_so_nearly_are_its_losses(tmp_path):
    found, _ = on_virtual_devices(Path(restore_on_meshes.__file__), 8, str(tmp_path))
    assert list(found) == ["8", "4", "2", "1"]
    assert len({digest for one in found.values() for digest in (one["restored"], one["saved"])}) == 1
    for one in found.values():
        # float32 sums over devices come in another order, and an update of Adam lies between two losses.
        assert one["losses"] == pytest.approx(found["8"]["losses"], rel=1e-4)


@pytest.mark.soak
@pytest.mark.row(28)
def test_a_run_goes_on_on_another_number_of_devices(runner, straight):
    run = runner.pause("moved", "step")
    run.send(15)
    run.finish(code=6)
    result = runner.run("moved", devices=8, settings={"mesh": {"data": 2, "fsdp": 4}})
    assert result["details"]["mesh"] == {"data": 2, "fsdp": 4, "tensor": 1}
    assert result["details"]["resumed_at"] == [5]
    # As above, with 15 updates.
    assert result["metrics"]["eval/loss"] == pytest.approx(straight["metrics"]["eval/loss"], abs=2e-3)
