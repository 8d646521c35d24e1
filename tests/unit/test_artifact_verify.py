from __future__ import annotations

import os
from pathlib import Path

import pytest
from artifact_world import RAW, Parts, World

from marin_build.artifact.context import BuildContext, BuildResult
from marin_build.artifact.examine import State
from marin_build.errors import RequestError


def flip(path: Path, position: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0b100
    path.write_bytes(data)


def problems(world: World, *, full: bool) -> list[str]:
    return [str(problem).partition(" xxh3")[0] for problem in world.verify(RAW, full=full).problems]


def test_a_whole_artifact_is_well_in_both_depths(world: World):
    world.build(RAW)
    for full in (False, True):
        report = world.verify(RAW, full=full)
        assert report.ok
        assert report.full is full
        assert report.files == 4
        assert report.bytes == sum(entry["bytes"] for entry in world.record(RAW).files)


def test_an_unfinished_artifact_is_not_well(world: World):
    assert problems(world, full=False) == [".artifact.json: missing: the artifact is not finished"]


@pytest.mark.parametrize("full", [False, True])
def test_missing_and_resized_files_are_found_in_both_depths(world: World, full: bool):
    world.build(RAW)
    world.path(RAW, "part-0").unlink()
    os.truncate(world.path(RAW, "part-1"), 3)
    world.path(RAW, "part-2").unlink()
    world.path(RAW, "part-2").mkdir()
    assert problems(world, full=full) == [
        "part-0: missing",
        "part-1: has 3 bytes instead of 185",
        "part-2: is not a plain file",
    ]


def test_a_file_moved_within_the_prefix_with_a_link_left_is_well_until_the_link_breaks(world: World):
    world.build(RAW)
    elsewhere = world.folder / "artifacts/elsewhere"
    os.rename(world.path(RAW, "part-0"), elsewhere)
    world.path(RAW, "part-0").symlink_to(elsewhere)
    assert problems(world, full=True) == []
    elsewhere.unlink()
    assert problems(world, full=False) == ["part-0: missing"]
    assert world.build(RAW).built
    assert not world.path(RAW, "part-0").is_symlink()


@pytest.mark.row(8)
def test_a_flipped_bit_is_found_by_the_full_one_which_marks_the_record(world: World):
    world.build(RAW)
    flip(world.path(RAW, "part-1"))
    assert problems(world, full=False) == []
    assert world.status(RAW).state is State.finished
    assert problems(world, full=True) == ["part-1: other bytes:"]
    assert problems(world, full=False) == ["part-1: other bytes:"], "everybody sees the mark"
    assert world.status(RAW).state is State.damaged
    assert world.status(RAW).reasons[0].startswith("part-1: other bytes")


def test_the_mark_goes_when_all_is_well_again(world: World):
    record = world.build(RAW).record
    flip(world.path(RAW, "part-1"))
    world.verify(RAW)
    flip(world.path(RAW, "part-1"))
    assert world.status(RAW).state is State.damaged
    assert world.verify(RAW).ok
    assert world.status(RAW).state is State.finished
    assert world.record(RAW) == record


def test_a_file_restored_after_it_was_marked_is_kept(world: World):
    digest = world.build(RAW).record.digest
    data = world.path(RAW, "part-1").read_bytes()
    flip(world.path(RAW, "part-1"))
    world.verify(RAW)
    world.path(RAW, "part-1").write_bytes(data)
    builder = Parts()
    assert world.build(RAW, builder).record.digest == digest
    assert builder.made == []
    assert world.verify(RAW).foreign == ()


def test_a_well_artifact_is_not_written_to(world: World):
    world.build(RAW)
    before = world.path(RAW, ".artifact.json").stat()
    world.verify(RAW)
    after = world.path(RAW, ".artifact.json").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_two_swapped_files_are_found(world: World):
    world.build(RAW)
    one, two = world.path(RAW, "part-0"), world.path(RAW, "part-1")
    os.rename(one, one.with_name("aside"))
    os.rename(two, one)
    os.rename(one.with_name("aside"), two)
    assert problems(world, full=True) == ["part-0: other bytes:", "part-1: other bytes:"]


def test_damage_of_a_log_is_reported_but_no_reason_to_build_anew(world: World):
    world.build(RAW)
    (log,) = world.path(RAW, "logs").iterdir()
    flip(log)
    assert problems(world, full=True) == [f"logs/{log.name}: other bytes:"]
    assert world.status(RAW).state is State.finished


@pytest.mark.row(9)
def test_foreign_files_are_reported_apart_and_fail_nothing(world: World):
    def build(context: BuildContext) -> BuildResult:
        (context.folder / "inside").mkdir(exist_ok=True)
        (context.folder / "inside" / "x").write_text("x")
        return Parts()(context)

    world.build(RAW, build)
    world.path(RAW, "notes.txt").write_text("mine")
    world.path(RAW, "inside/more").write_text("mine")
    world.path(RAW, "inside/link").symlink_to("/etc/hostname")
    world.path(RAW, "logs/other.log").write_text("of an attempt that failed")
    report = world.verify(RAW)
    assert report.ok
    assert report.foreign == ("inside/link", "inside/more", "notes.txt")


def test_a_damaged_record_is_reported(world: World):
    world.build(RAW)
    flip(world.path(RAW, ".artifact.json"), 50)
    (problem,) = world.verify(RAW).problems
    assert problem.path == ".artifact.json"


def test_a_record_of_a_newer_version_is_an_error_and_not_damage(world: World):
    import dataclasses

    from marin_build.artifact.record import write_record

    record = world.build(RAW).record
    write_record(world.store, dataclasses.replace(record, schema=2, written_by="9.9"))
    for look in (world.verify, world.status, world.build):
        with pytest.raises(RequestError, match=r"use marin_build 9\.9"):
            look(RAW)


def test_a_report_is_plain_data(world: World):
    import json

    world.build(RAW)
    world.path(RAW, "part-0").unlink()
    body = json.loads(json.dumps(world.verify(RAW, full=False).to_dict()))
    assert body["target"] == RAW
    assert body["ok"] is False
    assert body["problems"] == [{"path": "part-0", "problem": "missing"}]


# ---- logs and metrics, which cannot be made again --------------------------------------------------------------------


def test_a_lost_log_fails_the_verification_that_notes_it_and_no_later_one(world: World):
    world.build(RAW)
    (log,) = world.path(RAW, "logs").iterdir()
    data, name = log.read_bytes(), f"logs/{log.name}"
    log.unlink()
    assert problems(world, full=False) == [f"{name}: missing"]
    assert problems(world, full=False) == [f"{name}: missing"], "a quick one notes nothing"
    assert problems(world, full=True) == [f"{name}: missing"]
    report = world.verify(RAW)
    assert report.ok
    assert report.lost == (name,)
    (note,) = world.record(RAW).lost
    assert (note["path"], note["problem"]) == (name, "missing")
    assert world.status(RAW).state is State.finished
    assert not world.build(RAW).built
    log.write_bytes(data)
    assert world.verify(RAW).lost == (name,)
    assert world.record(RAW).lost == (), "what turns up again is a file as before"
    assert name in {entry["path"] for entry in world.record(RAW).files}


def test_a_damaged_log_stays_and_is_not_foreign(world: World):
    world.build(RAW)
    (log,) = world.path(RAW, "logs").iterdir()
    flip(log)
    world.verify(RAW)
    report = world.verify(RAW)
    assert report.ok
    assert report.foreign == ()
    assert log.exists()


def test_a_repair_keeps_what_was_measured_and_notes_what_was_lost(world: World):
    def build(context: BuildContext) -> BuildResult:
        if not (context.folder / "part-0").exists():
            (context.folder / "metrics.jsonl").write_text('{"step": 1}\n')
        result = Parts(careful=True)(context)
        metrics = {"loss": 0.5} if not context.must_resume else {}
        return BuildResult(metrics=metrics, outside_digest=("metrics.jsonl",), details=result.details)

    world.build(RAW, build)
    flip(world.path(RAW, "part-1"))
    flip(world.path(RAW, "metrics.jsonl"))
    world.verify(RAW)
    assert world.build(RAW, build).built
    assert world.record(RAW).metrics == {"loss": 0.5}
    assert [entry["path"] for entry in world.record(RAW).lost] == ["metrics.jsonl"]
    assert world.verify(RAW).ok


# ---- an old record, and what lies where a small file belongs ---------------------------------------------------------


def test_an_old_record_put_beside_later_files_is_named_and_a_plain_build_writes_the_right_one(world: World):
    world.build(RAW)
    old = world.path(RAW, ".artifact.json").read_bytes()
    world.edit(RAW, "0123456789abcdef", "fedcba9876543210")
    digest = world.build(RAW, force="again").record.digest
    world.path(RAW, ".artifact.json").write_bytes(old)
    assert problems(world, full=True) == [
        ".artifact.json: is an old one: its files were made later, from another recipe"
    ]
    assert world.status(RAW).state is State.damaged
    builder = Parts()
    assert world.build(RAW, builder).record.digest == digest
    assert builder.made == []
    assert world.verify(RAW).ok


def test_a_restored_record_and_files_are_drift_and_not_damage(world: World):
    """All of an earlier build came back: then the files are what the record says."""
    world.build(RAW)
    earlier = {path.name: path.read_bytes() for path in world.path(RAW).iterdir() if path.is_file()}
    world.edit(RAW, "0123456789abcdef", "fedcba9876543210")
    world.build(RAW, force="again")
    for name, data in earlier.items():
        world.path(RAW, name).write_bytes(data)
    assert world.status(RAW).state is State.drifted


@pytest.mark.parametrize("name", [".artifact.json", ".attempt.json"])
def test_a_folder_where_a_small_file_belongs_is_set_aside(world: World, name: str):
    digest = world.build(RAW).record.digest
    world.path(RAW, name).unlink()
    world.path(RAW, name).mkdir()
    world.path(RAW, f"{name}/mine").write_text("x")
    world.build(RAW)
    world.build(RAW, force="again")
    assert world.record(RAW).digest == digest
    assert world.path(RAW, f".aside/{name}/mine").read_text() == "x"
