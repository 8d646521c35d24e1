"""Housekeeping of what artifacts of an object store share: nothing goes that a record or an attempt names."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from artifact_world import RAW, Parts, World
from sharing import DONOR, TAKER, THIRD, Shards, texts, with_takers
from store_kinds import on, servers, world
from sweeping import LOG, Clock, deleted, drop_recipe, found, sweeper

from marin_build.artifact.context import BuildContext
from marin_build.artifact.kept import chain_key
from marin_build.artifact.lease import Terms, acquire
from marin_build.artifact.store import RECORD
from marin_build.cli import main
from marin_build.errors import Stopped
from marin_build.recipe.target import parse_target

__all__ = ["servers", "world"]

in_memory = on("memory")
even_where_listings_are_old = on("memory", "flaky")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def pool(world: World) -> set[str]:
    return {name for name in world.store.bucket.listing(".pool") if name != ".gc.json"}


def stopped(world: World, target: str, files: dict[str, bytes], before: str) -> None:
    """A build that is stopped before it makes one of the files."""

    def stop(context: BuildContext, name: str) -> None:
        if name == before:
            raise Stopped("stop")

    with pytest.raises(Stopped):
        world.build(target, Shards(files, before_making=stop))


@on("memory", "flaky", "gs", "s3")
def test_what_one_still_names_stays_when_the_other_is_built_anew_and_swept(world: World):
    with_takers(world).build(DONOR, Shards(texts(3)))
    world.build(TAKER, Shards(texts(3)))
    world.build(DONOR, Shards(texts(3, "other"), takes=False), force="a run")
    drop_recipe(world, DONOR)
    for _ in range(4):
        assert TAKER not in {item.place for item in deleted(world)}
    assert world.record(DONOR) is None
    assert world.verify(TAKER).ok
    assert world.build(THIRD, taker := Shards(texts(3))).built
    assert taker.made == []


@in_memory
def test_what_nothing_names_goes_after_its_time(world: World, clock: Clock):
    with_takers(world).build(DONOR, Shards(texts(3)))
    world.build(TAKER, Shards(texts(2)))
    drop_recipe(world, DONOR)
    deleted(world, 7)
    clock.pass_days(8)
    assert [(item.place, item.outcome) for item in deleted(world, 7)] == [(DONOR, "deleted")]
    (item,) = deleted(world, 7)
    assert (item.place, item.what, len(item.names), item.bytes, item.due) == (".pool", "shared files", 1, 3000, False)
    clock.pass_days(6.9)
    assert [item.due for item in deleted(world, 7)] == [False]
    assert len(pool(world)) == 3
    clock.pass_days(0.2)
    assert [item.outcome for item in deleted(world, 7)] == ["deleted"]
    assert len(pool(world)) == 2
    assert deleted(world, 7) == []
    assert world.store.bucket.get(".pool/.gc.json")[0] is None
    assert world.verify(TAKER).ok


@in_memory
def test_what_is_named_again_is_forgotten_and_its_time_begins_anew(world: World, clock: Clock):
    with_takers(world).build(DONOR, Shards(texts(1)))
    drop_recipe(world, DONOR)
    deleted(world)
    deleted(world, 7)
    clock.pass_days(6)
    world.build(TAKER, Shards(texts(1)))
    assert deleted(world, 7) == []
    drop_recipe(world, TAKER)
    deleted(world)
    assert [item.due for item in deleted(world, 7)] == [False]
    clock.pass_days(6)
    assert [item.due for item in deleted(world, 7)] == [False]
    assert len(pool(world)) == 1


@even_where_listings_are_old
def test_what_unfinished_work_has_kept_or_taken_stays_whoever_holds_the_lease(world: World):
    with_takers(world).build(DONOR, Shards(texts(2)))
    stopped(world, TAKER, texts(5), "shard-4")
    drop_recipe(world, DONOR)
    for _ in range(4):
        deleted(world)
    assert world.record(DONOR) is None
    other = Shards(texts(5))
    world.on_another_machine().build(TAKER, other)
    assert set(other.made) <= {"shard-0", "shard-1", "shard-4"}, "what it had made itself it has again"
    assert world.verify(TAKER).ok


@in_memory
def test_what_a_replaced_build_names_stays_as_long_as_that_build(world: World):
    with_takers(world).build(DONOR, Shards(texts(3)))
    old = world.record(DONOR)
    world.build(DONOR, Shards(texts(3, "new"), takes=False), force="a run")
    assert [item.what for item in sweeper(world, 0).look()] == ["replaced build"]
    assert world.store.fetch(old), "a reader of the old one goes on"
    assert [item.what for item in deleted(world)] == ["replaced build"]
    assert [(item.what, len(item.names)) for item in deleted(world)] == [("shared files", 3)]
    assert len(pool(world)) == 3
    assert world.verify(DONOR).ok


@in_memory
@pytest.mark.parametrize("broken", [RECORD, "chain", "hole in the chain"])
def test_while_something_cannot_be_read_nobody_knows_what_it_names_and_all_stays(
    world: World, broken: str, caplog: pytest.LogCaptureFixture
):
    with_takers(world).build(DONOR, Shards(texts(3)))
    world.build(TAKER, Shards(texts(4)))
    drop_recipe(world, DONOR)
    deleted(world)
    folder = f"{TAKER}/{world.record(TAKER).folder}"
    if broken == RECORD:
        world.store.replace(parse_target(TAKER), RECORD, b"{}")
    elif broken == "chain":
        world.store.bucket.put(chain_key(folder, 1), b"{}")
    else:
        world.store.bucket.put(chain_key(folder, 9), world.store.bucket.get(chain_key(folder, 1))[0])
    world.store.bucket.put(".pool/00/of-nobody", b"x")
    with caplog.at_level(logging.WARNING):
        assert [item for item in deleted(world) if item.place == ".pool"] == []
    assert "left alone" in caplog.text
    assert len(pool(world)) == 5


@in_memory
def test_what_was_brought_a_moment_ago_stays_while_somebody_builds(world: World, clock: Clock):
    """A builder brings an object before it says that it has."""
    with_takers(world)
    world.store.bucket.put(".pool/00/just-brought", b"x")
    lease = acquire(world.on_another_machine().store, parse_target(TAKER), Terms(30), LOG)
    for _ in range(2):
        assert [item.due for item in deleted(world)] == [False]
    clock.pass_days(1.1)
    items = sweeper(world, 0).look()
    assert [item.due for item in items] == [True]
    lease.release()
    clock.pass_days(-1.1)
    assert [item.outcome for item in deleted(world)] == ["deleted"]


@in_memory
def test_who_begins_to_build_between_the_look_and_the_deletion_keeps_what_nothing_names_yet(world: World):
    with_takers(world)
    world.store.bucket.put(".pool/00/just-brought", b"x")
    sweep = sweeper(world, 0)
    items = sweep.look()
    lease = acquire(world.on_another_machine().store, parse_target(TAKER), Terms(30), LOG)
    (item,) = sweep.delete(items)
    assert "but for 1 files" in item.outcome
    assert pool(world) == {"00/just-brought"}
    lease.release()


@in_memory
def test_what_is_taken_between_the_look_and_the_deletion_stays(world: World):
    with_takers(world).build(DONOR, Shards(texts(3)))
    old = world.record(DONOR)
    drop_recipe(world, DONOR)
    deleted(world)
    sweep = sweeper(world, 0)
    items = sweep.look()
    assert [len(item.names) for item in items] == [3]

    def take(context: BuildContext) -> Any:
        assert context.take(old, ["shard-1"]) == {"shard-1"}
        raise Stopped("stop")

    with pytest.raises(Stopped):
        world.build(TAKER, take)
    (item,) = sweep.delete(items)
    assert "but for 1 files" in item.outcome
    assert len(pool(world)) == 1
    assert world.build(TAKER, Shards(texts(2))).built
    assert world.verify(TAKER).ok


@in_memory
@pytest.mark.usefixtures("memory_prefix")
def test_the_command_shows_what_is_shared_and_deletes_it(world: World, capsys: pytest.CaptureFixture[str]):
    with_takers(world).build(DONOR, Shards(texts(3)))
    world.build(TAKER, Parts(1))
    drop_recipe(world, DONOR)
    deleted(world)

    def gc(*words: str) -> str:
        place = ["--prefix", world.prefix, "--recipes", str(world.folder / "config"), "--grace-days", "0"]
        assert main(["gc", *place, *words]) == 0
        return capsys.readouterr().out

    assert "shared files" in gc()
    (item,) = json.loads(gc("--json"))
    assert (item["target"], item["what"], len(item["names"])) == (".pool", "shared files", 3)
    assert json.loads(gc("--json", "--delete"))[0]["outcome"] == "deleted"
    assert pool(world) == set()
    assert "everything is needed" in gc()


@in_memory
def test_on_a_prefix_without_shared_files_nothing_is_asked(world: World):
    world.build(RAW)
    assert found(world) == {}
    assert world.store.bucket.listing(".pool") == {}
