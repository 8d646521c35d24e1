from __future__ import annotations

import errno
import importlib
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from artifact_world import WATCHED, in_child, killed_at, watched

from marin_build.artifact import local_store as store_module
from marin_build.artifact.local_store import LocalStore
from marin_build.artifact.store import LOCK, disk_error, open_store
from marin_build.errors import LeasedError, MarinError, RequestError
from marin_build.recipe.target import Target

TARGET = Target("raw/a", "2026.06.28")
NAME = "small.json"


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "artifacts")


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        ("gs://user:hunter2@bucket/x", "a prefix may hold no password"),
        ("s3://bucket/x?X-Amz-Signature=hunter2", r"prefix s3://bucket/x: may hold no '\?' or '#'"),
        ("gs://", "names no bucket; write gs://BUCKET/FOLDER"),
        ("nothing://bucket/x", "Protocol not known: nothing"),
    ],
)
def test_a_prefix_that_cannot_be_is_refused_and_no_secret_of_it_is_told(prefix: str, said: str):
    with pytest.raises(RequestError, match=said) as refused:
        open_store(prefix)
    assert "hunter2" not in str(refused.value)


def test_a_missing_package_is_one_line_with_what_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.delitem(importlib.import_module("fsspec.registry")._registry, "gs", raising=False)
    with pytest.raises(RequestError, match=r"need a package that is not installed\n  pip install 'marin_build\[gcs\]'"):
        open_store("gs://bucket/x")


def test_a_file_url_is_a_folder(tmp_path: Path):
    assert open_store(f"file://{tmp_path}").shown(TARGET) == LocalStore(tmp_path).shown(TARGET)


def test_what_was_written_is_read_and_what_is_not_there_is_none(store: LocalStore):
    assert store.read(TARGET, NAME) is None
    store.replace(TARGET, NAME, b"one")
    store.replace(TARGET, NAME, b"two")
    assert store.read(TARGET, NAME) == b"two"
    store.delete(TARGET, NAME)
    store.delete(TARGET, NAME)
    assert store.read(TARGET, NAME) is None
    assert os.listdir(store.folder(TARGET)) == []


def test_only_the_first_of_two_creations_succeeds(store: LocalStore):
    assert store.create(TARGET, NAME, b"first")
    assert not store.create(TARGET, NAME, b"second")
    assert store.read(TARGET, NAME) == b"first"
    assert os.listdir(store.folder(TARGET)) == [NAME]


