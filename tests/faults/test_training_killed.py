"""SIGKILL at random moments of a training, anywhere from start to end: it resumes, and ends with the same bits.

A moment is a number of CPU seconds of the process, so that a busy machine moves none of them. Each killed run says
where it was hit: before or while the program is compiled, in a step, or in a save.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
from training_runner import Runner, Training
from training_world import TARGET

MOST_KILLS = 2
TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Of a process that may have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def kill_after(runner: Runner, name: str, seconds: float) -> tuple[str | None, Training]:
    """Start a run and kill -9 it after so much work; where it was hit, or None where it had ended before."""
    run = runner.start(name)
    run.wait_until(lambda: cpu_seconds(run.pid) >= seconds)
    run.send(signal.SIGKILL)
    run.wait_until(lambda: False)
    return (phase(runner, name, run.output) if run.code == -signal.SIGKILL else None), run


def phase(runner: Runner, name: str, output: str) -> str:
    if "ing at step" not in output:
        return "start"
    if "compiled in" not in output:
        return "compilation"
    folder = runner.folder / name / TARGET / "checkpoints"
    unfinished = [p for p in folder.iterdir() if not (p / "manifest.json").exists()]
    if unfinished:
        return "save"
    return "end" if "final validation" in output else "step"


def survive(runner: Runner, straight: dict, name: str, seed: int, whole_run: float) -> tuple[Counter, float]:
    """Kill a training up to `MOST_KILLS` times, let it end, and compare; what was hit, and the CPU seconds used."""
    dice, hits, used = random.Random(seed), Counter[str](), 0.0
    for _ in range(dice.randint(1, MOST_KILLS)):
        hit, run = kill_after(runner, name, dice.random() * whole_run)
        used += run.cpu_seconds
        if hit is None:
            break
        hits[hit] += 1
    last = runner.start(name)
    result = last.result()
    assert result["digest"] == straight["digest"], f"seed {seed}: {hits}"
    assert runner.losses(name) == runner.losses("straight"), f"seed {seed}: {hits}"
    assert runner.checkpoints(name) == ["10", "20"], f"seed {seed}: {hits}"
    return hits, used + last.cpu_seconds


@pytest.fixture(scope="module")
def whole_run(runner: Runner, straight: dict) -> float:
    """CPU seconds of a run whose program is in the cache."""
    run = runner.start("measured")
    assert run.result()["digest"] == straight["digest"]
    return run.cpu_seconds


@pytest.fixture(scope="module")
def totals():
    total: Counter[str] = Counter()
    yield total
    print(f"\nin all: {dict(total)}")


@pytest.mark.row(3)
def test_a_training_killed_at_random_ends_with_the_bits_of_one_that_was_not(runner, straight, whole_run):
    hits, _ = survive(runner, straight, "killed", 1, whole_run)
    assert hits


@pytest.mark.soak
@pytest.mark.row(3)
@pytest.mark.parametrize("seed", range(100, 220))
def test_many_trainings_killed_at_random_end_with_the_same_bits(runner, straight, whole_run, totals, seed):
    hits, used = survive(runner, straight, f"soak{seed}", seed, whole_run)
    totals.update(seeds=1, kills=hits.total(), cpu_seconds=round(used), **hits)
    print(f"seed {seed}: killed in {', '.join(hits.elements()) or 'nothing: it ended before'}; {used:.1f} CPU s")
