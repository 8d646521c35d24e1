"""Adoption: data that lies somewhere becomes a finished artifact, is read by builders, and is never written to."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from torn_world import ALL, BYTES, DATA, HELD_OUT, MODEL, RAW, TRAIN, Template, TornWorld, snapshot

from marin_build import adopt as adoption
from marin_build import cli
from marin_build.artifact import provenance
from marin_build.artifact.examine import State
from marin_build.artifact.fsspec_bucket import FsspecBucket, open_bucket
from marin_build.artifact.gc import Sweeper
from marin_build.errors import DamageError
from marin_build.recipe.target import parse_target
from marin_build.settings import Settings

OWN = (".artifact.json", ".attempt.json")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Template]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "circumstances", lambda recipes, command: {})
        patch.setattr(provenance, "code_hashes", dict)
        folder = tmp_path_factory.mktemp("template")
        patch.chdir(folder)
        yield Template(folder, builds=1)


@pytest.fixture
def world(template: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TornWorld:
    monkeypatch.chdir(tmp_path)
    return template.copy(tmp_path)


def moved_out(world: TornWorld, target: str) -> Path:
    """The files of an artifact lie elsewhere, and nothing is left of it."""
    place = world.folder / "elsewhere" / target.replace("/", "_")
    shutil.copytree(world.path(target), place, ignore=shutil.ignore_patterns(*OWN, "logs"))
    shutil.rmtree(world.path(target))
    return place


def adopt(source: Path | str, target: str, *words: str) -> int:
    return cli.main(["adopt", str(source), target, *words])


@pytest.mark.parametrize("target", ALL)
def test_an_artifact_that_lies_elsewhere_is_adopted_with_the_digest_that_it_had(
    template: Template, world: TornWorld, capsys: pytest.CaptureFixture[str], target: str
):
    place = moved_out(world, target)
    before = snapshot(place)
    assert adopt(place, target, "--reason", "made elsewhere") == 0
    assert f"files in {place}" in capsys.readouterr().out
    record = world.record(target)
    assert (record.digest, record.fingerprint) == (
        template.records[target].digest,
        template.records[target].fingerprint,
    )
    assert record.external == str(place)
    assert record.provenance["adopted"]["reason"] == "made elsewhere"
    assert world.status(target).state is State.finished
    assert world.verify(target).ok
    assert world.run(*ALL) == []
    for verb in (["show", target], ["verify", "--full", target], ["status", target]):
        assert cli.main(verb) == 0
        assert str(place) in capsys.readouterr().out, verb
    assert snapshot(place) == before


def test_builders_read_what_was_adopted(template: Template, world: TornWorld):
    for target in (RAW, BYTES, TRAIN):
        assert adopt(moved_out(world, target), target) == 0
    for target in (HELD_OUT, MODEL):
        shutil.rmtree(world.path(target))
    assert world.run(MODEL) == [HELD_OUT, MODEL]
    for target in (HELD_OUT, MODEL):
        assert world.record(target).digest == template.records[target].digest


@pytest.mark.parametrize("harm", ["missing", "other bytes"])
def test_adopted_data_that_is_damaged_is_built_here_with_loud_lines_and_nothing_is_written_there(
    template: Template, world: TornWorld, capsys: pytest.CaptureFixture[str], harm: str
):
    place = moved_out(world, TRAIN)
    assert adopt(place, TRAIN) == 0
    shard = sorted(place.glob("*.arrow"))[0]
    shard.unlink()
    if harm == "other bytes":
        shard.write_bytes(b"x")
    there = snapshot(place)
    assert world.status(TRAIN).state is State.damaged
    assert world.run(*ALL) == [TRAIN]
    said = capsys.readouterr().err
    assert f"{TRAIN} was ADOPTED and is damaged where it lies: {place}" in said
    assert "BUILT HERE INSTEAD" in said
    assert world.record(TRAIN).external is None
    assert world.record(TRAIN).digest == template.records[TRAIN].digest
    assert world.verify(TRAIN).ok
    assert snapshot(place) == there


def test_an_adopted_model_that_is_damaged_is_never_trained_anew_unasked(world: TornWorld):
    place = moved_out(world, MODEL)
    assert adopt(place, MODEL) == 0
    shutil.rmtree(place / "checkpoints" / "6")
    there = snapshot(place)
    with pytest.raises(DamageError, match=rf"was adopted, and is damaged where it lies(.|\n)*snakemake -f {MODEL}"):
        world.run(MODEL)
    assert world.record(MODEL).external == str(place)
    world.build(MODEL, force="asked for")
    assert world.verify(MODEL).ok
    assert snapshot(place) == there


def test_gc_takes_the_record_of_adopted_data_and_never_the_data(world: TornWorld):
    place = moved_out(world, MODEL)
    assert adopt(place, MODEL) == 0
    there = snapshot(place)
    (world.folder / "config" / f"{MODEL}.yaml").unlink()
    sweep = Sweeper(world.store, Settings(lease_seconds=1), 0, logging.getLogger("gc"))
    assert [item.outcome for item in sweep.delete(sweep.look())] == ["deleted"]
    assert world.record(MODEL) is None
    assert snapshot(place) == there


def refusal(capsys: pytest.CaptureFixture[str], source: Path | str, target: str) -> str:
    capsys.readouterr()
    assert adopt(source, target) in (2, 3, 4, 5)
    return capsys.readouterr().err


def test_what_cannot_be_adopted(world: TornWorld, capsys: pytest.CaptureFixture[str]):
    assert "is there already, and stays" in refusal(capsys, world.path(RAW), RAW)
    place = moved_out(world, RAW)
    assert "is in the prefix" in refusal(capsys, world.path(BYTES), RAW)
    assert "is no folder" in refusal(capsys, place / "SOURCE.md", RAW)
    assert "has no recipe" in refusal(capsys, place, "raw/other/2026.06.28")
    (world.folder / "link").symlink_to(place)
    assert "leads through a link" in refusal(capsys, world.folder / "link", RAW)
    (world.folder / "empty").mkdir()
    assert "holds no file" in refusal(capsys, world.folder / "empty", RAW)
    for name, data in {"model.pkl": b"x", "data": b"\x80\x04x", "logs": None, ".artifact.json": b"{}"}.items():
        if data is None:
            (place / name).symlink_to("/etc")
        else:
            (place / name).write_bytes(data)
        said = refusal(capsys, place, RAW)
        assert "pickle" in said or "link" in said or "belongs to no artifact" in said, (name, said)
        os.unlink(place / name)
    assert adopt(place, RAW) == 0


def test_what_is_not_what_the_recipe_says(world: TornWorld, capsys: pytest.CaptureFixture[str]):
    tokens, tokenizer, model = moved_out(world, HELD_OUT), moved_out(world, BYTES), moved_out(world, MODEL)
    assert "dependency tokenizers/bytes/2026.06.28 is not finished" in refusal(capsys, tokens, HELD_OUT)
    data = (tokenizer / "tokenizer.json").read_text()
    (tokenizer / "tokenizer.json").write_text(data.replace("<|eos|>", "<|end|>"))
    assert "special_tokens.eos '<|eos|>' is not in the vocabulary" in refusal(capsys, tokenizer, BYTES)
    (tokenizer / "tokenizer.json").write_text(data)
    assert adopt(tokenizer, BYTES) == 0
    world.edit(HELD_OUT, "add_eos: true", "add_eos: false")
    assert "add_eos of its recipe is False, its ledger.json says True" in refusal(capsys, tokens, HELD_OUT)
    world.edit(HELD_OUT, "add_eos: false", "add_eos: true")
    (tokens / "ledger.json").rename(tokens / "aside.json")
    state = (tokens / "state.json").read_text()
    (tokens / "state.json").write_text("[]")
    assert "its state.json is not as `datasets` writes it" in refusal(capsys, tokens, HELD_OUT)
    (tokens / "state.json").write_text(state)
    (tokens / "aside.json").rename(tokens / "ledger.json")
    assert adopt(tokens, HELD_OUT) == 0
    world.edit(MODEL, "seed: 0", "seed: 1")
    assert "it was trained from another recipe" in refusal(capsys, model, MODEL)
    world.edit(MODEL, "seed: 1", "seed: 0")
    (model / "checkpoints" / "4" / "manifest.json").unlink()
    assert "checkpoints/4: manifest.json cannot be read" in refusal(capsys, model, MODEL)


# ---- from URLs, also under a prefix in an object store ---------------------------------------------------------------

numbers = count()


@dataclass(frozen=True)
class Place:
    """An empty prefix, and a bucket with the files of every artifact."""

    world: TornWorld
    elsewhere: FsspecBucket
    files: Path
    """The same on a disk."""

    def adopt(self, target: str, source: str = "") -> int:
        place = ["--config", f"prefix={self.world.prefix}"] if self.world.prefix else []
        return cli.main(["adopt", source or f"{self.elsewhere.shown}/{target}", target, *place])

    def there(self) -> dict[str, bytes | None]:
        return {name: self.elsewhere.get(name)[0] for target in DATA for name in self._names(target)}

    def _names(self, target: str) -> list[str]:
        return [f"{target}/{name}" for name in self.elsewhere.listing(target)]


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, template: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.chdir(tmp_path)
    copy = template.copy(tmp_path)
    number, files = next(numbers), tmp_path / "elsewhere"
    elsewhere = open_bucket(f"memory://elsewhere/{number}")
    shutil.move(tmp_path / "artifacts", files)
    shutil.rmtree(tmp_path / ".marin", ignore_errors=True)
    for target in ALL:
        for path in sorted((files / target).rglob("*")):
            name = path.relative_to(files / target).as_posix()
            if path.is_file() and (name.startswith((".", "logs/")) or name.endswith(".lock")):
                path.unlink()
            elif path.is_file() and target in DATA:
                elsewhere.upload(path, f"{target}/{name}")
        shutil.rmtree(files / target / "logs", ignore_errors=True)
    request.getfixturevalue("memory_prefix")
    prefix = f"memory://here/{number}" if request.param == "memory" else ""
    return Place(TornWorld(copy.folder, prefix), elsewhere, files)


def test_what_is_adopted_from_a_url_is_finished_and_built_on(template: Template, place: Place):
    world, before = place.world, place.there()
    for target in (RAW, BYTES):
        assert place.adopt(target) == 0
        record = world.record(target)
        assert record.external == f"{place.elsewhere.shown}/{target}"
        assert record.digest == template.records[target].digest
        assert world.status(target).state is State.finished
        assert world.verify(target).ok
    assert world.run(TRAIN, HELD_OUT) in ([TRAIN, HELD_OUT], [HELD_OUT, TRAIN])
    for target in (TRAIN, HELD_OUT):
        assert world.record(target).digest == template.records[target].digest
        assert world.verify(target).ok
    assert world.run(TRAIN, HELD_OUT) == []
    assert place.there() == before


def test_a_tokenized_artifact_is_adopted_from_a_url_as_it_was(template: Template, place: Place):
    for target in (RAW, BYTES, TRAIN):
        assert place.adopt(target) == 0
    assert place.world.record(TRAIN).digest == template.records[TRAIN].digest
    assert place.world.run(TRAIN) == []


@pytest.mark.parametrize("front", ["", "file://"])
def test_a_folder_is_adopted_by_its_path_and_by_its_url(template: Template, place: Place, front: str):
    assert place.adopt(RAW, f"{front}{place.files / RAW}") == 0
    record = place.world.record(RAW)
    assert (record.external, record.digest) == (str(place.files / RAW), template.records[RAW].digest)
    assert place.adopt(BYTES, f"{front}{place.files / BYTES}") == 0
    assert place.world.run(HELD_OUT) == [HELD_OUT]
    assert place.world.record(HELD_OUT).digest == template.records[HELD_OUT].digest


def test_what_is_damaged_there_is_built_here_and_gc_never_takes_what_is_there(template: Template, place: Place):
    assert place.adopt(RAW) == 0
    (name, *_) = sorted(place.elsewhere.listing(RAW))
    place.elsewhere.delete(f"{RAW}/{name}")
    there = place.there()
    assert place.world.status(RAW).state is State.damaged
    assert place.world.run(RAW) == [RAW]
    record = place.world.record(RAW)
    assert (record.external, record.digest) == (None, template.records[RAW].digest)
    assert place.adopt(BYTES) == 0
    for target in ALL:
        if target != RAW:
            (place.world.folder / "config" / f"{target}.yaml").unlink()
    sweep = Sweeper(place.world.store, Settings(lease_seconds=1), 0, logging.getLogger("gc"))
    assert [(str(i.target), i.outcome) for i in sweep.delete(sweep.look())] == [(BYTES, "deleted")]
    assert place.world.record(BYTES) is None
    assert place.world.verify(RAW).ok
    assert place.there() == there


def test_what_lies_in_the_prefix_is_not_adopted(place: Place, capsys: pytest.CaptureFixture[str]):
    world = place.world
    prefix = world.prefix or f"file://{world.folder / 'artifacts'}"
    if world.prefix:
        open_bucket(prefix).put("other/data", b"x")
    else:
        (world.folder / "artifacts" / "other").mkdir(parents=True)
    assert place.adopt(RAW, f"{prefix}/other") == 2
    assert "is in the prefix" in capsys.readouterr().err
    assert world.record(RAW) is None


@pytest.mark.parametrize("place", ["memory"], indirect=True)
def test_a_build_that_was_committed_by_a_faster_one_is_not_replaced(place: Place, monkeypatch: pytest.MonkeyPatch):
    real, built = adoption._completed, []

    def pause(*arguments):  # for longer than the lease lasts; on a disk the lock is held meanwhile
        world = place.world
        world.store.delete(parse_target(RAW), ".lease.json")
        world.run(RAW)
        built.append(world.record(RAW))
        return real(*arguments)

    monkeypatch.setattr(adoption, "_completed", pause)
    assert place.adopt(RAW) == 5
    assert place.world.record(RAW) == built[0]
    assert place.world.verify(RAW).ok
