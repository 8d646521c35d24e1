"""One protocol on every kind of store: a disk, plain fsspec in memory, the same failing often, GCS and S3."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from artifact_world import CHECKPOINT, RAW, TOKENIZER, TOKENS, Parts, World
from store_kinds import CONDITIONAL, KINDS, OBJECTS, on, servers, world

from marin_build.artifact import accept as acceptance
from marin_build.artifact import fsspec_bucket
from marin_build.artifact.accept import accept
from marin_build.artifact.attempt import read_attempt
from marin_build.artifact.examine import State
from marin_build.artifact.lease import Lease, Terms, acquire
from marin_build.artifact.object_store import ObjectStore
from marin_build.artifact.record import write_record
from marin_build.artifact.store import ATTEMPT, BUILDS, LEASE, RECORD
from marin_build.artifact.verify import check_bytes
from marin_build.errors import DamageError, LeasedError, MarinError, RequestError, Stopped
from marin_build.recipe.target import parse_target

__all__ = ["servers", "world"]

TARGET = parse_target(RAW)
NAME = "small.json"
LOG = logging.getLogger("test")

everywhere = on(*KINDS)
on_objects = on(*OBJECTS)
in_memory = on("memory", "flaky")
"""For what rests on nothing that a server may do in another way; servers are slow."""


# ---- small files -----------------------------------------------------------------------------------------------------


@everywhere
def test_small_files_are_read_written_swapped_and_removed(world: World):
    store = world.store
    assert store.read(TARGET, NAME) is None
    assert store.create(TARGET, NAME, b"one")
    assert not store.create(TARGET, NAME, b"another")
    assert not store.exchange(TARGET, NAME, b"another", b"two")
    assert store.exchange(TARGET, NAME, b"one", b"two")
    store.replace(TARGET, NAME, b"three")
    assert store.read(TARGET, NAME) == b"three"
    assert not store.exchange(TARGET, NAME, b"two", None)
    assert store.exchange(TARGET, NAME, b"three", None)
    assert store.read(TARGET, NAME) is None
    assert store.create(TARGET, NAME, b"again")
    store.delete(TARGET, NAME)
    store.delete(TARGET, NAME)
    assert store.read(TARGET, NAME) is None


@on(*CONDITIONAL)
def test_of_many_racing_exchanges_exactly_one_succeeds(world: World):
    store = world.store
    for expected in (None, b"seen"):
        if expected:
            store.replace(TARGET, NAME, expected)
        won: list[int] = []
        barrier = threading.Barrier(6)

        def race(number: int, expected: bytes | None = expected, won: list[int] = won, barrier: Any = barrier) -> None:
            barrier.wait()
            if store.exchange(TARGET, NAME, expected, f"{number}".encode()):
                won.append(number)

        in_threads(*([race, number] for number in range(6)))
        assert len(won) == 1
        assert store.read(TARGET, NAME) == f"{won[0]}".encode()


def in_threads(*calls: list[Any]) -> None:
    threads = [threading.Thread(target=call[0], args=call[1:]) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ---- builds ----------------------------------------------------------------------------------------------------------


@everywhere
def test_a_chain_is_built_once_and_comes_to_the_same_digests_everywhere(world: World, tmp_path: Path):
    disk = World.make(tmp_path / "disk")
    for target in (RAW, TOKENIZER, TOKENS):
        digest = world.build(target).record.digest
        assert not world.build(target).built
        assert digest == disk.build(target).record.digest
        assert world.status(target).state is State.finished
        report = world.verify(target)
        assert (report.ok, report.foreign) == (True, ()), report
    assert [str(found) for found in world.store.targets()] == [RAW, TOKENS, TOKENIZER]
    assert world.store.read(TARGET, LEASE) is None


@on_objects
def test_a_record_points_at_a_build_that_nobody_overwrites(world: World):
    old = world.build(RAW).record
    new = world.build(RAW, Parts(2, salt="new"), force="a run").record
    assert old.folder != new.folder
    assert old.folder.startswith(f"{BUILDS}/")
    for record in (old, new):
        assert check_bytes(world.store.files(record), record.content) == []
    assert [p.name for p in world.store.fetch(old).iterdir()] != [p.name for p in world.store.fetch(new).iterdir()]
    assert world.verify(RAW).foreign == ()


@in_memory
def test_a_reader_of_the_old_artifact_is_not_disturbed_by_rebuilds(world: World):
    world.build(RAW, Parts(2, salt="0"))
    seen: set[str] = set()
    broken: list[str] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            record = world.record(RAW)
            assert record is not None
            seen.add(record.digest)
            broken.extend(map(str, check_bytes(world.store.files(record), record.content)))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1, 4):
        world.build(RAW, Parts(2, salt=f"{number}"), force=f"run {number}")
    done.set()
    reader.join()
    assert broken == []
    assert len(seen) >= 2


def stop_before(number: int) -> Callable[..., None]:
    def stop(context: Any, at: int) -> None:
        if at == number:
            raise Stopped("stopped")

    return stop


@everywhere
def test_another_machine_goes_on_from_what_was_kept(world: World):
    with pytest.raises(Stopped):
        world.build(RAW, Parts(4, before_part=stop_before(2)))
    second = world.on_another_machine()
    assert second.status(RAW).state is State.partial
    with pytest.raises(Stopped):
        second.build(RAW, Parts(4, before_part=stop_before(0)))
    third = second.on_another_machine()
    builder = Parts(4, careful=True)
    record = third.build(RAW, builder).record
    assert builder.made == ["part-2", "part-3"], "also what the second one only took over"
    assert len(record.provenance["attempts"]) == 3
    assert third.verify(RAW).ok


@in_memory
def test_the_same_machine_goes_on_also_from_what_was_not_kept(world: World):
    def make_and_stop(context: Any) -> Any:
        (context.folder / "part-0").write_bytes(b"not the right bytes")
        (context.folder / "extra").write_bytes(b"kept by nobody")
        raise Stopped("stopped")

    with pytest.raises(Stopped):
        world.build(RAW, make_and_stop)
    record = world.build(RAW, Parts(2, careful=True)).record
    assert [entry["path"] for entry in record.content] == ["extra", "part-0", "part-1"]
    assert world.verify(RAW).ok


@on_objects
def test_what_was_let_go_is_not_resumed_from_and_not_part_of_the_artifact(world: World):
    def build(context: Any) -> Any:
        for number in range(3):
            folder = context.folder / "steps" / f"{number}"
            folder.mkdir(parents=True)
            (folder / "state").write_text(f"{number}")
            context.keep([f"steps/{number}"], [f"steps/{number - 1}"])
        raise Stopped("stopped")

    with pytest.raises(Stopped):
        world.build(RAW, build)
    found: list[str] = []

    def look(context: Any) -> Any:
        found.extend(sorted(str(path.relative_to(context.folder)) for path in context.folder.rglob("state")))
        return Parts(1)(context)

    other = world.on_another_machine()
    record = other.build(RAW, look).record
    assert found == ["steps/2/state"]
    assert [entry["path"] for entry in record.content] == ["part-0", "steps/2/state"]
    assert not any("steps/1" in name for name in other.store.listing(TARGET))


@in_memory
def test_a_kept_file_that_is_damaged_is_made_again(world: World):
    with pytest.raises(Stopped):
        world.build(RAW, Parts(3, before_part=stop_before(2)))
    attempt = read_attempt(world.store, TARGET)
    assert attempt is not None
    world.store.bucket.put(f"{RAW}/{attempt.folder}/part-0", b"damaged")
    other, builder = world.on_another_machine(), Parts(3)
    other.build(RAW, builder)
    assert builder.made == ["part-0", "part-2"]
    assert other.verify(RAW).ok


@in_memory
def test_the_log_of_a_failed_attempt_is_read_on_another_machine(world: World):
    def fail(context: Any) -> Any:
        context.logger.info("just before")
        raise RequestError("the source is unusable")

    with pytest.raises(RequestError):
        world.build(RAW, fail, run="a run")
    other = world.on_another_machine()
    attempt = read_attempt(other.store, TARGET)
    assert attempt is not None
    shown, lines = other.store.last_lines(attempt, 2)
    assert shown == f"{world.prefix}/{RAW}/{attempt.folder}/logs/{attempt.id}.log"
    assert "just before" in lines[0]
    assert "the source is unusable" in lines[1]
    with pytest.raises(RequestError, match="the source is unusable"):
        other.build(RAW, run="a run")


@in_memory
def test_nothing_is_left_on_the_machine_but_what_was_read(world: World):
    for target in (RAW, TOKENIZER, TOKENS):
        world.build(target)
    cache = world.folder / world.machine
    assert [path for path in cache.glob("*/work/**/*") if path.is_file()] == []
    assert {path.name for path in cache.glob("*/read/**/part-*")} == {"part-0", "part-1", "part-2"}


@in_memory
def test_what_was_read_is_used_again_and_a_spoilt_copy_is_read_anew(world: World):
    record = world.build(RAW).record
    folder = world.store.fetch(record)
    before = (folder / "part-1").stat().st_ino
    (folder / "part-0").write_bytes(b"shorter")
    assert world.store.fetch(record) == folder
    assert (folder / "part-1").stat().st_ino == before
    assert (folder / "part-0").stat().st_size == record.content[0]["bytes"]


# ---- two builders ----------------------------------------------------------------------------------------------------


def no_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builders whose heart does not beat, as if they were paused all the time."""
    monkeypatch.setattr(Lease, "start", lambda lease: None)


