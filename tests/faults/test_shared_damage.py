"""Artifacts that share files are hurt at random: each names its own hurt, and one plain run heals each by itself."""

from __future__ import annotations

import os
import random

import pytest
from artifact_world import World
from sharing import DONOR, TAKER, THIRD, Shards, texts, with_takers
from store_kinds import make_world, servers

from marin_build.artifact.examine import State

__all__ = ["servers"]

SIZES = {DONOR: 4, TAKER: 6, THIRD: 8}
HARMS = ("flip", "cut", "lose", "replace")


@pytest.mark.row(8)
@pytest.mark.parametrize("kind", ["disk", "memory"])
@pytest.mark.parametrize("seed", range(8))
def test_hurt_artifacts_that_share_files_are_healed(
    kind: str, seed: int, tmp_path_factory: pytest.TempPathFactory, servers, monkeypatch: pytest.MonkeyPatch
):
    heal_at_random(kind, seed, tmp_path_factory, monkeypatch)


@pytest.mark.row(8)
@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", ["disk", "memory"])
@pytest.mark.parametrize("seed", range(1000, 1100))
def test_hurt_artifacts_that_share_files_are_healed_every_time(
    kind: str, seed: int, tmp_path_factory: pytest.TempPathFactory, servers, monkeypatch: pytest.MonkeyPatch
):
    heal_at_random(kind, seed, tmp_path_factory, monkeypatch)


def heal_at_random(kind: str, seed: int, folders: pytest.TempPathFactory, patch: pytest.MonkeyPatch) -> None:
    folder, dice = folders.mktemp("shared"), random.Random(seed)
    patch.chdir(folder)
    world = with_takers(make_world(kind, folder, {}))
    for target, count in SIZES.items():
        world.build(target, Shards(texts(count)))
    digests = {target: world.record(target).digest for target in SIZES}
    for _ in range(dice.randint(1, 3)):
        target = dice.choice(list(SIZES))
        hurt(world, target, f"shard-{dice.randrange(SIZES[target])}", dice.choice(HARMS), dice)
    bad = {
        target: {name for name, data in texts(count).items() if seen(world, target, name) != data}
        for target, count in SIZES.items()
    }
    for target in SIZES:
        report = world.verify(target)
        assert {problem.path for problem in report.problems} == bad[target], (seed, target)
    for target in dice.sample(list(SIZES), len(SIZES)):
        world.build(target, Shards(texts(SIZES[target]), takes=dice.random() < 0.7))
        assert world.verify(target).ok, (seed, target)
        assert world.status(target).state is State.finished
    for target, digest in digests.items():
        assert world.verify(target).ok, f"{seed}: healing one hurt {target}"
        assert world.record(target).digest == digest


def seen(world: World, target: str, name: str) -> bytes | None:
    if not world.prefix:
        path = world.path(target, name)
        return path.read_bytes() if path.exists() else None
    return world.store.bucket.get(world.store.files(world.record(target)).key(name))[0]


def hurt(world: World, target: str, name: str, harm: str, dice: random.Random) -> None:
    """On a disk in place, so that every name of the file has it, or of this name alone."""
    data = seen(world, target, name)
    if data is None:
        return
    place = dice.randrange(len(data))
    other = {"flip": data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :], "cut": data[:place]}.get(harm)
    if world.prefix:
        key = world.store.files(world.record(target)).key(name)
        world.store.bucket.delete(key) if harm == "lose" else world.store.bucket.put(key, other or b"another")
        return
    path = world.path(target, name)
    if harm == "lose":
        path.unlink()
    elif harm == "replace":
        path.with_suffix(".new").write_bytes(b"another")
        os.replace(path.with_suffix(".new"), path)
    else:
        path.write_bytes(other or b"")
