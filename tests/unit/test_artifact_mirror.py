from __future__ import annotations

import json
import os

import pytest
from artifact_world import RAW, TOKENIZER, World

from marin_build.artifact import forced, mirror
from marin_build.errors import RequestError
from marin_build.recipe.target import Target, parse_target

TARGETS = [parse_target(RAW), parse_target(TOKENIZER)]
RAW_TARGET = TARGETS[0]


def refresh(world: World, target: Target = RAW_TARGET) -> None:
    status = world.status(str(target))
    mirror.refresh(world.store, target, status.record)


def test_the_mirror_follows_the_record(world: World):
    world.build(RAW)
    mirror.path(RAW_TARGET).unlink()
    refresh(world)
    assert json.loads(mirror.path(RAW_TARGET).read_text())["fingerprint"] == world.record(RAW).fingerprint
    stale = mirror.path(TARGETS[1])
    stale.parent.mkdir(parents=True)
    stale.write_text("{}")
    refresh(world, TARGETS[1])
    assert not stale.exists()


def test_an_unreadable_record_has_no_mirror(world: World):
    world.build(RAW)
    world.path(RAW, ".artifact.json").write_text("{")
    refresh(world)
    assert not mirror.path(RAW_TARGET).exists()


def test_a_build_that_ended_since_the_look_keeps_its_mirror(world: World):
    world.build(RAW)
    mirror.refresh(world.store, RAW_TARGET, None)
    assert mirror.path(RAW_TARGET).exists()


def test_an_equal_mirror_is_left_alone(world: World):
    world.build(RAW)
    before = mirror.path(RAW_TARGET).stat()
    refresh(world)
    after = mirror.path(RAW_TARGET).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert os.listdir(mirror.path(RAW_TARGET).parent) == ["2026.06.28.json"]


def test_a_working_directory_that_cannot_be_written_to_is_named(world: World):
    world.build(RAW)
    record = world.record(RAW)
    (world.folder / "blocked").write_text("")
    with pytest.raises(RequestError, match="cannot write blocked"):
        mirror.write(record, folder=world.folder.__class__("blocked"))


def test_a_forced_run_is_noted_read_and_cleared_by_its_run_only(world: World):
    assert forced.read(RAW_TARGET) is None
    forced.write(RAW_TARGET, "r1")
    assert json.loads(forced.path(RAW_TARGET).read_text()) == {"run": "r1"}
    forced.clear(RAW_TARGET, "r0")
    assert forced.read(RAW_TARGET) == "r1"
    forced.clear(RAW_TARGET, "r1")
    assert forced.read(RAW_TARGET) is None
    forced.clear(RAW_TARGET)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": 3}'])
def test_an_unreadable_note_forces_nothing(world: World, text: str):
    forced.write(RAW_TARGET, "r1")
    forced.path(RAW_TARGET).write_text(text)
    assert forced.read(RAW_TARGET) is None


def test_a_folder_where_a_mirror_belongs_is_removed(world: World):
    outcome = world.build(RAW)
    place = mirror.path(parse_target(RAW))
    for act in (lambda: mirror.write(outcome.record), lambda: mirror.remove(parse_target(RAW))):
        place.unlink(missing_ok=True)
        place.mkdir(parents=True)
        act()
        assert not place.is_dir()
