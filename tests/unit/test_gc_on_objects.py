"""Housekeeping on object stores: what was replaced or abandoned goes after its time, what can be used never."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import pytest
from artifact_world import CHECKPOINT, RAW, TOKENIZER, TOKENS, Parts, World
from store_kinds import on, servers, world
from sweeping import LOG, VALIDATION, Clock, deleted, drop_recipe, found, interrupted, sweeper

from marin_build.artifact.attempt import read_attempt
from marin_build.artifact.examine import State
from marin_build.artifact.lease import Lease, Terms, acquire
from marin_build.artifact.object_store import ObjectStore
from marin_build.artifact.store import ATTEMPT, BUILDS, LEASE, NOTE, RECORD
from marin_build.cli import main
from marin_build.recipe.target import parse_target

__all__ = ["servers", "world"]

TARGET = parse_target(RAW)
ALONE = "raw/alone/2026.06.28"
"""Nothing is made from it."""

in_memory = on("memory")
"""Where a listing shows all that is there, so that it can be said what goes."""
even_where_listings_are_old = on("memory", "flaky")
"""For what may never go."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def builds(world: World, target: str = RAW) -> set[str]:
    """The builds that are more than logs."""
    names = [name.split("/") for name in world.store.listing(parse_target(target))]
    return {"/".join(parts[:2]) for parts in names if parts[0] == BUILDS and parts[2] != "logs"}


class Killed(BaseException):
    pass


def die(*arguments: Any) -> None:
    raise Killed


# ---- what goes -------------------------------------------------------------------------------------------------------


@in_memory
def test_a_replaced_build_goes_after_its_time_with_all_but_its_logs(world: World, clock: Clock):
    old = world.build(RAW).record
    new = world.build(RAW, Parts(2, salt="new"), force="a run").record
    assert builds(world) == {old.folder, new.folder}
    assert [(item.what, item.due) for item in deleted(world, 7)] == [("replaced build", False)]
    clock.pass_days(6.9)
    assert [item.due for item in deleted(world, 7)] == [False]
    assert builds(world) == {old.folder, new.folder}
    clock.pass_days(0.2)
    assert [item.outcome for item in deleted(world, 7)] == ["deleted"]
    assert builds(world) == {new.folder}
    assert any(name.startswith(f"{old.folder}/logs/") for name in world.store.listing(TARGET))
    assert world.record(RAW) == new
    assert world.verify(RAW).ok
    assert not world.on_another_machine().build(RAW).built
    assert deleted(world) == []


@in_memory
def test_a_build_that_another_has_gone_on_from_goes_and_that_one_stays(world: World):
    interrupted(world, RAW)
    first = read_attempt(world.store, TARGET)
    other = world.on_another_machine()
    interrupted(other, RAW)
    second = read_attempt(world.store, TARGET)
    assert builds(world) == {first.folder, second.folder}
    assert [item.what for item in deleted(world)] == ["replaced build"]
    assert builds(world) == {second.folder}
    builder = Parts()
    assert world.on_another_machine().on_another_machine().build(RAW, builder).built
    assert builder.made == ["part-2"]


@in_memory
@pytest.mark.parametrize("force", [None, "a run"])
def test_unfinished_work_of_another_recipe_goes(world: World, force: str | None):
    record = world.build(RAW).record if force else None
    interrupted(world, RAW, force=force)
    assert deleted(world) == []
    world.edit(RAW, "0123456789abcdef", "fedcba9876543210")
    (item,) = deleted(world)
    assert (item.what, item.outcome, item.names[0]) == ("unfinished work", "deleted", ATTEMPT)
    assert builds(world) == ({record.folder} if record else set())
    assert world.record(RAW) == record


@in_memory
def test_an_artifact_that_nothing_names_goes_whole(world: World):
    world.build_all(RAW, TOKENIZER, TOKENS, VALIDATION, CHECKPOINT)
    world.build(CHECKPOINT, Parts(1, salt="new"), force="a run")
    drop_recipe(world, CHECKPOINT)
    lists = found(world)
    assert list(lists) == [(CHECKPOINT, "artifact")]
    assert [item.outcome for item in deleted(world)] == ["deleted"]
    assert world.store.listing(parse_target(CHECKPOINT)) == {}
    assert parse_target(CHECKPOINT) not in world.store.targets()
    for target in (RAW, TOKENIZER, TOKENS, VALIDATION):
        assert world.verify(target).ok
    assert deleted(world) == []


# ---- what stays ------------------------------------------------------------------------------------------------------


