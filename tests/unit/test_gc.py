"""Housekeeping: what is needed stays, what is not goes after its time, and what cannot be known goes never."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from artifact_world import CHECKPOINT, RAW, RAW_DEV, TOKENIZER, TOKENS, TOKENS_DEV, Parts, World, killed_at
from sweeping import LOG, VALIDATION, Clock, deleted, drop_recipe, found, interrupted, sweeper

from marin_build.artifact import mirror
from marin_build.artifact.attempt import read_attempt
from marin_build.artifact.examine import State
from marin_build.artifact.lease import Terms, acquire
from marin_build.artifact.reach import unmatched
from marin_build.artifact.sightings import DAY
from marin_build.errors import RecipeError, RequestError, Stopped
from marin_build.recipe.target import parse_target


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def finished(world: World) -> World:
    world.build_all(RAW, TOKENIZER, TOKENS, VALIDATION, CHECKPOINT)
    return world


# ---- what is needed --------------------------------------------------------------------------------------------------


def test_what_recipes_name_is_needed_with_all_of_its_files(finished: World):
    before = {path: path.read_bytes() for path in (finished.folder / "artifacts").rglob("*") if path.is_file()}
    assert deleted(finished) == []
    assert before == {path: path.read_bytes() for path in (finished.folder / "artifacts").rglob("*") if path.is_file()}


def test_an_artifact_that_nothing_names_goes_and_its_folder_with_it(finished: World):
    drop_recipe(finished, CHECKPOINT)
    assert list(found(finished)) == [(CHECKPOINT, "artifact")]
    (item,) = deleted(finished)
    assert item.outcome == "deleted"
    assert not (finished.folder / "artifacts" / "checkpoints").exists()
    assert not mirror.path(parse_target(CHECKPOINT)).exists()
    assert finished.status(TOKENS).state is State.finished


def test_what_a_needed_record_was_made_from_stays_without_a_recipe_of_its_own(finished: World):
    """As recorded, and as measured on: the recipe of now names other data."""
    finished.edit(CHECKPOINT, "x: {target: tokenized/x/2026.06.28", "x: {target: tokenized/v/2026.06.28")
    drop_recipe(finished, TOKENS)
    assert found(finished) == {}
    drop_recipe(finished, CHECKPOINT)
    assert list(found(finished)) == [(CHECKPOINT, "artifact"), (TOKENS, "artifact")]


@pytest.mark.parametrize("keep", [CHECKPOINT, "checkpoints/*", "*/2026.06.28"])
def test_a_pin_keeps_an_artifact_and_what_it_was_made_from(finished: World, keep: str):
    drop_recipe(finished, CHECKPOINT, TOKENS)
    assert found(finished, keep=[keep]) == {}
    assert found(finished, keep=["checkpoints/other/*"]).keys() == {(CHECKPOINT, "artifact"), (TOKENS, "artifact")}
    assert unmatched(finished.store, [keep, "checkpoints/other/*"]) == ["checkpoints/other/*"]


def test_parts_of_a_set_are_needed_until_the_set_is_finished(world: World):
    parts = ["parts/x/00000-of-00002/2026.06.28", "parts/x/00001-of-00002/2026.06.28"]
    world.build_all(RAW, TOKENIZER, *parts)
    assert found(world) == {}
    interrupted(world, TOKENS)
    assert found(world) == {}
    world.build(TOKENS)
    assert list(found(world)) == [(part, "artifact") for part in parts]
    assert found(world, keep=["parts/*"]) == {}
    assert {item.why for item in deleted(world)} == {"its set is finished, or has no recipe"}
    assert world.verify(TOKENS).ok
    assert world.verify(RAW).ok


def test_the_check_of_a_tokenizer_is_needed_as_long_as_that_has_a_recipe(world: World):
    check, other = "checks/encoder/other/2026.06.28", "tokenizers/other/2026.06.28"
    world.write(other, (world.folder / "config" / f"{TOKENIZER}.yaml").read_text())
    world.build_all(other, check)
    assert found(world) == {}
    drop_recipe(world, other)
    assert list(found(world)) == [(check, "artifact"), (other, "artifact")]


def test_parts_of_a_set_that_is_being_built_anew_are_needed(world: World):
    part = "parts/x/00000-of-00001/2026.06.28"
    world.build_all(RAW, TOKENIZER, TOKENS, part)
    sweep = sweeper(world, 0)
    items = sweep.look()
    assert [item.place for item in items] == [part]
    lease = acquire(world.store, parse_target(TOKENS), Terms(30), LOG)
    assert found(world) == {}
    assert [item.outcome.partition(":")[0] for item in sweep.delete(items)] == ["kept, at least in part"]
    assert world.verify(part).ok
    lease.release()
    assert [item.outcome for item in deleted(world)] == ["deleted"]


def test_parts_that_are_pinned_between_the_look_and_the_deletion_stay(world: World):
    part = "parts/x/00000-of-00001/2026.06.28"
    world.build_all(RAW, TOKENIZER, TOKENS, part)
    items = sweeper(world, 0).look()
    (item,) = sweeper(world, 0, keep=["parts/*"]).delete(items)
    assert item.outcome.startswith("kept")
    world.edit(TOKENS, "shard_bytes: 1000", "shard_bytes: 1001")
    (item,) = sweeper(world, 0).delete(items)
    assert item.outcome.startswith("kept"), "the set will be built anew, from another recipe"
    assert world.verify(part).ok


def test_parts_of_a_set_whose_recipe_is_gone_are_not_needed(world: World):
    part = "parts/v/00000-of-00001/2026.06.28"
    world.build_all(RAW, TOKENIZER, part)
    assert found(world) == {}
    drop_recipe(world, VALIDATION, CHECKPOINT)
    assert list(found(world)) == [(part, "artifact")]


def test_unfinished_work_keeps_what_it_is_made_from(finished: World):
    def stop(context, number):
        raise Stopped("stop")

    finished.write("tokenized/y/dev", (finished.folder / "config" / f"{TOKENS}.yaml").read_text())
    with pytest.raises(Stopped):
        finished.build("tokenized/y/dev", Parts(before_part=lambda c, n: n and stop(c, n)))
    raw = (finished.folder / "config" / f"{RAW}.yaml").read_text()
    drop_recipe(finished, CHECKPOINT, TOKENS, VALIDATION, RAW, RAW_DEV, TOKENS_DEV)
    finished.edit("tokenized/y/dev", RAW, "raw/b/dev")
    finished.write("raw/b/dev", raw)
    assert (RAW, "artifact") not in found(finished), "the attempt names it"


def test_what_is_being_built_stays(finished: World):
    drop_recipe(finished, CHECKPOINT)
    lease = acquire(finished.store, parse_target(CHECKPOINT), Terms(30), LOG)
    assert found(finished) == {}
    lease.release()
    assert list(found(finished)) == [(CHECKPOINT, "artifact")]


def test_a_recipe_below_a_linked_folder_counts(finished: World):
    (finished.folder / "config" / "checkpoints").rename(finished.folder / "config" / "models")
    assert list(found(finished)) == [(CHECKPOINT, "artifact")]
    (finished.folder / "config" / "checkpoints").symlink_to("models")
    assert found(finished) == {}


# ---- what cannot be known --------------------------------------------------------------------------------------------


def test_a_broken_recipe_anywhere_stops_it_with_its_name(finished: World):
    drop_recipe(finished, CHECKPOINT)
    finished.edit(TOKENS_DEV, "add_eos: true", "add_eos: maybe")
    with pytest.raises(RecipeError, match=r"tokenized/x/dev\.yaml:(.|\n)*gc deletes nothing"):
        sweeper(finished).look()


def test_no_recipe_at_all_stops_it(finished: World):
    with pytest.raises(RequestError, match="no recipe is below"):
        sweeper(finished, recipes=str(finished.folder / "nowhere")).look()


def test_files_of_unknown_origin_and_of_damaged_records_stay(finished: World):
    for name in (".artifact.json", ".attempt.json"):
        finished.path(CHECKPOINT, name).unlink()
    finished.path(RAW, ".artifact.json").write_bytes(b"{")
    finished.path(RAW, "notes.txt").write_text("mine")
    assert found(finished) == {}


# ---- inside of what is needed ----------------------------------------------------------------------------------------


def test_files_that_no_record_names_go_and_logs_never(finished: World):
    keep = {path for path in finished.path(RAW).rglob("*") if path.is_file()}
    for name in ("notes.txt", ".aside/part-0", "half.tmp", "part-9", ".rebuild/part-0"):
        finished.path(RAW, name).parent.mkdir(exist_ok=True)
        finished.path(RAW, name).write_text("x")
    old_log = finished.path(RAW, "logs/old.log")
    old_log.write_text("x")
    items = found(finished)
    assert {what for _, what in items} == {"foreign file", "set aside", "unfinished file", "abandoned rebuild"}
    assert items[RAW, "foreign file"].names == ("notes.txt", "part-9")
    assert {item.outcome for item in deleted(finished)} == {"deleted"}
    assert {path for path in finished.path(RAW).rglob("*") if path.is_file()} == {*keep, old_log}
    assert finished.verify(RAW).ok


def test_a_lost_log_is_not_foreign(finished: World):
    (log,) = finished.path(RAW, "logs").iterdir()
    log.write_text("other")
    finished.verify(RAW)
    assert found(finished) == {}


def test_unfinished_work_goes_once_no_build_resumes_it(world: World):
    interrupted(world, RAW)
    assert found(world) == {}
    world.edit(RAW, "0123456789abcdef", "fedcba9876543210")
    (item,) = deleted(world)
    assert (item.what, item.names) == ("unfinished work", (".attempt.json", "part-0", "part-1"))
    assert world.status(RAW).state is State.missing


def test_an_interrupted_rebuild_goes_once_no_build_resumes_it_and_the_artifact_stays(world: World):
    record = world.build(RAW).record
    interrupted(world, RAW, force="run")
    assert found(world) == {}
    world.edit(RAW, "0123456789abcdef", "fedcba9876543210")
    (item,) = deleted(world)
    assert item.what == "unfinished work"
    assert read_attempt(world.store, parse_target(RAW)) is None
    assert world.record(RAW) == record
    assert world.verify(RAW).ok


def test_pinned_work_without_a_recipe_stays(world: World):
    """Nobody can know whether a build will resume it."""
    world.write("raw/alone/2026.06.28", (world.folder / "config" / f"{RAW}.yaml").read_text())
    interrupted(world, "raw/alone/2026.06.28")
    drop_recipe(world, "raw/alone/2026.06.28")
    assert list(found(world)) == [("raw/alone/2026.06.28", "artifact")]
    assert found(world, keep=["raw/alone/*"]) == {}


# ---- the grace period ------------------------------------------------------------------------------------------------


def test_only_what_was_listed_for_the_whole_time_goes(finished: World, clock: Clock):
    drop_recipe(finished, CHECKPOINT)
    assert [item.due for item in deleted(finished, 7)] == [False]
    clock.pass_days(6.9)
    assert [item.due for item in deleted(finished, 7)] == [False]
    finished.path(CHECKPOINT, "new").write_text("x")
    clock.pass_days(0.2)
    assert [item.due for item in deleted(finished, 7)] == [False], "its time begins with its newest file"
    clock.pass_days(7)
    assert [(item.due, item.outcome) for item in deleted(finished, 7)] == [(True, "deleted")]
    assert deleted(finished, 7) == []


def test_what_is_needed_again_is_forgotten(finished: World, clock: Clock):
    text = (finished.folder / "config" / f"{CHECKPOINT}.yaml").read_text()
    drop_recipe(finished, CHECKPOINT)
    sweeper(finished).look()
    clock.pass_days(6)
    finished.write(CHECKPOINT, text)
    assert sweeper(finished).look() == []
    assert not finished.path(CHECKPOINT, ".gc.json").exists()
    drop_recipe(finished, CHECKPOINT)
    clock.pass_days(6)
    assert [item.due for item in sweeper(finished).look()] == [False]


@pytest.mark.row(15)
@pytest.mark.parametrize("off_days", [-2, 2])
def test_a_clock_that_is_set_decides_nothing(finished: World, clock: Clock, off_days: int):
    drop_recipe(finished, CHECKPOINT)
    sweeper(finished).look()
    clock.pass_days(6)
    clock.wall += off_days * DAY
    assert [item.due for item in sweeper(finished).look()] == [False]
    clock.pass_days(1)
    assert [item.due for item in sweeper(finished).look()] == [True], "the clock since the start was not set"


def test_across_a_restart_the_time_of_day_counts_less_its_possible_error(finished: World, clock: Clock):
    drop_recipe(finished, CHECKPOINT)
    clock.wall -= 2 * DAY
    sweeper(finished).look()
    clock.boot, clock.seconds = "another boot", 5.0
    clock.wall += (6.9 + 4) * DAY
    assert [item.due for item in sweeper(finished).look()] == [False]
    clock.wall += 0.2 * DAY
    assert [item.due for item in sweeper(finished).look()] == [True]


@pytest.mark.parametrize("note", [b"", b"[", b"[1]", b'[{"files": {"x": 1}}]', b"{}"])
def test_an_unreadable_note_makes_everything_new(finished: World, clock: Clock, note: bytes):
    drop_recipe(finished, CHECKPOINT)
    sweeper(finished).look()
    clock.pass_days(30)
    finished.path(CHECKPOINT, ".gc.json").write_bytes(note)
    assert [item.due for item in sweeper(finished).look()] == [False]


# ---- deleting --------------------------------------------------------------------------------------------------------


def test_what_becomes_needed_between_the_look_and_the_deletion_stays(finished: World):
    text = (finished.folder / "config" / f"{CHECKPOINT}.yaml").read_text()
    drop_recipe(finished, CHECKPOINT)
    sweep = sweeper(finished, 0)
    items = sweep.look()
    finished.write(CHECKPOINT, text)
    (item,) = sweep.delete(items)
    assert item.outcome.startswith("kept")
    assert finished.verify(CHECKPOINT).ok


def test_what_is_leased_between_the_look_and_the_deletion_stays(finished: World):
    drop_recipe(finished, CHECKPOINT)
    sweep = sweeper(finished, 0)
    items = sweep.look()
    lease = acquire(finished.store, parse_target(CHECKPOINT), Terms(30), LOG)
    (item,) = sweep.delete(items)
    assert "is being built by" in item.outcome
    lease.release()
    assert finished.verify(CHECKPOINT).ok


def test_killed_anywhere_no_record_is_left_without_its_bytes_and_the_next_call_goes_on(finished: World, tmp_path: Path):
    drop_recipe(finished, CHECKPOINT)
    whole = Path(shutil.copytree(finished.path(CHECKPOINT), tmp_path / "whole"))
    for call in range(1, 200):
        shutil.rmtree(finished.path(CHECKPOINT), ignore_errors=True)
        shutil.copytree(whole, finished.path(CHECKPOINT))
        ended = killed_at(call, lambda: deleted(finished))
        if finished.path(CHECKPOINT, ".artifact.json").exists():
            assert finished.verify(CHECKPOINT).ok
        if ended == 0:
            break
        assert [item.outcome for item in deleted(finished)] in (["deleted"], []), call
        assert not finished.store.listing(parse_target(CHECKPOINT))
    assert ended == 0
    assert call > 8


# ---- the command -----------------------------------------------------------------------------------------------------


def command(world: World, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    from marin_build.cli import main

    code = main(["gc", "--prefix", str(world.folder / "artifacts"), "--recipes", str(world.folder / "config"), *words])
    out, err = capsys.readouterr()
    return code, out + err


def test_the_dry_run_says_what_the_real_run_does(finished: World, capsys: pytest.CaptureFixture[str]):
    assert command(finished, capsys) == (0, "everything is needed\n")
    drop_recipe(finished, CHECKPOINT)
    code, text = command(finished, capsys)
    assert code == 0
    assert f"{CHECKPOINT}  artifact" in text
    assert "in 7.0 days" in text
    assert "nothing can go" in text
    dry = json.loads(command(finished, capsys, "--grace-days", "0", "--json")[1])
    assert finished.path(CHECKPOINT, ".artifact.json").exists()
    assert "marin-build gc --delete" in command(finished, capsys, "--grace-days", "0")[1]
    real = json.loads(command(finished, capsys, "--grace-days", "0", "--json", "--delete")[1])
    assert [item.pop("outcome") for item in real] == ["deleted"]
    assert [{**item, "seconds": 0} for item in real] == [
        {key: 0 if key == "seconds" else value for key, value in item.items() if key != "outcome"} for item in dry
    ]
    assert command(finished, capsys) == (0, "everything is needed\n")


@pytest.mark.parametrize("days", ["-1", "nan", "inf", "x"])
def test_a_grace_period_is_a_number_of_days(world: World, capsys: pytest.CaptureFixture[str], days: str):
    with pytest.raises(SystemExit):
        command(world, capsys, f"--grace-days={days}")
