"""Training in processes of their own: killed, stopped, on other devices, on several hosts. The result is the same.

On one machine "the same" means bits. On another number of devices sums come in another order, so losses agree to a
stated tolerance.
"""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import training_world
from training_world import TrainingWorld

SCRIPT = training_world.__file__
KILLS = 4
PATIENCE_SECONDS = 300


class Runner:
    """Starts training processes in worlds below one folder, with one cache of compiled programs for all."""

    def __init__(self, folder: Path):
        self.folder = folder

    def start(self, name: str, devices: int = 1, **options) -> subprocess.Popen:
        """Start training in the world of this name."""
        return self.spawn(self.command(name, **options), devices)

    def command(self, name: str, **options) -> list[str]:
        settings = {"compilation_cache": str(self.folder / "cache"), **options.get("settings", {})}
        return [sys.executable, SCRIPT, str(self.folder / name), json.dumps({**options, "settings": settings})]

    def spawn(self, command: list[str], devices: int = 1) -> subprocess.Popen:
        flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)

    def finish(self, process: subprocess.Popen, code: int = 0) -> str:
        output, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == code, f"exit code {process.returncode}\n{output}\n{errors}"
        return output

    def run(self, name: str, devices: int = 1, **options) -> dict:
        """Train to the end and return the result."""
        return json.loads(self.finish(self.start(name, devices, **options)).splitlines()[-1])

    def losses(self, name: str) -> list[tuple]:
        names = ("step", "train/loss", "train/grad_norm", "eval/loss", "eval/bpb")
        return [tuple(line.get(key, 0.0) for key in names) for line in TrainingWorld(self.folder / name).metrics]

    def lines(self, name: str) -> int:
        path = self.folder / name / training_world.TARGET / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    return Runner(tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module")
def straight(runner):
    return runner.run("straight")


def kill_once_it_trains(runner: Runner, name: str, dice: random.Random) -> bool:
    """Start a run, kill -9 it at a random moment after it wrote something new; False if it ended before."""
    before = runner.lines(name)
    process = runner.start(name)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while runner.lines(name) == before and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(dice.random() * 0.5)
    process.kill()
    process.communicate()
    return process.returncode == -signal.SIGKILL


def check_kills(runner: Runner, straight: dict, name: str, kills: int, seed: int) -> None:
    dice, killed = random.Random(seed), 0
    for _ in range(kills):
        killed += kill_once_it_trains(runner, name, dice)
    result = runner.run(name)
    assert killed > 0, f"seed {seed}: every run ended before it was killed"
    assert result["digest"] == straight["digest"], f"seed {seed}"
    assert runner.losses(name) == runner.losses("straight"), f"seed {seed}"
    assert sorted(os.listdir(TrainingWorld(runner.folder / name).checkpoints)) == ["10", "20"], f"seed {seed}"


@pytest.mark.row(3)
def test_a_run_killed_again_and_again_ends_with_the_bits_of_one_that_was_not(runner, straight):
    check_kills(runner, straight, "killed", KILLS, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 22))
@pytest.mark.row(3)
def test_a_run_killed_at_many_random_moments_ends_with_the_same_bits(runner, straight, seed):
    check_kills(runner, straight, f"soak{seed}", KILLS, seed)


@pytest.mark.row(17)
def test_sigterm_saves_and_ends_with_the_code_for_a_retry_which_ends_with_the_same_bits(runner, straight):
    process = runner.start("stopped")
    while runner.lines("stopped") < 5 and process.poll() is None:
        time.sleep(0.002)
    process.terminate()
    output = runner.finish(process, code=6)
    assert "which is saved" in output
    step = int(output.split("stopped at step ")[1].split()[0])
    assert str(step) in os.listdir(TrainingWorld(runner.folder / "stopped").checkpoints)
    result = runner.run("stopped")
    assert result["details"]["resumed_at"] == [step]
    assert result["digest"] == straight["digest"]
    assert runner.losses("stopped") == runner.losses("straight")


@pytest.mark.row(28)
def test_a_run_goes_on_on_another_number_of_devices(runner, straight):
    process = runner.start("moved")
    while runner.lines("moved") < 8 and process.poll() is None:
        time.sleep(0.002)
    process.terminate()
    runner.finish(process, code=6)
    result = runner.run("moved", devices=8, settings={"mesh": {"data": 2, "fsdp": 4}})
    assert result["details"]["mesh"] == {"data": 2, "fsdp": 4, "tensor": 1}
    assert len(result["details"]["resumed_at"]) == 1
    # float32 sums over devices come in another order, and up to 15 steps of Adam follow.
    assert result["metrics"]["eval/loss"] == pytest.approx(straight["metrics"]["eval/loss"], abs=2e-3)


def test_a_batch_that_the_devices_cannot_share_is_one_clear_line(runner):
    process = runner.start("indivisible", devices=8, global_batch_size=12)
    output = runner.finish(process, code=2)
    assert "global_batch_size 12 is not divisible by the 8 devices that share a batch" in output


def test_two_processes_train_together_to_the_losses_of_one(runner):
    short = {"steps": 10, "settings": {"rolling_checkpoint_steps": 6}}
    alone = runner.run("alone", devices=4, **short)
    TrainingWorld(runner.folder / "together")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pair = [runner.start("together", devices=2, distributed=[rank, 2, port], **short) for rank in range(2)]
    first, second = (json.loads(runner.finish(process).splitlines()[-1]) for process in pair)
    assert first["details"]["processes"] == 2
    assert first["digest"] == second["digest"]
    for one, two in zip(runner.losses("alone"), runner.losses("together"), strict=True):
        # The same sums over four devices; the collectives of two processes may add in another order.
        assert two == pytest.approx(one, rel=1e-4)
    assert first["metrics"]["eval/bpb"] == pytest.approx(alone["metrics"]["eval/bpb"], rel=1e-4)


@pytest.mark.row(5)
def test_a_disk_that_fills_while_a_checkpoint_is_saved_is_one_line_and_the_next_attempt_goes_on(runner, straight):
    world = TrainingWorld(runner.folder / "full")
    disk = world.folder / "checkpoints"
    shutil.rmtree(disk)
    disk.mkdir()
    train = shlex.join(runner.command("full"))
    script = f"""
        mount -t tmpfs -o size=3m tmpfs {disk} || exit 99
        head -c 2300000 /dev/zero > {disk}/filler
        {train}; echo "first: $?"
        rm {disk}/filler
        {train}; echo "second: $?"
    """
    process = runner.spawn(["unshare", "--map-root-user", "--mount", "bash", "-c", script])
    output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    if process.returncode == 99 or "unshare" in errors:
        pytest.skip("this machine lets no small disk be mounted")
    first, second = output.split("first: 1\n")
    full = next(line for line in first.splitlines() if line.startswith("the disk is full: "))
    assert " bytes needed, " in full
    # Threads of Orbax that end after the failure may complain about their closed event loop; that is theirs.
    assert "Traceback" not in first
    assert "/marin_build/" not in errors
    result, code = second.splitlines()[-2:]
    assert code == "second: 0", errors
    assert json.loads(result)["digest"] == straight["digest"]
