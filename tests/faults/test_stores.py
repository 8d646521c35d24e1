"""Rows 26 and 27: object stores that fail often, answer late and cut short; without renames, with stale listings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import flaky_store
import pytest
from artifact_world import RAW, TOKENIZER, TOKENS, Parts, World

from marin_build.artifact import fsspec_bucket
from marin_build.artifact.examine import State
from marin_build.artifact.store import open_store
from marin_build.errors import MarinError, RequestError, Stopped
from marin_build.recipe.target import parse_target

CHAIN = (RAW, TOKENIZER, TOKENS)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fsspec_bucket, "FIRST_PAUSE_SECONDS", 0.002)
    flaky_store.TROUBLE.start(0)
    yield World.make(tmp_path, f"flaky://marin/{tmp_path.name}")
    flaky_store.TROUBLE.be_good()


@pytest.fixture
def digests(tmp_path: Path) -> dict[str, str]:
    disk = World.make(tmp_path / "disk")
    return {target: disk.build(target).record.digest for target in CHAIN}


def stop(context: object, number: int) -> None:
    if number == 2:
        raise Stopped("stopped")


@pytest.mark.row(26)
@pytest.mark.parametrize("seed", range(3))
def test_a_store_that_fails_in_a_tenth_of_its_calls_gives_the_same_bytes(
    world: World, digests: dict[str, str], seed: int
):
    """Errors, late answers, answers that are lost after the write, and reads and uploads that are cut short."""
    print(f"seed {seed}")
    trouble = flaky_store.TROUBLE
    trouble.start(seed, errors=0.1, lost_answers=0.05, short_reads=0.1, latency_seconds=0.002)
    with pytest.raises(Stopped):
        world.build(RAW, Parts(3, before_part=stop))
    other = world.on_another_machine()
    assert {target: other.build(target).record.digest for target in CHAIN} == digests
    assert all(other.verify(target).ok for target in CHAIN)
    assert [other.status(target).state for target in CHAIN] == [State.finished] * 3
    assert trouble.failures > 20, "nothing was tested"


@pytest.mark.row(26)
def test_a_store_that_is_down_is_given_up_after_a_few_tries_with_growing_pauses(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    pauses: list[float] = []
    monkeypatch.setattr(fsspec_bucket.time, "sleep", pauses.append)
    flaky_store.TROUBLE.down = True
    store = open_store(world.prefix, world.folder / "cache")
    monkeypatch.setattr(store.bucket, "first_pause_seconds", 1.0)
    with pytest.raises(MarinError, match=f"the store failed {fsspec_bucket.TRIES} times"):
        store.read(parse_target(RAW), "x")
    assert flaky_store.TROUBLE.calls == fsspec_bucket.TRIES
    waits = [pause for pause in pauses if pause]  # the file system itself sleeps for its latency of nothing
    assert len(waits) == fsspec_bucket.TRIES - 1
    assert all(0.5 * 2**n <= min(pause, 20 * 2**n) <= 30 for n, pause in enumerate(waits[:5]))
    assert waits[-1] > waits[0]


@pytest.mark.row(26)
def test_where_the_package_itself_tries_for_long_it_is_asked_twice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fsspec_bucket.time, "sleep", lambda seconds: None)
    tries: list[str] = []

    def call(*args: object) -> None:
        tries.append("half a minute")
        raise ConnectionError("no such host")

    bucket = fsspec_bucket.GcsBucket(SimpleNamespace(call=call, url=str), "gs", "bucket/x")
    with pytest.raises(MarinError, match="the store failed 2 times"):
        bucket.get("key")
    assert len(tries) == 2


@pytest.mark.row(26)
def test_an_anonymous_caller_has_no_access():
    class HttpError(Exception):
        code = 401

    def call(*args: object) -> None:
        raise HttpError("Anonymous caller does not have storage.objects.get access")

    with pytest.raises(RequestError, match="no access: HttpError: Anonymous caller"):
        fsspec_bucket.GcsBucket(SimpleNamespace(call=call, url=str), "gs", "bucket/x").get("key")


@pytest.mark.row(26)
def test_a_store_that_comes_back_is_waited_for(world: World, monkeypatch: pytest.MonkeyPatch):
    trouble = flaky_store.TROUBLE
    world.build(RAW)
    trouble.down = True

    def come_back(seconds: float) -> None:
        trouble.down = trouble.down and trouble.calls % 4 != 0

    monkeypatch.setattr(fsspec_bucket.time, "sleep", come_back)
    assert world.record(RAW) is not None


@pytest.mark.row(27)
def test_listings_that_are_old_or_empty_change_nothing(world: World, digests: dict[str, str]):
    """The file system refuses every rename; what a listing does not show, or shows as it was, is asked for by name."""
    flaky_store.TROUBLE.start(5, old_listings=1.0)
    many = Parts(12)
    with pytest.raises(Stopped):
        world.build(RAW, Parts(12, before_part=stop))
    other = world.on_another_machine()
    other.build(RAW, many)
    assert len(many.made) == 10, "what was kept was found without a listing"
    assert other.status(RAW).state is State.finished
    assert other.verify(RAW).ok
    assert other.build(TOKENIZER).record.digest == digests[TOKENIZER]
    other.build(TOKENS)
    other.build(RAW, Parts(12, salt="new"), force="a run")
    assert other.verify(RAW).ok


@pytest.mark.row(27)
def test_a_listing_that_shows_a_file_as_it_was_damages_nothing(world: World):
    record = world.build(RAW, Parts(12)).record
    bucket, key = world.store.bucket, f"{RAW}/{record.folder}/part-3"
    whole = bucket.get(key)[0]
    bucket.put(key, b"short")
    assert world.status(RAW).state is State.damaged
    flaky_store.TROUBLE.start(5, old_listings=1.0)
    bucket.put(key, whole)
    assert world.store.files(record).list()["part-3"] == len(b"short"), "the listing is old"
    assert world.status(RAW).state is State.finished
    assert world.verify(RAW).ok


@pytest.mark.row(27)
def test_a_file_that_is_gone_is_missed(world: World):
    world.build(RAW, Parts(12))
    record = world.record(RAW)
    store = world.store
    store.files(record).list()
    store.bucket.delete(f"{RAW}/{record.folder}/part-3")
    assert [problem.path for problem in world.verify(RAW).problems] == ["part-3"]
    assert world.build(RAW, Parts(12)).built
    assert world.verify(RAW).ok
