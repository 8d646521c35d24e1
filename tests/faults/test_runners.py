"""Runs that start at the same instant, or beside each other: one builds a target, the others say who does."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections import Counter

import pytest
from artifact_world import RAW as PLAIN
from artifact_world import World
from repository import BYTES, RAW, TOKENS, Gate, Repository

from marin_build.artifact.lease import holder
from marin_build.recipe.target import parse_target

DISJOINT = "raw/quickstart/2026.06.28"


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    said = [process.communicate(timeout=300)[0] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


def attempts(repository: Repository, target: str) -> int:
    return len(list(repository.artifact(target).glob("logs/*.log")))


def one_round(repository: Repository, target: str, runs: int) -> Counter[str]:
    """Start so many runs of one directory at once on what is not there; how each ended."""
    for folder in ("artifacts", ".marin", ".snakemake"):
        shutil.rmtree(repository.folder / folder, ignore_errors=True)
    kinds = Counter()
    for code, text in ends([repository.start(target) for _ in range(runs)]):
        assert "Missing files" not in text, text
        assert "Traceback" not in text, text
        if code:
            assert "somebody else is building what would run" in text, text
            assert "@" in text.partition(f"{target}: ")[2].partition("\n")[0], "it says who"
        kinds["refused" if code else "done"] += 1
    assert kinds["done"] >= 1
    assert attempts(repository, target) == 1, "nothing is built twice"
    assert repository.snakemake(target).is_idle
    return kinds


@pytest.mark.row(12)
def test_of_runs_started_at_once_in_one_directory_one_builds_and_the_others_say_who(repository: Repository):
    one_round(repository, BYTES, runs=2)


@pytest.mark.soak
@pytest.mark.row(12)
@pytest.mark.parametrize("number", range(100))
def test_a_hundred_rounds_of_runs_started_at_once_in_one_directory(repository: Repository, number: int):
    print(f"round {number}:", dict(one_round(repository, BYTES, runs=3)), flush=True)


def race(world: World, options: list[list[str]]) -> list[tuple[int, str]]:
    """Builders of one target as other processes, held back until all are there."""
    commands = [world.command(PLAIN, "--part-seconds", "0.01", *more) for more in options]
    start = world.folder / "start"
    held = [["sh", "-c", f'until [ -e "{start}" ]; do sleep 0.01; done; exec "$@"', "sh", *line] for line in commands]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen(command, cwd=world.folder, **pipes) for command in held]
    start.touch()
    return ends(processes)


def one_race(world: World, number: int) -> None:
    shutil.rmtree(world.folder / "artifacts", ignore_errors=True)
    (world.folder / "start").unlink(missing_ok=True)
    waits = number % 2 == 1
    found = race(world, [["--wait"] if waits else []] * 3)
    codes = sorted(code for code, _ in found)
    assert set(codes) <= {0, 5}, found
    assert codes[0] == 0
    assert not waits or codes == [0, 0, 0]
    assert sum("built part-0" in text for _, text in found) == 1, "the others refuse, or find it finished"
    assert all("is being built by" in text or "locked" in text for code, text in found if code), found
    assert len(os.listdir(world.path(PLAIN, "logs"))) == 1
    assert world.verify(PLAIN).ok


@pytest.mark.row(12)
def test_builders_started_at_once_make_one_artifact(world: World):
    for number in range(2):
        one_race(world, number)


@pytest.mark.soak
@pytest.mark.row(12)
@pytest.mark.parametrize("number", range(100))
def test_a_hundred_races_of_builders(world: World, number: int):
    one_race(world, number)


@pytest.mark.row(12, 13)
def test_what_a_waiting_run_holds_stays_held_when_another_one_ends(repository: Repository, gate: Gate):
    """Of disjoint targets, each is free; the end of one run takes no claim, lease or mirror of the other away."""
    first = repository.start(TOKENS, **gate.environment(WAIT_IN="raw"))
    gate.wait_for("raw", first)
    assert repository.snakemake(DISJOINT).code == 0
    assert holder(repository.store, parse_target(RAW)) is not None
    found = repository.snakemake(RAW, "--no-hooks")
    assert found.code == 1
    assert "somebody else is building what would run" in found.text
    assert f"(process {first.pid})" in found.text
    gate.open()
    assert ends([first])[0][0] == 0
    assert [attempts(repository, target) for target in (RAW, BYTES, TOKENS, DISJOINT)] == [1, 1, 1, 1]


@pytest.mark.row(12)
def test_a_run_that_waits_goes_on_with_what_the_other_has_made(repository: Repository, gate: Gate):
    first = repository.start(RAW, **gate.environment(WAIT_IN="raw"))
    gate.wait_for("raw", first)
    second = repository.start(TOKENS, "--config", "wait=true")
    said = "".join(itertools.takewhile(lambda line: not line.startswith("waiting:"), second.stdout))
    assert "Error" not in said
    assert second.poll() is None
    gate.open()
    assert [code for code, _ in ends([first, second])] == [0, 0]
    assert [attempts(repository, target) for target in (RAW, TOKENS)] == [1, 1]
