"""Clocks and modification times decide nothing: not what is built, not its bytes, not who holds a lease."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from artifact_world import RAW, Parts, World
from clock import WrongClock
from repository import BYTES, TOKENS, Repository
from repository import RAW as TEXT

from marin_build.artifact.lease import holder, parse_lease
from marin_build.artifact.store import LEASE
from marin_build.errors import LeasedError
from marin_build.recipe.target import parse_target

DAY = 86_400


@pytest.fixture
def clock(tmp_path: Path) -> WrongClock:
    folder = tmp_path / "clock"
    folder.mkdir()
    return WrongClock(folder)


def start(world: World, clock: WrongClock, *options: str) -> subprocess.Popen[str]:
    environment = {**os.environ, **clock.environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(world.command(RAW, *options), cwd=world.folder, env=environment, **pipes)


def wait_for_part(world: World, number: int, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while not world.path(RAW, f"part-{number}").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.row(15)
def test_the_library_really_moves_the_clock(clock: WrongClock):
    show = [sys.executable, "-c", "import time, datetime; print(time.time(), datetime.datetime.now().timestamp())"]
    for days in (-2, 2):
        clock.set(days * DAY)
        told = subprocess.run(show, env={**os.environ, **clock.environment}, capture_output=True, text=True, check=True)
        for seconds in map(float, told.stdout.split()):
            assert abs(seconds - time.time() - days * DAY) < 600


@pytest.mark.row(15)
@pytest.mark.parametrize("days", [-2, 2])
def test_a_clock_days_off_makes_the_same_bytes_and_the_same_decisions(world: World, clock: WrongClock, days: int):
    digest = world.build(RAW).record.digest
    made = world.record(RAW)
    clock.set(days * DAY)
    reused = start(world, clock)
    assert reused.communicate()[0].strip() == "reused"
    forced = start(world, clock, "--force", "r1")
    said = forced.communicate()[0]
    assert forced.returncode == 0, said
    assert "built part-0" in said
    assert world.record(RAW).digest == digest
    assert world.record(RAW).provenance["attempt"] != made.provenance["attempt"]
    assert not world.build(RAW).built, "what a wrong clock dated is finished all the same"


@pytest.mark.row(15)
def test_a_clock_that_steps_during_the_work_neither_loses_nor_frees_a_lease(world: World, clock: WrongClock):
    """Backwards by two days, then far forward: the owner beats on, and nobody else gets in."""
    builder = start(world, clock, "--parts", "8", "--part-seconds", "0.3", "--lease-seconds", "1.5")
    for number, days in enumerate((-2, 3)):
        wait_for_part(world, number, builder)
        clock.set(days * DAY)
        wait_for_part(world, number + 3, builder)  # past the lease time, by heartbeats of the new date
        lease = parse_lease(world.store.read(parse_target(RAW), LEASE))
        assert abs(lease.wall_seconds - time.time() - days * DAY) < 600
        assert holder(world.store, parse_target(RAW)).pid == builder.pid
        with pytest.raises(LeasedError, match=f"is being built by .*process {builder.pid}"):
            world.build(RAW)  # by somebody whose clock is right
    said = builder.communicate()[0]
    assert builder.returncode == 0, said
    digest = world.record(RAW).digest
    assert world.build(RAW, Parts(8), force="r1").record.digest == digest


# ---- modification times ----------------------------------------------------------------------------------------------


def change_times(top: Path, seed: int) -> None:
    """Give every file and folder a time between 1980 and 2100."""
    dice = random.Random(seed)
    for base, folders, files in os.walk(top):
        for name in (*folders, *files, "."):
            moment = dice.randrange(315_532_800, 4_102_444_800)
            os.utime(os.path.join(base, name), (moment, moment), follow_symlinks=False)


@pytest.mark.row(16)
@pytest.mark.row(29)
def test_neither_times_nor_the_state_of_snakemake_make_anything_run(prepared: Repository):
    """A restored backup has any times; `.snakemake` may be gone, empty, or full of garbage."""
    before = {target: prepared.record(target) for target in (TEXT, BYTES, TOKENS)}
    state = prepared.folder / ".snakemake"
    change_times(prepared.folder, seed=1)
    assert prepared.snakemake(TOKENS).is_idle
    assert state.is_dir()
    for path in [path for path in state.rglob("*") if path.is_file()]:
        path.write_bytes(b"\x00garbage" if len(path.name) % 2 else b"")
    (state / "locks").mkdir(exist_ok=True)
    (state / "locks/0.output.lock").write_text(f".marin/records/{TOKENS}.json\n")
    change_times(prepared.folder, seed=2)
    assert prepared.snakemake(TOKENS).is_idle
    for path in sorted(state.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    assert prepared.snakemake(TOKENS).is_idle
    assert {target: prepared.record(target) for target in before} == before


@pytest.mark.row(29)
def test_garbage_in_the_state_of_snakemake_hides_no_damage(prepared: Repository):
    assert prepared.snakemake(TOKENS).is_idle
    shard = next(prepared.artifact(TOKENS).glob("*.arrow"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-8])
    for path in [path for path in (prepared.folder / ".snakemake").rglob("*") if path.is_file()]:
        path.write_bytes(b"")
    assert prepared.snakemake(TOKENS).code == 0
    assert shard.read_bytes() == whole
