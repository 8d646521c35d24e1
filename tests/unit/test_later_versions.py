"""A later version of a token set, with a larger budget, takes over the shards of the version before; so does the set
whose parts other jobs have made.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest

from marin_build.artifact.record import Record, read_record
from marin_build.artifact.store import Store, open_store
from marin_build.cli import main
from marin_build.recipe.target import parse_target

RAW, TOKENIZER = "raw/quickstart/2026.06.28", "tokenizers/bytes/2026.06.28"
SMALL, LARGE = "tokenized/plays/2026.06.28", "tokenized/plays/2026.06.29"
RECIPE = f"""\
tokenizer: {TOKENIZER}
source: {{type: artifact, target: {RAW}, files: ["*.jsonl"]}}
format: {{type: jsonl, text_key: text}}
add_bos: false
add_eos: true
shard_bytes: 65536
token_budget: {{tokens: TOKENS, seed: 1}}
max_bad_documents: 0
"""
_numbers = itertools.count()


class Place:
    """A prefix of its own, with recipes of a small and a large version of a set."""

    def __init__(self, folder: Path, kind: str) -> None:
        folder.mkdir()
        self.folder = folder
        self.prefix = f"memory://later/{next(_numbers)}" if kind == "memory" else str(folder / "artifacts")
        shipped = Path(__file__).parents[2] / "config"
        for target in (RAW, TOKENIZER):
            path = folder / "config" / f"{target}.yaml"
            path.parent.mkdir(parents=True)
            shutil.copy(shipped / f"{target}.yaml", path)
        for target, tokens in ((SMALL, 1000), (LARGE, 10**9)):
            path = folder / "config" / f"{target}.yaml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(RECIPE.replace("TOKENS", str(tokens)))

    @property
    def store(self) -> Store:
        return open_store(self.prefix, self.folder / "cache")

    def run(self, *words: str) -> int:
        place = ["--prefix", self.prefix, "--recipes", str(self.folder / "config")]
        return main([*words, *place, "--config", f"object_cache={self.folder / 'cache'}", "processes=1"])

    def built(self, *targets: str) -> Record:
        """The record of the last."""
        for target in targets:
            assert self.run("build", target) == 0
        record = read_record(self.store, parse_target(targets[-1]))
        assert record is not None
        return record


def shards(record: Record) -> set[str]:
    return {entry["path"] for entry in record.content if entry["path"].endswith(".arrow")}


@pytest.mark.usefixtures("memory_prefix")
@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_larger_budget_makes_only_what_the_smaller_one_has_not(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    place = Place(tmp_path / "here", kind)
    small = place.built(RAW, TOKENIZER, SMALL)
    large = place.built(LARGE)
    assert 0 < len(shards(small)) < len(shards(large))
    assert counts(large) == (len(shards(large) - shards(small)), len(shards(small)))
    assert large.digest == Place(tmp_path / "alone", kind).built(RAW, TOKENIZER, LARGE).digest
    if kind == "disk":
        for name in shards(small):
            assert (place.folder / "artifacts" / SMALL / name).samefile(place.folder / "artifacts" / LARGE / name)
    assert place.run("gc", "--delete", "--grace-days", "0") == 0
    (place.folder / "config" / f"{SMALL}.yaml").unlink()
    for _ in range(2):
        assert place.run("gc", "--delete", "--grace-days", "0") == 0
    assert read_record(place.store, parse_target(SMALL)) is None
    assert place.run("verify", "--full", LARGE) == 0, "it is whole without the one that it took from"


@pytest.mark.usefixtures("memory_prefix")
@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_set_takes_over_what_its_parts_have_made(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    place = Place(tmp_path / "here", kind)
    parts = [f"parts/plays/{number:05d}-of-00003/2026.06.29" for number in range(3)]
    made = place.built(RAW, TOKENIZER, *parts, LARGE)
    assert counts(made) == (0, len(shards(made)))
    assert made.digest == Place(tmp_path / "alone", kind).built(RAW, TOKENIZER, LARGE).digest
    for _ in range(2):
        assert place.run("gc", "--delete", "--grace-days", "0") == 0
    assert all(read_record(place.store, parse_target(part)) is None for part in parts)
    assert place.run("verify", "--full", LARGE) == 0


@pytest.mark.usefixtures("memory_prefix")
@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_damaged_shard_that_versions_share_is_healed_in_each(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    place = Place(tmp_path / "here", kind)
    small, large = place.built(RAW, TOKENIZER, SMALL), place.built(LARGE)
    name = min(shards(small))
    hurt(place, small, name)
    for target in (SMALL, LARGE):
        assert place.run("verify", "--full", target) == 4
    healed = place.built(LARGE)
    assert healed.digest == large.digest
    assert counts(healed)[0] == 1, "one shard is made again"
    assert place.built(SMALL).digest == small.digest
    for target in (SMALL, LARGE):
        assert place.run("verify", "--full", target) == 0


def hurt(place: Place, record: Record, name: str) -> None:
    """Flip a bit where it lies."""
    store: Any = place.store
    if not place.prefix.startswith("memory"):
        path = place.folder / "artifacts" / str(record.target) / name
        path.write_bytes(flipped(path.read_bytes()))
        return
    key = store.files(record).key(name)
    store.bucket.put(key, flipped(store.bucket.get(key)[0]))


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def counts(record: Record) -> tuple[Any, Any]:
    return record.provenance["shards_made"], record.provenance["shards_taken_over"]
