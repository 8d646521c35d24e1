"""Housekeeping beside readers and builders: it never takes what a record or a live lease reaches."""

from __future__ import annotations

import logging
import random
import subprocess
import threading
from collections import Counter
from pathlib import Path

import pytest
from artifact_world import RAW, TOKENIZER, TOKENS, World

from marin_build.artifact.gc import Sweeper
from marin_build.artifact.record import read_record
from marin_build.artifact.verify import check_all
from marin_build.errors import DamageError
from marin_build.recipe.target import parse_target
from marin_build.settings import Settings

LOG = logging.getLogger("gc")
OTHER = "tokenized/other/dev"


class Reader(threading.Thread):
    """Reads artifacts over and over: a record that is there must have its bytes, unless it is gone afterwards."""

    def __init__(self, world: World, *targets: str) -> None:
        super().__init__(daemon=True)
        self.world, self.targets = world, [parse_target(target) for target in targets]
        self.ended, self.torn, self.looks = threading.Event(), list[str](), 0

    def run(self) -> None:
        try:
            while not self.ended.is_set():
                self._look()
        except BaseException as error:
            self.torn.append(repr(error))

    def _look(self) -> None:
        for target in self.targets:
            record = read_record(self.world.store, target)
            if record is None:
                continue
            problems = check_all(self.world.store.files(record), record.content)
            self.looks += 1
            if problems and read_record(self.world.store, target) == record:
                self.torn.append(f"{target}: {problems[0]}")


def sweeper(world: World) -> Sweeper:
    settings = Settings(prefix=str(world.folder / "artifacts"), recipes=str(world.folder / "config"), lease_seconds=5)
    return Sweeper(world.store, settings, 0, LOG)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.chdir(tmp_path)
    world = World.make(tmp_path)
    world.build_all(RAW, TOKENIZER, TOKENS)
    return world


def race(world: World, rounds: int, seed: int) -> None:
    """A builder of another process builds, and rebuilds, what a recipe names only at times, while gc deletes."""
    print(f"seed {seed}")
    dice, text = random.Random(seed), (world.folder / "config" / f"{TOKENS}.yaml").read_text()
    reader = Reader(world, RAW, TOKENIZER, TOKENS, OTHER)
    reader.start()
    ended: Counter[int] = Counter()
    recipe = world.folder / "config" / f"{OTHER}.yaml"
    for number in range(rounds):
        world.write(OTHER, text)
        options = ["--part-seconds", "0.05", "--lease-seconds", "5", *(["--force", f"r{number}"] * dice.randrange(2))]
        builder = subprocess.Popen(world.command(OTHER, *options), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if dice.random() < 0.5:
            world.path(RAW, "notes.txt").write_text("mine")
        goes = dice.random() < 0.5
        while builder.poll() is None:
            if goes and world.path(OTHER, ".attempt.json").exists() and dice.random() < 0.2:
                recipe.unlink(missing_ok=True)
            sweep = sweeper(world)
            dry = sweep.look()
            for item in sweep.delete(dry):
                assert item.due
                assert item.target == parse_target(OTHER) or item.names == ("notes.txt",), item
        ended[builder.returncode] += 1
        said = (builder.stdout.read() if builder.stdout else b"").decode()
        assert builder.returncode == 0 or "Traceback" not in said or not recipe.exists(), said
        for target in (RAW, TOKENIZER, TOKENS):
            assert world.verify(target).ok
        try:
            record = world.record(OTHER)
        except DamageError as error:
            raise AssertionError(f"half a record: {error}") from error
        if record is not None:
            assert world.verify(OTHER).ok
        recipe.unlink(missing_ok=True)
        sweep = sweeper(world)
        dry = sweep.look()
        real = sweep.delete(dry)
        assert [(item.target, item.what, item.names) for item in real] == [(i.target, i.what, i.names) for i in dry]
        assert {item.outcome for item in real} <= {"deleted"}
        assert not world.path(OTHER, ".artifact.json").exists()
    print(ended)
    assert ended[0], "some builds must end well"
    reader.ended.set()
    reader.join()
    assert reader.torn == []
    assert reader.looks > rounds


@pytest.mark.row(30)
def test_gc_beside_a_reader_and_a_builder_takes_nothing_that_is_needed(shared: World):
    race(shared, rounds=4, seed=1)


@pytest.mark.soak
@pytest.mark.row(30)
@pytest.mark.parametrize("seed", range(100, 110))
def test_soak_of_gc_beside_a_reader_and_a_builder(shared: World, seed: int):
    race(shared, rounds=20, seed=seed)
