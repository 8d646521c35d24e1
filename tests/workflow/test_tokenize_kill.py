"""SIGKILL at random moments while a token set is made: what is left is resumed, and the end is the same to the byte."""

from __future__ import annotations

import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import builders
import pytest
import zstandard
from builders import Workbench

from marin_build.data import tokenizer
from marin_build.recipe import schema
from marin_build.recipe.sources import JsonLines

DRIVER = '''
"""Makes the token set in the folder named, with two processes, and says what was done."""
import json, sys, time
from pathlib import Path

from builders import Workbench
from marin_build.data import foreman, tokenize

tokenize.BYTES_WORTH_A_PROCESS = 1
usual = foreman.commit


def slow_commit(path):
    time.sleep(0.02)  # a finished file waits for its name: kills find it open more often
    usual(path)


if __name__ == "__main__":
    foreman.commit = slow_commit
    bench = Workbench(Path(sys.argv[1]))
    raw = bench.finished("raw/bench/dev", bench.folder / "raw/bench/dev")
    tokens = bench.finished("tokenizers/bench/dev", bench.folder / "tokenizers/bench/dev")
    folder, result = bench.tokenize(raw, tokens, folder=sys.argv[2], shard_bytes=20_000, processes=2)
    print(json.dumps(dict(result.details)))
'''
WORDS = [
    "the",
    "of",
    "and",
    "that",
    "his",
    "with",
    "not",
    "my",
    "shall",
    "thou",
    "lord",
    "king",
    "hither",
    "1599",
    "--",
]


@dataclass(frozen=True)
class Place:
    """A bench with a corpus and a tokenizer, and the driver that makes token sets of them."""

    bench: Workbench
    driver: Path

    def folder(self, name: str) -> Path:
        return self.bench.folder / name

    def start(self, name: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": os.path.dirname(builders.__file__)}
        command = [sys.executable, str(self.driver), str(self.bench.folder), name]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def finish(self, name: str) -> dict:
        """Run the driver to its end; what it made and kept."""
        driver = self.start(name)
        out, err = driver.communicate(timeout=300)
        assert driver.returncode == 0, err
        return json.loads(out.splitlines()[-1])

    def contents(self, name: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder(name).iterdir()}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    folder = tmp_path_factory.mktemp("kill")
    bench, dice = Workbench(folder / "bench"), random.Random(0)
    lines = [json.dumps({"text": " ".join(dice.choices(WORDS, k=dice.randrange(1, 300)))}) for _ in range(2000)]
    data = "".join(line + "\n" for line in lines).encode()
    files = {"a.jsonl": data, "b.jsonl.gz": gzip.compress(data[:400_000].rpartition(b"\n")[0]), "c.jsonl.zst": None}
    files["c.jsonl.zst"] = zstandard.compress(data[-300_000:].partition(b"\n")[2])
    raw = bench.raw(files)
    text = schema.TrainingText(
        target="raw/bench/dev", files=["a.jsonl"], format=JsonLines(type="jsonl", text_key="text")
    )
    recipe = schema.TrainedTokenizer(
        method="byte_level_bpe",
        text=[text],
        vocabulary_size=280,
        split_regex=r" ?\S+|\s+",
        special_tokens=Workbench.SPECIALS,
    )
    tokenizer.build(bench.context("tokenizers/bench/dev", schema.TokenizerRecipe(tokenizer=recipe), raw))
    (folder / "driver.py").write_text(DRIVER)
    made = Place(bench, folder / "driver.py")
    made.finish("undisturbed")
    return made


@dataclass(frozen=True)
class Kill:
    shards: int
    unfinished_files: int
    complete: bool


def kill_after(place: Place, name: str, new_shards: int, pause_seconds: float, whole_group: bool = True) -> Kill:
    """Start the driver, wait until it has committed so many more shards and a little longer, and kill it."""
    folder = place.folder(name)
    goal = count(folder, "*.json") + new_shards
    driver = place.start(name)
    while count(folder, "*.json") < goal and driver.poll() is None:
        time.sleep(0.001)
    time.sleep(pause_seconds)
    if whole_group:
        os.killpg(driver.pid, signal.SIGKILL)
    else:
        os.kill(driver.pid, signal.SIGKILL)
    driver.communicate(timeout=60)
    wait_until_gone(driver.pid)
    return Kill(count(folder, "*.arrow"), count(folder, "*.tmp"), (folder / "ledger.json").exists())


def count(folder: Path, pattern: str) -> int:
    return len(list(folder.glob(pattern)))


def wait_until_gone(group: int, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    pytest.fail(f"processes of group {group} still run {seconds} seconds after their builder was killed")


def spoil_three(folder: Path, dice: random.Random) -> None:
    """Truncate a shard, flip a byte of another at equal size, and delete the sidecar of a third."""
    truncated, flipped, bare = dice.sample(sorted(folder.glob("*.arrow")), 3)
    os.truncate(truncated, dice.randrange(truncated.stat().st_size))
    data = bytearray(flipped.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    flipped.write_bytes(data)
    bare.with_suffix(".json").unlink()


def survive(place: Place, seed: int, least_kills: int) -> None:
    """Kill until enough kills fell into the work, one of them on an unfinished file; then damage, finish, compare."""
    name, dice, kills = f"seed-{seed}", random.Random(seed), []
    while len(kills) < least_kills or not any(kill.unfinished_files for kill in kills):
        assert len(kills) < 15, f"seed {seed}: no kill found an unfinished file: {kills}"
        kills.append(kill_after(place, name, dice.randrange(1, 5), dice.random() * 0.05))
        assert not kills[-1].complete, f"seed {seed}: the driver was faster than kill {len(kills)}"
        assert kills[-1].shards > 0, f"seed {seed}: nothing was done before kill {len(kills)}"
    spoil_three(place.folder(name), dice)
    shards = count(place.folder("undisturbed"), "*.arrow")
    details = place.finish(name)
    assert place.contents(name) == place.contents("undisturbed"), f"seed {seed}"
    assert details["shards_kept"] > 0, f"seed {seed}: nothing of the killed attempts was kept: {kills}"
    assert details["shards_made"] + details["shards_kept"] == shards


@pytest.mark.row(2)
def test_killed_and_damaged_builds_end_with_the_bytes_of_an_undisturbed_one(place):
    survive(place, seed=1, least_kills=4)


def test_workers_end_with_a_builder_that_is_killed_alone(place):
    """A worker that lived on would write beside the next attempt."""
    kill = kill_after(place, "alone", 3, 0.0, whole_group=False)
    assert kill.shards > 0
    assert not kill.complete
    place.finish("alone")
    assert place.contents("alone") == place.contents("undisturbed")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 140))
@pytest.mark.row(2)
def test_many_killed_builds(place, seed):
    survive(place, seed, least_kills=5)
