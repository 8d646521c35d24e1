"""A torn world: a finished prefix is harmed at random. Verification finds it, and one plain rerun heals it."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from artifact_world import RAW, TOKENIZER, TOKENS, Parts, World

from marin_build.artifact.examine import State

ORDER = (RAW, TOKENIZER, TOKENS)


def truncate(path: Path, chance: random.Random, world: World) -> None:
    os.truncate(path, chance.randrange(path.stat().st_size))


def flip(path: Path, chance: random.Random, world: World) -> None:
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def remove(path: Path, chance: random.Random, world: World) -> None:
    path.unlink()


def grow(path: Path, chance: random.Random, world: World) -> None:
    with open(path, "ab") as file:
        file.write(b"\0" * 4096)


def replace_by_folder(path: Path, chance: random.Random, world: World) -> None:
    path.unlink()
    path.mkdir()


def replace_by_another(path: Path, chance: random.Random, world: World) -> None:
    others = [other for target in ORDER for other in files(world, target) if other != path]
    shutil.copy(chance.choice(others), path)


HARMS = (replace_by_folder, truncate, flip, remove, grow, replace_by_another)
"""The first one is for content only: nothing turns a small file of the protocol into a folder by accident."""


def files(world: World, target: str) -> list[Path]:
    """The files of an artifact, the protocol's own among them."""
    return sorted(path for path in world.path(target).iterdir() if path.is_file())


@pytest.mark.parametrize("seed", range(40))
def test_harm_is_found_and_one_rerun_heals_it(memory_world: World, seed: int):
    world, chance = memory_world, random.Random(seed)
    world.build_all(*ORDER)
    digests = {target: world.record(target).digest for target in ORDER}
    harmed: dict[str, set[str]] = {target: set() for target in ORDER}
    for _ in range(chance.randrange(1, 5)):
        target = chance.choice(ORDER)
        path = chance.choice([path for path in files(world, target) if path.stat().st_size])
        chance.choice(HARMS[path.name.startswith(".") :])(path, chance, world)
        harmed[target].add(path.name)
    for target in ORDER:
        report = world.verify(target)
        content = harmed[target] - {".attempt.json"}
        assert report.ok is not bool(content), (seed, harmed, report)
        if ".artifact.json" not in harmed[target]:
            assert {problem.path for problem in report.problems} == content
    for target in ORDER:
        world.build(target, Parts(careful=True))
    for target in ORDER:
        assert world.record(target).digest == digests[target], (seed, harmed)
        assert world.verify(target).ok
        assert world.status(target).state is State.finished