@in_memory
def test_a_rebuild_that_can_go_on_stays_and_goes_on(world: World):
    record = world.build(RAW).record
    interrupted(world, RAW, force="a run")
    assert deleted(world) == []
    builder = Parts()
    assert world.on_another_machine().build(RAW, builder, force="a run").built
    assert builder.made == ["part-2"]
    assert {item.what for item in deleted(world)} == {"replaced build"}
    assert builds(world) == {world.record(RAW).folder} != {record.folder}


@in_memory
def test_a_repair_that_can_go_on_stays_and_goes_on(world: World):
    record = world.build(RAW, Parts(4)).record
    for number in (0, 1, 3):  # before the third part, the second one lies there
        world.store.bucket.delete(f"{RAW}/{record.folder}/part-{number}")

    interrupted(world, RAW, 4)
    repair = read_attempt(world.store, TARGET)
    assert repair.repairs is not None
    deleted(world)
    assert builds(world) == {record.folder, repair.folder}
    builder = Parts(4)
    healed = world.on_another_machine().build(RAW, builder).record
    assert (builder.made, healed.digest) == (["part-3"], record.digest), "what the repair had made was kept"
    assert [item.outcome for item in deleted(world)] == ["deleted"]
    assert builds(world) == {healed.folder}
    assert world.verify(RAW).ok


@even_where_listings_are_old
def test_what_a_live_builder_works_on_stays_and_so_does_what_it_replaces(world: World):
    text = (world.folder / "config" / f"{RAW}.yaml").read_text()
    world.write(ALONE, text)
    target = parse_target(ALONE)
    old = world.build(ALONE).record
    swept: list[object] = []

    def sweep(context: Any, number: int) -> None:
        if number == 2:
            drop_recipe(world, ALONE)
            swept.extend(item for item in deleted(world.on_another_machine()) if item.outcome == "deleted")
            world.write(ALONE, text)
            attempt = read_attempt(world.store, target)
            for name in (f"{old.folder}/part-0", f"{attempt.folder}/part-0", ATTEMPT, RECORD, LEASE):
                assert world.store.read(target, name)

    new = world.build(ALONE, Parts(3, salt="new", before_part=sweep), force="a run").record
    assert swept == []
    assert world.record(ALONE) == new
    assert world.verify(ALONE).ok


@in_memory
def test_a_build_whose_lease_is_sealed_stays_and_is_put_in_place_by_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """Its builder was killed after the decision; the lease is silent, and still says what is to be done."""
    world.build(RAW, Parts(1, salt="old"))
    with monkeypatch.context() as patch:
        patch.setattr(Lease, "start", lambda lease: None)
        patch.setattr(ObjectStore, "put_in_place", die)
        patch.setattr(Lease, "release", die)
        with pytest.raises(Killed):
            world.build(RAW, Parts(2, salt="new"), force="a run", lease_seconds=0.2)
    time.sleep(0.3)
    assert world.store.is_decided(TARGET)
    assert deleted(world) == []
    never = Parts(9)
    world.on_another_machine().build(RAW, never)
    assert never.made == []
    assert len(world.record(RAW).content) == 2
    assert [item.what for item in deleted(world)] == ["replaced build"]
    assert world.verify(RAW).ok