def test_of_many_racing_creations_exactly_one_succeeds(store: LocalStore):
    won: list[int] = []
    barrier = threading.Barrier(16)

    def create(number: int) -> None:
        barrier.wait()
        if store.create(TARGET, NAME, str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.read(TARGET, NAME) == str(won[0]).encode()


def test_a_writer_killed_at_any_call_leaves_the_old_bytes_or_the_new_ones(store: LocalStore):
    store.replace(TARGET, NAME, b"old")
    outcomes = []
    for call in range(1, 40):
        store.replace(TARGET, NAME, b"old")
        code = killed_at(call, lambda: store.replace(TARGET, NAME, b"new" * 100))
        outcomes.append(store.read(TARGET, NAME))
        assert outcomes[-1] in (b"old", b"new" * 100)
        if code == 0:
            break
    assert outcomes.count(b"old") >= 4, "open, write, fsync and replace leave the old one when killed before"
    assert outcomes[-1] == b"new" * 100


def test_bytes_and_name_are_on_disk_before_the_call_returns(store: LocalStore):
    """The order that survives a power cut: write, fsync the file, rename, fsync the folder."""
    store.replace(TARGET, NAME, b"old")
    calls: list[str] = []
    with watched(lambda name, arguments: calls.append(name)):
        store.replace(TARGET, NAME, b"new")
    assert [c for c in calls if c != "open"][:4] == ["write", "fsync", "replace", "fsync"]
    assert set(calls) <= set(WATCHED)


def test_a_new_folder_is_made_durable_in_every_folder_above_it(tmp_path: Path):
    made: list[str] = []

    def see(name: str, arguments: tuple[object, ...]) -> None:
        made.append(name)

    with watched(see):
        LocalStore(tmp_path / "p").replace(TARGET, NAME, b"x")
    assert made.count("mkdir") == 4
    assert made.count("fsync") == 4 + 2


def test_the_lock_keeps_another_process_out_until_it_ends(store: LocalStore, tmp_path: Path):
    inside = tmp_path / "inside"

    def hold_and_die() -> None:
        with store.lock(TARGET):
            inside.touch()
            time.sleep(0.2)
            os._exit(9)

    pid = os.fork()
    if pid == 0:
        hold_and_die()
    while not inside.exists():
        time.sleep(0.005)
    with store.lock(TARGET):
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert LOCK not in os.listdir(store.folder(TARGET))


def test_threads_and_processes_that_share_a_lock_never_overlap(store: LocalStore, tmp_path: Path):
    counter = tmp_path / "counter"
    counter.write_text("0")

    def add(times: int) -> None:
        for _ in range(times):
            with store.lock(TARGET):
                counter.write_text(str(int(counter.read_text()) + 1))

    pids = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            add(40)
            os._exit(0)
        pids.append(pid)
    threads = [threading.Thread(target=add, args=(40,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for pid in pids:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert counter.read_text() == "200"


def test_a_lock_that_is_held_too_long_is_refused(store: LocalStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_module, "LOCK_WAIT_SECONDS", 0.05)

    def wait_in_vain() -> None:
        with store.lock(TARGET):
            pass

    with store.lock(TARGET):
        assert in_child(wait_in_vain) == LeasedError.exit_code
    assert in_child(wait_in_vain) == 0


def test_a_file_in_place_of_the_prefix_is_named(tmp_path: Path):
    (tmp_path / "artifacts").write_text("not a folder")
    store = LocalStore(tmp_path / "artifacts")
    assert store.read(TARGET, NAME) is None
    with pytest.raises(RequestError, match=f"cannot write {tmp_path}/artifacts: Not a directory"):
        store.replace(TARGET, NAME, b"x")
    with pytest.raises(RequestError, match="Not a directory"), store.lock(TARGET):
        pass


def test_a_file_in_place_of_a_name_is_named(store: LocalStore):
    store.prefix.mkdir()
    (store.prefix / "raw").write_text("")
    with pytest.raises(RequestError, match="artifacts/raw: Not a directory"):
        store.replace(TARGET, NAME, b"x")


def test_a_full_disk_is_told_in_one_line_with_bytes_needed_and_free(tmp_path: Path):
    error = OSError(errno.ENOSPC, "No space left on device")
    first = str(disk_error(error, tmp_path / "gone" / "x", 123_456)).splitlines()[0]
    free = os.statvfs(tmp_path)
    assert first.startswith(f"the disk is full: {tmp_path}/gone/x: 123,456 bytes needed, ")
    assert first.endswith(" free")
    assert abs(int(first.split()[-2].replace(",", "")) - free.f_bavail * free.f_frsize) < 1 << 30


def test_a_failing_disk_is_told_with_the_path(tmp_path: Path):
    error = disk_error(OSError(errno.EIO, "Input/output error"), tmp_path / "x")
    assert str(error) == f"{tmp_path}/x: Input/output error"
    assert type(error) is MarinError


def test_a_lock_file_that_was_removed_while_we_waited_is_not_the_lock(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
):
    """Who held it removes it on leaving: the lock on the removed file keeps nobody out, so it is taken anew."""
    real, path = store_module.fcntl.flock, store.folder(TARGET) / LOCK
    calls = 0

    def remove_then_lock(descriptor: int, operation: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            path.unlink()
        real(descriptor, operation)

    monkeypatch.setattr(store_module.fcntl, "flock", remove_then_lock)
    with store.lock(TARGET):
        assert path.exists()
        assert in_child(lambda: refuse_to_wait(store, monkeypatch)) == LeasedError.exit_code


def refuse_to_wait(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "LOCK_WAIT_SECONDS", 0.05)
    with store.lock(TARGET):
        pass


def test_a_name_that_is_too_long_for_the_disk_is_told_on_writing(store: LocalStore):
    target = Target(f"raw/{'n' * 300}", "dev")
    assert store.read(target, NAME) is None
    with pytest.raises(RequestError, match="File name too long"):
        store.replace(target, NAME, b"x")


def test_of_two_exchanges_from_the_same_bytes_one_succeeds(store: LocalStore):
    assert store.exchange(TARGET, NAME, None, b"one")
    assert not store.exchange(TARGET, NAME, None, b"two")
    assert store.exchange(TARGET, NAME, b"one", b"two")
    assert not store.exchange(TARGET, NAME, b"one", b"three")
    assert store.read(TARGET, NAME) == b"two"
    assert not store.exchange(TARGET, NAME, b"one", None)
    assert store.exchange(TARGET, NAME, b"two", None)
    assert os.listdir(store.folder(TARGET)) == []


def test_exchanges_of_many_threads_lose_nothing(store: LocalStore):
    store.replace(TARGET, NAME, b"0")

    def add(times: int) -> None:
        while times:
            seen = store.read(TARGET, NAME)
            assert seen is not None
            times -= store.exchange(TARGET, NAME, seen, str(int(seen) + 1).encode())

    threads = [threading.Thread(target=add, args=(20,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.read(TARGET, NAME) == b"80"


def test_targets_and_their_files_are_found_and_removed(store: LocalStore):
    other = Target("checkpoints/deep/name", "dev")
    store.replace(TARGET, NAME, b"12345")
    store.replace(other, "checkpoints/3/x", b"1")
    (store.prefix / "raw/empty/2026.06.28").mkdir(parents=True)
    (store.prefix / "notes.txt").write_text("foreign")
    assert store.targets() == [other, TARGET]
    assert store.listing(TARGET) == {NAME: 5}
    assert store.listing(other) == {"checkpoints/3/x": 1}
    store.remove(other, ["checkpoints/3/x", "gone"])
    assert store.targets() == [TARGET]
    assert sorted(os.listdir(store.prefix)) == ["notes.txt", "raw"], "the folders that it left empty went too"
