"""Files of one finished artifact become files of another: without a copy, and yet each is whole by itself."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from artifact_world import RAW_DEV, TOKENIZER, World, in_child
from sharing import DONOR, TAKER, THIRD, Shards, texts, with_takers
from store_kinds import KINDS, OBJECTS, on, servers, world

from marin_build.artifact import taking
from marin_build.artifact.context import BuildContext, BuildResult
from marin_build.artifact.digest import body_checksum
from marin_build.artifact.examine import State
from marin_build.artifact.kept import read_chain, write_link
from marin_build.artifact.store import RECORD
from marin_build.errors import DamageError, MarinError, Stopped
from marin_build.recipe.target import parse_target

__all__ = ["servers", "world"]

everywhere = on(*KINDS)
on_disk = on("disk")
in_objects = on(*OBJECTS)


def build(world: World, target: str, files: dict[str, bytes], **options: Any) -> Shards:
    builder = Shards(files)
    with_takers(world).build(target, builder, **options)
    return builder


def fetched(world: World, target: str) -> dict[str, bytes]:
    """The content of an artifact, as a machine reads it that has nothing of it."""
    store = world.on_another_machine().store
    record = world.record(target)
    folder = store.fetch(record)
    return {entry["path"]: (folder / entry["path"]).read_bytes() for entry in record.content}


# ---- taking over -----------------------------------------------------------------------------------------------------


@everywhere
def test_what_another_artifact_has_already_is_taken_over_and_the_rest_is_made(world: World):
    build(world, DONOR, texts(3))
    taker = build(world, TAKER, texts(5))
    assert (sorted(taker.taken), taker.made) == (["shard-0", "shard-1", "shard-2"], ["shard-3", "shard-4"])
    alone = build(world, THIRD, texts(5))
    assert alone.made == []
    assert fetched(world, TAKER) == fetched(world, THIRD) == texts(5)
    for target in (DONOR, TAKER, THIRD):
        assert world.verify(target).ok
        assert world.status(target).state is State.finished
    assert world.record(TAKER).digest == world.record(THIRD).digest, "the digest does not tell who made a file"


@everywhere
def test_taken_files_outlive_a_donor_that_is_built_anew(world: World):
    build(world, DONOR, texts(3))
    build(world, TAKER, texts(3))
    world.build(DONOR, Shards(texts(3, "other"), takes=False), force="a run")
    assert fetched(world, TAKER) == texts(3)
    assert fetched(world, DONOR) == texts(3, "other")
    assert world.verify(TAKER).ok
    assert world.verify(DONOR).ok


@everywhere
@pytest.mark.parametrize("shared", [True, False])
def test_a_resumed_build_has_what_was_taken(world: World, shared: bool):
    with_takers(world).build(DONOR, Shards(texts(3), shared=shared))

    def stop(context: BuildContext, name: str) -> None:
        if name == "shard-4":
            raise Stopped("stop")

    with pytest.raises(Stopped):
        world.build(TAKER, Shards(texts(5), before_making=stop))

    def resumed(context: BuildContext) -> BuildResult:
        assert context.take(world.record(DONOR), ["shard-0", "shard-1"]) == {"shard-0", "shard-1"}
        for name in ("shard-0", "shard-1"):
            assert not (context.folder / name).exists() or (context.folder / name).read_bytes() == texts(5)[name]
        assert (context.folder / "shard-3").read_bytes() == texts(5)["shard-3"]
        (context.folder / "shard-4").write_bytes(texts(5)["shard-4"])
        return BuildResult(made=tuple(texts(5)))

    world.on_another_machine().build(TAKER, resumed)
    assert fetched(world, TAKER) == texts(5)
    assert world.verify(TAKER).ok


@everywhere
def test_what_was_taken_and_is_not_named_is_no_part_of_the_artifact(world: World):
    build(world, DONOR, texts(3))

    def make(context: BuildContext) -> BuildResult:
        (record,) = context.others("raw")
        assert context.take(record, list(texts(3))) == set(texts(3))
        return BuildResult(made=("shard-1",))

    with_takers(world).build(TAKER, make)
    assert fetched(world, TAKER) == {"shard-1": texts(3)["shard-1"]}
    assert world.verify(DONOR).ok


@everywhere
def test_only_whole_content_that_the_donor_names_is_taken(world: World):
    build(world, DONOR, texts(3))
    record = world.record(DONOR)
    log = next(entry["path"] for entry in record.files if entry.get("outside_digest"))

    def make(context: BuildContext) -> BuildResult:
        names = ["shard-1", "shard-9", log, "../shard-0", RECORD, "shard-1"]
        assert context.take(record, names) == {"shard-1"}
        return BuildResult()

    with_takers(world).build(TAKER, make)
    assert set(fetched(world, TAKER)) == {"shard-1"}


@everywhere
def test_a_file_of_the_donor_that_has_another_size_or_is_lost_is_made_anew(world: World):
    build(world, DONOR, texts(3))
    harm(world, DONOR, "shard-0", b"short")
    harm(world, DONOR, "shard-2", None)
    taker = build(world, TAKER, texts(3))
    assert (sorted(taker.taken), taker.made) == (["shard-1"], ["shard-0", "shard-2"])
    assert fetched(world, TAKER) == texts(3)


@everywhere
def test_a_file_that_is_known_to_be_damaged_is_made_anew(world: World):
    build(world, DONOR, texts(3))
    harm(world, DONOR, "shard-0", b"x" * len(texts(3)["shard-0"]))
    assert not world.verify(DONOR).ok
    taker = build(world, TAKER, texts(3))
    assert taker.made == ["shard-0"]
    assert fetched(world, TAKER) == texts(3)


def harm(world: World, target: str, name: str, data: bytes | None) -> None:
    """Let a file have other bytes, written in place, or be lost."""
    record = world.record(target)
    if not world.prefix:
        path = world.path(target, name)
        path.unlink() if data is None else path.write_bytes(data)
        return
    key = world.store.files(record).key(name)
    if data is None:
        world.store.bucket.delete(key)
    else:
        world.store.bucket.put(key, data)


# ---- looking at others -----------------------------------------------------------------------------------------------


@everywhere
def test_others_are_the_finished_artifacts_of_the_kind_but_the_target_itself(world: World):
    build(world, DONOR, texts(1))
    build(world, THIRD, texts(1))
    build(world, RAW_DEV, texts(1))
    world.build(TOKENIZER)
    world.store.replace(parse_target(THIRD), RECORD, b"{}")
    seen: list[str] = []

    def make(context: BuildContext) -> BuildResult:
        seen.extend(str(record.target) for record in context.others("raw"))
        assert list(context.others("checkpoints")) == []
        (context.folder / "a").write_text("a")
        return BuildResult()

    world.build(TAKER, make)
    assert seen == [RAW_DEV, DONOR]
    seen.clear()
    world.build(DONOR, make, force="a run")
    assert seen == [RAW_DEV, TAKER]


@everywhere
def test_a_small_file_of_another_is_read_and_compared(world: World):
    build(world, DONOR, texts(3))
    record = world.record(DONOR)
    harm(world, DONOR, "shard-1", b"x" * len(texts(3)["shard-1"]))
    harm(world, DONOR, "shard-2", None)

    def make(context: BuildContext) -> BuildResult:
        assert context.read(record, "shard-0") == texts(3)["shard-0"]
        for name, problem in (("shard-1", "other bytes"), ("shard-2", "missing"), ("shard-9", "names no file")):
            with pytest.raises(DamageError, match=problem):
                context.read(record, name)
        (context.folder / "a").write_text("a")
        return BuildResult()

    with_takers(world).build(TAKER, make)


@on_disk
def test_a_link_out_of_the_prefix_is_neither_read_nor_taken(world: World, tmp_path: Path):
    build(world, DONOR, texts(2))
    outside = tmp_path / "outside"
    for name in texts(2):
        outside.mkdir(exist_ok=True)
        os.rename(world.path(DONOR, name), outside / name)
        os.symlink(outside / name, world.path(DONOR, name))

    def make(context: BuildContext) -> BuildResult:
        record = world.record(DONOR)
        assert context.take(record, list(texts(2))) == set()
        with pytest.raises(DamageError, match="link out of the prefix"):
            context.read(record, "shard-0")
        (context.folder / "a").write_text("a")
        return BuildResult()

    world.build(TAKER, make)


# ---- on a disk -------------------------------------------------------------------------------------------------------


def inode(world: World, target: str, name: str) -> int:
    return world.path(target, name).stat().st_ino


@on_disk
def test_a_taken_file_is_there_once(world: World):
    build(world, DONOR, texts(3))
    build(world, TAKER, texts(3))
    assert [inode(world, TAKER, n) for n in texts(3)] == [inode(world, DONOR, n) for n in texts(3)]
    assert world.files(TAKER) == {RECORD, ".attempt.json", "logs", *texts(3)}, "no temporary name is left"


@on_disk
@pytest.mark.parametrize("number", [errno.EXDEV, errno.EMLINK, errno.EPERM, errno.EOPNOTSUPP])
def test_where_no_hard_link_can_be_made_the_bytes_are_copied(
    world: World, number: int, monkeypatch: pytest.MonkeyPatch
):
    build(world, DONOR, texts(3))
    monkeypatch.setattr(os, "link", failing(number))
    taker = build(world, TAKER, texts(3))
    assert taker.made == []
    assert all(inode(world, TAKER, name) != inode(world, DONOR, name) for name in texts(3))
    assert fetched(world, TAKER) == texts(3)


@on_disk
def test_a_reflink_comes_before_a_copy(world: World, monkeypatch: pytest.MonkeyPatch):
    """As a file system would that has them: the request names source and copy, and the bytes come at once."""
    build(world, DONOR, texts(1))
    asked: list[int] = []

    def clone(copy: int, request: int, source: int) -> int:
        asked.append(request)
        return os.write(copy, os.pread(source, 1 << 20, 0))

    monkeypatch.setattr(os, "link", failing(errno.EXDEV))
    monkeypatch.setattr(fcntl, "ioctl", clone)
    monkeypatch.setattr(taking, "_poured", None)
    assert build(world, TAKER, texts(1)).made == []
    assert asked == [0x40049409]
    assert fetched(world, TAKER) == texts(1)


@on_disk
@pytest.mark.parametrize("call", ["link", "replace"])
def test_a_full_disk_stops_the_build_and_the_next_run_goes_on(world: World, call: str, monkeypatch: pytest.MonkeyPatch):
    build(world, DONOR, texts(3))
    with monkeypatch.context() as patch:
        real = getattr(os, call)

        def fill(source: Any, to: Any, **options: Any) -> None:
            if "shard-1" in f"{source} {to}":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(to))
            real(source, to, **options)

        patch.setattr(os, call, fill)
        with pytest.raises(MarinError, match="the disk is full"):
            build(world, TAKER, texts(3))
    assert world.status(TAKER).state is State.partial
    assert not any(name.endswith(".tmp") for name in world.files(TAKER))
    assert build(world, TAKER, texts(3)).made == []
    assert world.verify(TAKER).ok


@on_disk
def test_bytes_that_changed_in_place_are_not_taken(world: World):
    build(world, DONOR, texts(2))
    harm(world, DONOR, "shard-0", b"x" * len(texts(2)["shard-0"]))
    taker = build(world, TAKER, texts(2))
    assert taker.made == ["shard-0"], "the size is right, the bytes are not"
    assert fetched(world, TAKER) == texts(2)


@on_disk
def test_a_file_of_an_earlier_attempt_gives_way_and_what_it_was_a_link_to_stays(world: World):
    build(world, DONOR, texts(2))
    build(world, THIRD, texts(2, "other"))

    def make(context: BuildContext) -> BuildResult:
        (context.folder / "shard-1").mkdir()
        assert context.take(world.record(THIRD), ["shard-0"]) == {"shard-0"}
        assert context.take(world.record(DONOR), ["shard-0", "shard-1"]) == {"shard-0", "shard-1"}
        return BuildResult()

    world.build(TAKER, make)
    assert fetched(world, TAKER) == texts(2)
    assert fetched(world, THIRD) == texts(2, "other")
    assert world.verify(THIRD).ok


@on_disk
def test_damage_in_place_is_damage_of_all_that_share_it_and_a_plain_run_heals_each(world: World):
    build(world, DONOR, texts(3))
    build(world, TAKER, texts(3))
    harm(world, TAKER, "shard-1", b"x" * len(texts(3)["shard-1"]))
    for target in (DONOR, TAKER):
        report = world.verify(target)
        assert [problem.path for problem in report.problems] == ["shard-1"]
        assert world.status(target).state is State.damaged
    healed = build(world, TAKER, texts(3))
    assert healed.made == ["shard-1"]
    assert world.verify(TAKER).ok
    assert not world.verify(DONOR).ok, "each is healed on its own"
    assert build(world, DONOR, texts(3)).made == [], "what the first made is taken by the second"
    for target in (DONOR, TAKER):
        assert world.verify(target).ok
        assert fetched(world, target) == texts(3)


@on("disk", "memory")
def test_what_was_adopted_is_copied_and_never_linked(world: World, tmp_path: Path):
    from marin_build.adopt import adopt
    from marin_build.settings import Settings

    with_takers(world)
    place = tmp_path / "elsewhere"
    place.mkdir()
    for name, data in texts(2).items():
        (place / name).write_bytes(data)
    settings = Settings(prefix=world.prefix or str(world.folder / "artifacts"), recipes=str(world.folder / "config"))
    adopt(world.store, world.book, settings, str(place), parse_target(DONOR), "there already", [])
    assert build(world, TAKER, texts(2)).made == []
    (place / "shard-0").write_bytes(b"written by others")
    assert world.verify(TAKER).ok
    assert fetched(world, TAKER) == texts(2)


@on_disk
def test_two_builders_take_from_one_donor_at_the_same_time(world: World):
    build(world, DONOR, texts(50))
    with_takers(world)
    children = [os.fork() or _build_and_leave(world, target) for target in (TAKER, THIRD)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0]
    for target in (DONOR, TAKER, THIRD):
        assert world.verify(target).ok
    assert {world.path(target, "shard-7").stat().st_nlink for target in (DONOR, TAKER, THIRD)} == {3}


def _build_and_leave(world: World, target: str) -> int:
    code = 1
    try:
        builder = Shards(texts(50))
        world.build(target, builder)
        code = len(builder.made)
    finally:
        os._exit(code)


@on_disk
def test_a_signal_stops_the_taking(world: World):
    build(world, DONOR, texts(3))
    with_takers(world)

    def make(context: BuildContext) -> BuildResult:
        os.kill(os.getpid(), 15)
        context.take(world.record(DONOR), list(texts(3)))
        raise AssertionError("unreachable")

    assert in_child(lambda: world.build(TAKER, make)) == 6


# ---- on an object store ----------------------------------------------------------------------------------------------


def pool(world: World) -> dict[str, int]:
    return world.store.bucket.listing(".pool")


@in_objects
def test_shared_files_lie_in_the_pool_once(world: World):
    build(world, DONOR, texts(3))
    build(world, TAKER, texts(5))
    build(world, THIRD, texts(5))
    entries = {entry["path"]: entry for entry in world.record(TAKER).content}
    assert world.record(THIRD).content == world.record(TAKER).content
    places = {f"{e['xxh3_128'][:2]}/{e['xxh3_128']}-{e['bytes']}": e["bytes"] for e in entries.values()}
    for _ in range(20):  # a listing may be old
        if (listed := pool(world)) == places:
            break
    assert listed == places
    assert all(entry["pool"] is True for entry in entries.values())
    names = [name for _ in range(20) for name in world.store.listing(parse_target(TAKER))]
    assert not any(name.endswith(tuple(texts(5))) for name in names)
    assert all("pool" not in entry for entry in world.record(TAKER).files if entry["path"].startswith("logs/"))


@in_objects
def test_what_is_taken_is_neither_downloaded_nor_uploaded(world: World, monkeypatch: pytest.MonkeyPatch):
    build(world, DONOR, texts(3))
    bucket, moved = type(world.store.bucket), []
    upload, read = bucket.upload, bucket.read
    monkeypatch.setattr(bucket, "upload", lambda self, path, key: moved.append(key) or upload(self, path, key))
    monkeypatch.setattr(bucket, "read", lambda self, key, *rest: moved.append(key) or read(self, key, *rest))
    build(world, TAKER, texts(3))
    assert moved
    assert all("/logs/" in key for key in moved)


@in_objects
def test_what_is_not_shared_is_copied_inside_the_store(world: World, monkeypatch: pytest.MonkeyPatch):
    with_takers(world).build(DONOR, Shards(texts(3), shared=False))
    assert build(world, TAKER, texts(3)).made == []
    assert pool(world) == {}
    world.store.remove(parse_target(DONOR), list(world.store.listing(parse_target(DONOR))))
    assert fetched(world, TAKER) == texts(3)


@in_objects
def test_nothing_is_written_over_a_whole_object_of_the_pool(world: World, monkeypatch: pytest.MonkeyPatch):
    build(world, DONOR, texts(3))
    bucket, written = type(world.store.bucket), []
    upload = bucket.upload
    monkeypatch.setattr(bucket, "upload", lambda self, path, key: written.append(key) or upload(self, path, key))
    world.build(DONOR, Shards(texts(3), takes=False), force="a run")
    assert not any(key.startswith(".pool") for key in written)
    assert world.verify(DONOR).ok


@in_objects
def test_damage_in_the_pool_is_damage_of_all_that_share_it_and_is_healed_for_all(world: World):
    build(world, DONOR, texts(3))
    build(world, TAKER, texts(3))
    harm(world, TAKER, "shard-1", b"x" * len(texts(3)["shard-1"]))
    for target in (DONOR, TAKER):
        assert [problem.path for problem in world.verify(target).problems] == ["shard-1"]
        assert world.status(target).state is State.damaged
    healed = build(world, TAKER, texts(3))
    assert healed.made == ["shard-1"], "a repair takes nothing over that it has not read"
    assert build(world, DONOR, texts(3)).made == []
    for target in (DONOR, TAKER):
        assert world.verify(target).ok
        assert world.status(target).state is State.finished
        assert fetched(world, target) == texts(3)


@in_objects
@pytest.mark.parametrize("force", [None, "a run"])
def test_what_a_lost_object_of_the_pool_was_is_made_anew(world: World, force: str | None):
    build(world, DONOR, texts(3))
    build(world, TAKER, texts(3))
    harm(world, TAKER, "shard-1", None)
    assert world.status(TAKER).state is world.status(DONOR).state is State.damaged
    assert build(world, TAKER, texts(3), force=force).made == ["shard-1"]
    assert world.status(TAKER).state is world.status(DONOR).state is State.finished
    assert fetched(world, DONOR) == fetched(world, TAKER) == texts(3)


@in_objects
def test_a_forced_build_takes_no_damaged_object_that_no_record_tells_of(world: World):
    build(world, DONOR, texts(3))
    build(world, TAKER, texts(3))
    harm(world, TAKER, "shard-1", b"x" * len(texts(3)["shard-1"]))
    assert build(world, TAKER, texts(3), force="a run").made == ["shard-1"]
    for target in (DONOR, TAKER):
        assert world.verify(target).ok


@in_objects
def test_what_the_same_run_has_forced_is_not_read_again(world: World, monkeypatch: pytest.MonkeyPatch):
    build(world, DONOR, texts(3))
    world.build(DONOR, Shards(texts(3), takes=False), force="a run")
    bucket, read = type(world.store.bucket), []
    real = bucket.read
    monkeypatch.setattr(bucket, "read", lambda self, key, *rest: read.append(key) or real(self, key, *rest))
    world.build(TAKER, first := Shards(texts(3)), force="a run")
    assert (first.made, read) == ([], [])
    world.build(THIRD, second := Shards(texts(3)), force="another run")
    assert second.made == []
    assert len(set(read)) == 3


@in_objects
def test_what_an_attempt_lets_go_stays_in_the_pool(world: World):
    build(world, DONOR, texts(2))

    def make(context: BuildContext) -> BuildResult:
        (context.folder / "shard-0").write_bytes(texts(2)["shard-0"])
        context.keep(["shard-0"], shared=True)
        assert context.take(world.record(DONOR), ["shard-1"]) == {"shard-1"}
        (context.folder / "shard-0").unlink()
        (context.folder / "other").write_text("other")
        context.keep(["other"], ["shard-0", "shard-1"])
        return BuildResult()

    with_takers(world).build(TAKER, make)
    assert set(fetched(world, TAKER)) == {"other"}
    assert world.verify(DONOR).ok
    assert fetched(world, DONOR) == texts(2)


@in_objects
def test_what_is_written_after_it_was_taken_counts(world: World):
    build(world, DONOR, texts(2))

    def make(context: BuildContext) -> BuildResult:
        assert context.take(world.record(DONOR), ["shard-0", "shard-1"]) == {"shard-0", "shard-1"}
        (context.folder / "shard-1").write_text("another one")
        return BuildResult()

    with_takers(world).build(TAKER, make)
    assert fetched(world, TAKER) == {"shard-0": texts(2)["shard-0"], "shard-1": b"another one"}
    assert world.verify(DONOR).ok


@on("memory")
@pytest.mark.parametrize("change", [{"xxh3_128": "../../elsewhere"}, {"bytes": "1/../../x"}, {"pool": "elsewhere"}])
def test_no_entry_leads_out_of_the_pool(world: World, change: dict[str, Any]):
    build(world, DONOR, texts(2))
    body = world.record(DONOR).to_dict()
    body.pop("checksum")
    body["files"] = [{**entry, **change} for entry in body["files"]]
    body["checksum"] = body_checksum(body)
    world.store.replace(parse_target(DONOR), RECORD, json.dumps(body).encode())
    with pytest.raises(DamageError):
        world.record(DONOR)
    folder = f"{TAKER}/builds/forged"
    write_link(world.store.bucket, folder, 0, body["files"], ())
    assert read_chain(world.store.bucket, folder) == {}


def failing(number: int) -> Callable[..., Any]:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number), *map(str, arguments[:1]))

    return fail