@in_memory
def test_what_was_sealed_between_the_look_and_the_deletion_is_put_in_place_and_stays(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    """The old build is then the replaced one, and has to be listed for its time first."""
    world.build(RAW, Parts(1, salt="0"))
    middle = world.build(RAW, Parts(1, salt="1"), force="run 1").record
    sweep = sweeper(world, 0)
    items = sweep.look()
    with monkeypatch.context() as patch:
        patch.setattr(Lease, "start", lambda lease: None)
        patch.setattr(ObjectStore, "put_in_place", die)
        patch.setattr(Lease, "release", die)
        with pytest.raises(Killed):
            world.build(RAW, Parts(2, salt="2"), force="run 2", lease_seconds=0.2)
    time.sleep(0.3)
    assert [item.outcome for item in sweep.delete(items)] == ["deleted"]
    assert len(world.record(RAW).content) == 2
    assert world.verify(RAW).ok
    assert builds(world) == {middle.folder, world.record(RAW).folder}


@in_memory
def test_what_is_leased_between_the_look_and_the_deletion_stays(world: World):
    world.build(RAW)
    world.build(RAW, Parts(1), force="a run")
    sweep = sweeper(world, 0)
    items, before = sweep.look(), builds(world)
    lease = acquire(world.on_another_machine().store, TARGET, Terms(30), LOG)
    (item,) = sweep.delete(items)
    assert "is being built by" in item.outcome
    assert builds(world) == before
    lease.release()


@in_memory
def test_a_record_that_was_committed_meanwhile_is_not_removed(world: World, monkeypatch: pytest.MonkeyPatch):
    """As when the deletion is paused right after it has looked at its lease, for longer than that lasts."""
    world.build_all(RAW, TOKENIZER, TOKENS, VALIDATION, CHECKPOINT)
    target, text = parse_target(CHECKPOINT), (world.folder / "config" / f"{CHECKPOINT}.yaml").read_text()
    drop_recipe(world, CHECKPOINT)
    sweep = sweeper(world, 0)
    items = sweep.look()
    real, paused = Lease.check, []

    def check_and_pause(lease: Lease) -> None:
        real(lease)
        if lease.target == target and not paused:
            paused.append(True)
            world.store.delete(target, LEASE)
            world.write(CHECKPOINT, text)
            world.on_another_machine().build(CHECKPOINT, Parts(2, salt="new"), force="a run")

    monkeypatch.setattr(Lease, "check", check_and_pause)
    (item,) = sweep.delete(items)
    assert paused
    assert item.outcome.startswith("kept")
    assert len(world.record(CHECKPOINT).content) == 2
    assert world.verify(CHECKPOINT).ok
    assert world.status(CHECKPOINT).state is State.finished


@in_memory
def test_killed_anywhere_no_record_is_left_without_its_bytes_and_the_next_call_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    world.build_all(RAW, TOKENIZER, TOKENS, VALIDATION, CHECKPOINT)
    drop_recipe(world, CHECKPOINT)
    bucket = type(world.store.bucket)
    whole = {name: world.store.bucket.get(f"{CHECKPOINT}/{name}")[0] for name in listing(world, CHECKPOINT)}
    real = bucket.delete
    for call in range(1, 50):
        for name, data in whole.items():
            world.store.bucket.put(f"{CHECKPOINT}/{name}", data)
        left = [call]

        def die_at(self: Any, *arguments: Any, left: list[int] = left) -> bool:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return real(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(bucket, "delete", die_at)
            with contextlib.suppress(Killed):
                deleted(world)
        if world.store.read(parse_target(CHECKPOINT), RECORD):
            assert world.verify(CHECKPOINT).ok
        if left[0] >= 0:
            break
        world.store.delete(parse_target(CHECKPOINT), LEASE)
        assert [item.outcome for item in deleted(world)] in (["deleted"], []), call
        assert listing(world, CHECKPOINT) == {}
    assert call > 5
    assert left[0] >= 0


def listing(world: World, target: str) -> dict[str, int]:
    return world.store.listing(parse_target(target))


# ---- the command -----------------------------------------------------------------------------------------------------


@on("memory")
@pytest.mark.usefixtures("memory_prefix")
def test_the_dry_run_says_what_the_real_run_does(world: World, capsys: pytest.CaptureFixture[str]):
    world.build_all(RAW, TOKENIZER, TOKENS, VALIDATION, CHECKPOINT)
    world.build(RAW, force="a run")
    interrupted(world, TOKENIZER, force="a run")
    world.edit(TOKENIZER, "<eos>", "<end>")
    drop_recipe(world, CHECKPOINT)

    def gc(*words: str) -> list[dict[str, Any]]:
        place = ["--prefix", world.prefix, "--recipes", str(world.folder / "config"), "--json", "--grace-days", "0"]
        assert main(["gc", *place, *words]) == 0
        return [{**item, "seconds": 0} for item in json.loads(capsys.readouterr().out)]

    before = {target: world.store.listing(target) for target in world.store.targets()}
    dry = gc()
    assert {(item["target"], item["what"]) for item in dry} == {
        (RAW, "replaced build"),
        (TOKENIZER, "unfinished work"),
        (CHECKPOINT, "artifact"),
    }
    after = {target: world.store.listing(target) for target in world.store.targets()}
    noted = {(target, NOTE) for target in map(parse_target, (RAW, TOKENIZER, CHECKPOINT))}
    assert {(t, n) for t in after for n in after[t]} == {(t, n) for t in before for n in before[t]} | noted
    assert gc("--delete") == [{**item, "outcome": "deleted"} for item in dry]
    gone = {(item["target"], name) for item in dry for name in item["names"]}
    left = {(str(t), n) for t in world.store.targets() for n in world.store.listing(t)}
    assert left == {(str(t), n) for t in before for n in before[t]} - gone
    assert gc() == []
