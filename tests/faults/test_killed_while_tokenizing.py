"""SIGKILL at random moments of a whole build of a token set: a rerun gives the same root, and does little again.

The real protocol, the embedded corpus, a trained tokenizer, two worker processes, files in memory. Workers are forked,
so that hundreds of kills are affordable; `tests/workflow/test_tokenize_kill.py` kills builds whose workers are spawned.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fork_server import PROCESSES, ForkServer

from marin_build.artifact.record import Record, read_record
from marin_build.artifact.store import open_store
from marin_build.artifact.verify import verify
from marin_build.recipe.target import parse_target

CONFIG = Path(__file__).parents[2] / "config"
MEMORY = Path("/dev/shm")
RAW, TOKENIZER, TOKENS = (f"{kind}/quickstart/2026.06.28" for kind in ("raw", "tokenizers", "tokenized"))
CHECK = "checks/encoder/quickstart/2026.06.28"
RECIPE = f"""\
tokenizer: {TOKENIZER}
source: {{type: artifact, target: {RAW}, files: ["*.jsonl"]}}
format: {{type: jsonl, text_key: text}}
add_bos: true
add_eos: true
shard_bytes: 25000
token_budget: null
max_bad_documents: 0
"""


@dataclass(frozen=True)
class Kill:
    """What a kill left."""

    code: int
    shards: int
    """Finished ones, with their sidecars."""
    unfinished: int
    """Shards that were begun and have no sidecar."""


@dataclass
class Place:
    folder: Path
    server: ForkServer
    root: str = ""
    shards: int = 0

    @property
    def tokens(self) -> Path:
        return self.folder / "artifacts" / TOKENS

    def build(self, target: str) -> int:
        self.server.begin(target)
        return self.server.end()

    def record(self) -> Record | None:
        return read_record(open_store(self.folder / "artifacts"), parse_target(TOKENS))

    def look(self, code: int) -> Kill:
        names = os.listdir(self.tokens) if self.tokens.is_dir() else []
        stems = {name.removesuffix(".arrow") for name in names if name.endswith(".arrow")}
        whole = {stem for stem in stems if f"{stem}.json" in names}
        begun = stems | {name.removesuffix(".arrow.tmp") for name in names if name.endswith(".arrow.tmp")}
        return Kill(code, len(whole), len(begun - whole))

    def kill(self, shards: int, seconds: float) -> Kill:
        """Start a build, wait for so many shards more and then so long, and kill all of it."""
        already = self.look(0).shards
        group = self.server.begin(TOKENS)
        deadline = time.monotonic() + 60
        while self.look(0).shards < min(already + shards, self.shards) and time.monotonic() < deadline:
            time.sleep(0.004)
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):  # it was faster
            os.killpg(group, signal.SIGKILL)
        return self.look(self.server.end())


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        yield from prepared(Path(folder))


def prepared(folder: Path) -> Iterator[Place]:
    for target in (RAW, TOKENIZER):
        path = folder / f"config/{target}.yaml"
        path.parent.mkdir(parents=True)
        shutil.copy(CONFIG / f"{target}.yaml", path)
    path = folder / f"config/{TOKENS}.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(RECIPE)
    made = Place(folder, ForkServer(folder))
    assert [made.build(target) for target in (RAW, TOKENIZER, CHECK, TOKENS)] == [0, 0, 0, 0]
    record = made.record()
    assert record is not None
    assert record.provenance["processes"] == PROCESSES
    made.root, made.shards = record.digest, record.metrics["shards"]
    yield made
    made.server.close()


def survive(place: Place, seed: int) -> None:
    dice = random.Random(seed)
    shutil.rmtree(place.tokens)
    kills = []
    for _ in range(dice.randrange(1, 4)):
        kills.append(place.kill(dice.randrange(place.shards + 1), dice.random() * 0.05))
        record = place.record()
        assert record is None or record.digest == place.root
        assert kills[-1].unfinished <= PROCESSES, "a worker is at one shard at a time"
        assert kills[-1].shards >= (kills[-2].shards if len(kills) > 1 else 0), "nothing finished is lost"
    print(
        f"seed {seed}: " + ", ".join(f"{k.code} at {k.shards}+{k.unfinished} of {place.shards}" for k in kills),
        flush=True,
    )
    finished = place.record() is not None
    assert place.build(TOKENS) == 0
    record = place.record()
    assert record is not None
    assert record.digest == place.root
    report = verify(open_store(place.folder / "artifacts"), parse_target(TOKENS), full=True)
    assert (report.problems, report.foreign) == ((), ())
    if not finished:
        made, kept = (record.provenance[key] for key in ("shards_made", "shards_kept"))
        assert (made, kept) == (place.shards - kills[-1].shards, kills[-1].shards), "no finished shard is made again"


@pytest.mark.row(2)
@pytest.mark.parametrize("seed", range(2))
def test_a_killed_build_ends_with_the_same_root_and_no_finished_shard_made_again(place: Place, seed: int):
    survive(place, seed)


@pytest.mark.soak
@pytest.mark.row(2)
@pytest.mark.parametrize("seed", range(1000, 1210))
def test_many_killed_builds(place: Place, seed: int):
    survive(place, seed)