@everywhere
def test_a_second_builder_is_refused_while_the_first_lives(world: World):
    def try_too(context: Any, number: int) -> None:
        with pytest.raises(LeasedError, match="is being built by"):
            world.on_another_machine().build(RAW)

    world.build(RAW, Parts(1, before_part=try_too))
    assert world.verify(RAW).ok


@on(*CONDITIONAL)
def test_a_paused_builder_that_was_replaced_commits_nothing_when_it_wakes(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    no_beats(monkeypatch)
    other = world.on_another_machine()

    def pause(context: Any, number: int) -> None:
        if number == 1:
            time.sleep(0.4)
            other.build(RAW, Parts(2, salt="second"), lease_seconds=30)

    with pytest.raises(LeasedError, match="lost its lease"):
        world.build(RAW, Parts(2, salt="first", before_part=pause), lease_seconds=0.3)
    assert other.verify(RAW).ok
    assert other.record(RAW).content == other.build(RAW).record.content
    assert len(other.record(RAW).provenance["attempts"]) == 2


@on("memory", "gs", "s3")
def test_the_seal_is_refused_to_a_builder_that_was_replaced_a_moment_before(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    no_beats(monkeypatch)
    real, other = Lease.seal, world.on_another_machine()
    paused = False

    def pause_first(lease: Lease, attempt: str) -> None:
        nonlocal paused
        if not paused:
            paused = True
            time.sleep(0.4)
            other.build(RAW, Parts(2, salt="second"), lease_seconds=30)
        real(lease, attempt)

    monkeypatch.setattr(Lease, "seal", pause_first)
    with pytest.raises(LeasedError, match="lost its lease"):
        world.build(RAW, Parts(1, salt="first"), lease_seconds=0.3)
    assert len(world.record(RAW).content) == 2
    assert world.verify(RAW).ok


@on(*OBJECTS)
def test_a_builder_killed_right_after_its_seal_is_finished_by_the_next(world: World, monkeypatch: pytest.MonkeyPatch):
    class Killed(BaseException):
        pass

    def die(*arguments: Any) -> None:
        raise Killed

    old = world.build(RAW, Parts(1, salt="old")).record
    with monkeypatch.context() as patch:
        no_beats(patch)
        patch.setattr(ObjectStore, "put_in_place", die)
        patch.setattr(Lease, "release", die)
        with pytest.raises(Killed):
            world.build(RAW, Parts(2, salt="new"), force="a run", lease_seconds=0.2)
    assert world.record(RAW) == old
    assert world.store.is_decided(TARGET)
    time.sleep(0.3)
    never = Parts(9)
    record = world.on_another_machine().build(RAW, never).record
    assert never.made == []
    assert len(record.content) == 2
    assert world.verify(RAW).ok
    assert world.store.read(TARGET, LEASE) is None


@on(*OBJECTS)
def test_a_builder_paused_after_its_seal_does_not_undo_what_came_later(world: World, monkeypatch: pytest.MonkeyPatch):
    no_beats(monkeypatch)
    real, other = ObjectStore.put_in_place, world.on_another_machine()
    paused = False

    def pause_first(store: ObjectStore, target: Any, attempt: str) -> None:
        nonlocal paused
        if not paused:
            paused = True
            time.sleep(0.4)
            other.build(RAW, Parts(3, salt="later"), force="another run", lease_seconds=30)
        real(store, target, attempt)

    monkeypatch.setattr(ObjectStore, "put_in_place", pause_first)
    world.build(RAW, Parts(1, salt="first"), lease_seconds=0.3)
    record = world.record(RAW)
    assert record.provenance["forced"] == "another run"
    assert [entry["path"] for entry in record.content] == ["part-0", "part-1", "part-2"]
    assert world.verify(RAW).ok


@on(*CONDITIONAL)
def test_of_many_takers_of_a_dead_lease_one_wins(world: World, monkeypatch: pytest.MonkeyPatch):
    no_beats(monkeypatch)
    store = world.store
    acquire(store, TARGET, Terms(0.1), LOG)
    time.sleep(0.2)
    won: list[int] = []

    def take() -> None:
        with contextlib.suppress(LeasedError):
            won.append(acquire(world.on_another_machine().store, TARGET, Terms(30), LOG).file.token)

    in_threads(*([take] for _ in range(5)))
    assert won == [2]


@on(*OBJECTS)
def test_a_lease_that_beats_is_kept_and_one_that_was_replaced_is_lost(world: World):
    lease = acquire(world.store, TARGET, Terms(0.6), LOG)
    time.sleep(1.0)
    assert lease.file.beat >= 2
    with pytest.raises(LeasedError):
        acquire(world.store, TARGET, Terms(0.6), LOG)
    world.store.replace(TARGET, LEASE, b"{}")
    time.sleep(0.5)
    assert lease.is_lost()
    with pytest.raises(LeasedError, match="lost its lease"):
        lease.seal("an-attempt")
    lease.release()
    assert world.store.read(TARGET, LEASE) == b"{}", "the lease of another is not removed"


# ---- damage ----------------------------------------------------------------------------------------------------------


def hurt(world: World, name: str, data: bytes | None) -> None:
    record = world.record(RAW)
    key = f"{RAW}/{record.folder}/{name}"
    if data is None:
        world.store.bucket.delete(key)
    else:
        world.store.bucket.put(key, data)


@in_memory
@pytest.mark.parametrize("damage", ["deleted", "truncated", "flipped"])
def test_damage_is_named_and_one_rerun_heals_exactly_that(world: World, damage: str):
    whole = world.build(RAW, Parts(3)).record
    data = world.store.bucket.get(f"{RAW}/{whole.folder}/part-1")[0]
    hurt(world, "part-1", {"deleted": None, "truncated": data[:-1], "flipped": b"X" + data[1:]}[damage])
    report = world.verify(RAW)
    assert [problem.path for problem in report.problems] == ["part-1"]
    assert world.status(RAW).state is State.damaged, "also of a flipped byte: the record is marked"
    builder = Parts(3)
    healed = world.on_another_machine().build(RAW, builder).record
    assert builder.made == ["part-1"]
    assert healed.digest == whole.digest
    assert world.verify(RAW).ok
    assert world.status(RAW).state is State.finished


@in_memory
def test_an_interrupted_repair_stays_damaged_and_goes_on(world: World):
    whole = world.build(RAW, Parts(4)).record
    hurt(world, "part-0", None)
    hurt(world, "part-2", None)
    with pytest.raises(Stopped):
        world.build(RAW, Parts(4, before_part=stop_before(2)))
    other = world.on_another_machine()
    assert other.status(RAW).state is State.damaged
    builder = Parts(4)
    assert other.build(RAW, builder).record.digest == whole.digest
    assert builder.made == ["part-2"]


@in_memory
def test_a_damaged_record_is_named_and_built_anew(world: World):
    world.build(RAW)
    world.store.replace(TARGET, RECORD, b"{not json")
    assert world.status(RAW).state is State.damaged
    assert world.build(RAW).built
    assert world.verify(RAW).ok


@everywhere
def test_a_changed_recipe_is_accepted_on_the_record_that_was_seen(world: World, monkeypatch: pytest.MonkeyPatch):
    digest = world.build(RAW).record.digest
    world.edit(RAW, "digest: 0", "digest: 1")
    assert world.status(RAW).state is State.drifted
    accept(world.store, world.book, TARGET, "only a test")
    assert world.status(RAW).state is State.finished
    assert world.record(RAW).digest == digest


@on("memory", *CONDITIONAL)
def test_a_build_that_is_committed_while_a_change_is_accepted_stays(world: World, monkeypatch: pytest.MonkeyPatch):
    """Between the look at the record and the exchange. On a disk the lock keeps the builder out until then."""
    world.build(RAW, Parts(1, salt="old"))
    world.edit(RAW, "digest: 0", "digest: 1")
    real, committed = acceptance.change_record, threading.Event()

    def build() -> None:
        world.on_another_machine().build(RAW, Parts(2, salt="new"), force="a run")
        committed.set()

    builder = threading.Thread(target=build)

    def wait_for_the_builder(*arguments: Any) -> bool:
        builder.start()
        committed.wait(1 if world.store.fences_by_lock else 30)
        return real(*arguments)

    monkeypatch.setattr(acceptance, "change_record", wait_for_the_builder)
    if world.store.fences_by_lock:
        accept(world.store, world.book, TARGET, "only a test")
    else:
        with pytest.raises(LeasedError, match="changed by somebody else just now: nothing was accepted"):
            accept(world.store, world.book, TARGET, "only a test")
    builder.join()
    record = world.record(RAW)
    assert (len(record.content), record.provenance["forced"], record.accepted) == (2, "a run", ())
    assert world.verify(RAW).ok
    assert world.status(RAW).state is State.finished


@everywhere
def test_housekeeping_lists_and_removes(world: World):
    world.build(RAW)
    listing = world.store.listing(TARGET)
    assert RECORD in listing
    assert all(size > 0 for size in listing.values())
    world.store.remove(TARGET, [name for name in listing if "part-" in name])
    assert {problem.path for problem in world.verify(RAW).problems} == {"part-0", "part-1", "part-2"}
    world.store.remove(TARGET, listing)
    assert world.store.targets() == []


@in_memory
def test_builds_of_a_model_whose_record_is_lost_are_no_reason_to_train_it_anew(world: World):
    for target in (RAW, TOKENIZER, TOKENS, "tokenized/v/2026.06.28"):
        world.build(target)
    record = world.build(CHECKPOINT).record
    target = parse_target(CHECKPOINT)
    world.store.delete(target, RECORD)
    world.store.delete(target, ATTEMPT)
    with pytest.raises(DamageError, match="neither a record nor an attempt says what they were made from"):
        world.build(CHECKPOINT)
    world.store.replace(target, RECORD, world.store.read(target, f"{record.folder}/{RECORD}"))
    assert not world.build(CHECKPOINT).built


def test_files_that_were_adopted_from_a_url_are_read_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    world = World.make(tmp_path)
    record = world.build(RAW).record
    bucket = fsspec_bucket.open_bucket("memory://elsewhere/data")
    for entry in record.content:
        bucket.upload(world.path(RAW, entry["path"]), entry["path"])
        world.path(RAW, entry["path"]).unlink()
    write_record(world.store, dataclasses.replace(record, external="memory://elsewhere/data", files=record.content))
    assert world.verify(RAW).ok
    world.build(TOKENIZER)
    seen: list[str] = []

    def look(context: Any) -> Any:
        seen.extend(sorted(path.name for path in context.dependencies[RAW].folder.iterdir()))
        return Parts(1)(context)

    world.build(TOKENS, look)
    assert seen == ["part-0", "part-1", "part-2"]
    bucket.put("part-1", b"X" * record.content[1]["bytes"])
    assert [problem.path for problem in world.verify(RAW).problems] == ["part-1"]


class Ceph:
    """Compares ETags only when they come without quotes."""

    def __init__(self) -> None:
        self.data, self.tag = b"", ""

    def call_s3(self, method: str, Body: bytes, IfMatch: str = "", **options: str) -> None:
        if IfMatch != self.tag:
            error = OSError("precondition failed")
            error.__cause__ = Refusal()
            raise error
        self.data, self.tag = Body, f"{self.tag}+"


class Refusal(Exception):
    response: ClassVar[dict[str, Any]] = {"ResponseMetadata": {"HTTPStatusCode": 412}}


def test_a_store_that_compares_without_quotes_is_understood(monkeypatch: pytest.MonkeyPatch):
    ceph = Ceph()
    ceph.tag = "abc"
    bucket = fsspec_bucket.S3Bucket(ceph, "s3", "bucket/x")
    monkeypatch.setattr(bucket, "_get", lambda key: (ceph.data, f'"{ceph.tag}"'))
    assert bucket.put("k", b"one", bucket.get("k")[1])
    assert bucket.put("k", b"two", bucket.get("k")[1])
    assert not bucket.put("k", b"three", '"abc"')
    assert ceph.data == b"two"


def test_a_store_that_is_down_is_told_in_one_line(world_of_trouble: World):
    with pytest.raises(MarinError, match=r"the store failed \d times, at last with .*\n  run the same command again"):
        world_of_trouble.build(RAW)


@pytest.fixture
def world_of_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import flaky_store

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("marin_build.artifact.fsspec_bucket.FIRST_PAUSE_SECONDS", 0.001)
    flaky_store.TROUBLE.start(1)
    flaky_store.TROUBLE.down = True
    yield World.make(tmp_path, "flaky://marin/down")
    flaky_store.TROUBLE.be_good()
