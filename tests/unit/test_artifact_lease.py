from __future__ import annotations

import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from marin_build.artifact import lease as lease_module
from marin_build.artifact import owner as owner_module
from marin_build.artifact.lease import Lease, LeaseFile, Sign, Terms, acquire, holder, parse_lease
from marin_build.artifact.local_store import LocalStore
from marin_build.artifact.owner import Owner, process_start, this_process
from marin_build.artifact.store import LEASE
from marin_build.errors import LeasedError, Stopped
from marin_build.recipe.target import Target

TARGET = Target("raw/a", "2026.06.28")
LOG = logging.getLogger("test")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


@pytest.fixture
def sleeper():
    """Another process of this machine."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def owner_of(process: subprocess.Popen[bytes]) -> Owner:
    start = process_start(process.pid)
    assert start is not None
    return dataclasses.replace(this_process(), pid=process.pid, process_start=start)


def lease_file(owner: Owner, *, age_seconds: float = 0, lease_seconds: float = 30, token: int = 1) -> LeaseFile:
    wall, boot = time.time() - age_seconds, time.monotonic() - age_seconds
    return LeaseFile(owner, token, "a nonce", lease_seconds, 0, wall, boot)


def put(store: LocalStore, lease: LeaseFile) -> None:
    store.replace(TARGET, LEASE, lease.to_bytes())


def take(
    store: LocalStore, lease_seconds: float = 30, wait: bool = False, stop: Callable[[], bool] = lambda: False
) -> Lease:
    return acquire(store, TARGET, Terms(lease_seconds, wait=wait, stop_requested=stop), LOG)


def other_host(lease: LeaseFile) -> LeaseFile:
    return dataclasses.replace(lease, owner=dataclasses.replace(lease.owner, host="elsewhere", boot_id="other"))


def test_a_free_target_is_leased_and_leaves_nothing_behind(store: LocalStore):
    lease = take(store)
    assert holder(store, TARGET) == this_process()
    lease.check()
    lease.release()
    assert holder(store, TARGET) is None
    assert os.listdir(store.folder(TARGET)) == []


def test_a_living_owner_is_refused_by_name(store: LocalStore, sleeper: subprocess.Popen[bytes]):
    put(store, lease_file(owner_of(sleeper)))
    with pytest.raises(LeasedError, match=rf"is being built by .*process {sleeper.pid}\)\n.*wait=true"):
        take(store)
    assert parse_lease(store.read(TARGET, LEASE)) is not None


@pytest.mark.row(10)
def test_a_dead_owner_of_this_machine_is_replaced_at_once(
    store: LocalStore, sleeper: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    owner = owner_of(sleeper)
    put(store, lease_file(owner, lease_seconds=3600, token=7))
    sleeper.kill()
    while process_start(sleeper.pid) is not None:  # a zombie, since nobody has waited for it
        time.sleep(0.005)
    begin = time.monotonic()
    lease = take(store)
    assert time.monotonic() - begin < 5
    assert lease.file.token == 8
    assert f"replacing the lease of {owner}, which is gone or silent" in caplog.text
    lease.release()


@pytest.mark.row(10)
def test_a_process_id_that_was_given_out_again_is_not_mistaken(store: LocalStore, sleeper: subprocess.Popen[bytes]):
    earlier = dataclasses.replace(owner_of(sleeper), process_start=1)
    put(store, lease_file(earlier, lease_seconds=3600))
    take(store).release()


def test_a_silent_owner_of_this_machine_is_replaced_after_the_lease_time(
    store: LocalStore, sleeper: subprocess.Popen[bytes]
):
    put(store, lease_file(owner_of(sleeper), lease_seconds=30, age_seconds=29))
    with pytest.raises(LeasedError):
        take(store)
    put(store, lease_file(owner_of(sleeper), lease_seconds=30, age_seconds=31))
    take(store).release()


@pytest.mark.row(11)
def test_a_silent_owner_of_another_machine_is_replaced_after_the_lease_time_and_not_before(store: LocalStore):
    put(store, other_host(lease_file(this_process(), lease_seconds=0.6, age_seconds=1000)))
    begin = time.monotonic()
    take(store).release()
    assert 0.6 < time.monotonic() - begin < 5


@pytest.mark.row(11)
def test_a_fresh_owner_of_another_machine_is_refused_at_once(store: LocalStore):
    put(store, other_host(lease_file(this_process(), lease_seconds=30)))
    begin = time.monotonic()
    with pytest.raises(LeasedError, match="@elsewhere"):
        take(store)
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize("days", [-2, 2])
@pytest.mark.row(11)
@pytest.mark.row(15)
def test_an_owner_whose_clock_is_days_off_keeps_its_lease_while_it_beats(store: LocalStore, days: float):
    """Its wall time says nothing; what counts is that the file changes."""
    late = other_host(lease_file(this_process(), lease_seconds=0.4, age_seconds=days * 86400))
    put(store, late)
    beats = 0

    def beat_instead_of_stopping() -> bool:
        nonlocal beats
        beats += 1
        put(store, dataclasses.replace(late, beat=beats))
        return beats >= 40

    with pytest.raises(Stopped):
        take(store, stop=beat_instead_of_stopping)
    assert beats == 40


def test_an_owner_from_before_this_machines_last_start_is_gone(store: LocalStore, monkeypatch: pytest.MonkeyPatch):
    before = dataclasses.replace(this_process(), boot_id="the boot before")
    up_seconds = time.clock_gettime(time.CLOCK_BOOTTIME)
    put(store, lease_file(before, lease_seconds=3600, age_seconds=up_seconds + 60))
    take(store).release()


def test_a_machine_of_the_same_name_with_another_boot_is_not_mistaken_for_this_one(store: LocalStore):
    """`localhost` is many machines: one that beats now has not ended because this one started long ago."""
    put(store, lease_file(dataclasses.replace(this_process(), boot_id="another machine"), lease_seconds=3600))
    with pytest.raises(LeasedError):
        take(store)


def test_a_container_of_the_same_machine_is_judged_by_its_heartbeat_and_not_by_process_ids(store: LocalStore):
    """Its process ids mean nothing here: number 999999 is not running, and yet its owner lives."""
    inside = dataclasses.replace(this_process(), namespace="pid:[1]", pid=999_999)
    put(store, lease_file(inside, lease_seconds=3600))
    with pytest.raises(LeasedError):
        take(store)


def test_an_unreadable_lease_is_watched_for_the_lease_time(store: LocalStore):
    store.replace(TARGET, LEASE, b'{"owner": ')
    begin = time.monotonic()
    take(store, lease_seconds=0.5).release()
    assert 0.5 < time.monotonic() - begin < 5


def test_waiting_ends_when_the_owner_releases(store: LocalStore, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    first = take(store)
    looks = 0

    def release_at_the_third_look() -> bool:
        nonlocal looks
        looks += 1
        if looks == 3:
            first.release()
        return False

    second = take(store, lease_seconds=0.3, wait=True, stop=release_at_the_third_look)
    assert looks == 3
    assert [r.getMessage() for r in caplog.records if "waiting for" in r.getMessage()] == [
        f"{TARGET}: waiting for {this_process()}"
    ]
    second.release()


def test_a_stop_request_ends_the_waiting(store: LocalStore):
    first = take(store)
    with pytest.raises(Stopped):
        take(store, wait=True, stop=lambda: True)
    first.release()


def test_the_heartbeat_keeps_the_lease_for_longer_than_its_time(store: LocalStore):
    lease = take(store, lease_seconds=0.3)
    time.sleep(1)
    with pytest.raises(LeasedError):
        take(store)
    lease.check()
    assert not lease.is_lost()
    assert lease.file.beat >= 3
    lease.release()
    assert os.listdir(store.folder(TARGET)) == []


def test_a_builder_whose_lease_was_taken_over_notices_and_stops(store: LocalStore):
    lease = take(store, lease_seconds=0.3)
    taker = dataclasses.replace(other_host(lease_file(this_process(), token=2)), nonce="the taker's")
    put(store, taker)
    with pytest.raises(LeasedError, match=r"lost its lease, which was taken over by .*@elsewhere"):
        lease.check()
    assert lease.is_lost()
    with pytest.raises(LeasedError), lease.committing():
        pytest.fail("a lost lease commits nothing")
    lease.release()
    assert parse_lease(store.read(TARGET, LEASE)) == taker, "the lease of another is never removed"


def test_the_heartbeat_notices_a_lost_lease_by_itself(store: LocalStore):
    lease = take(store, lease_seconds=0.15)
    put(store, dataclasses.replace(other_host(lease_file(this_process())), nonce="the taker's"))
    assert lease.lost.wait(5)
    assert lease.is_lost()


def test_a_removed_lease_is_a_lost_lease(store: LocalStore):
    lease = take(store)
    store.delete(TARGET, LEASE)
    with pytest.raises(LeasedError, match="which was removed"):
        lease.check()


def test_after_a_pause_the_first_question_looks_at_the_file(store: LocalStore):
    """A paused process wakes with an old belief: before the heartbeat thread runs, the file is asked."""
    lease = take(store, lease_seconds=60)
    put(store, dataclasses.replace(other_host(lease_file(this_process())), nonce="the taker's"))
    assert not lease.is_lost(), "within the lease time the heartbeat is trusted"
    lease._beaten -= 61
    assert lease.is_lost()


@pytest.mark.row(11)
@pytest.mark.row(12)
def test_of_many_racing_takers_of_a_dead_lease_exactly_one_wins(store: LocalStore, tmp_path: Path):
    put(store, other_host(lease_file(this_process(), lease_seconds=0.2, age_seconds=1000)))
    results = tmp_path / "results"
    results.mkdir()
    pids = []
    for number in range(6):
        pid = os.fork()
        if pid == 0:
            try:
                lease = take(store, lease_seconds=30)
                (results / f"{number}-{lease.file.token}").touch()
                time.sleep(1.5)
                os._exit(0)
            except LeasedError:
                os._exit(5)
            finally:
                os._exit(1)
        pids.append(pid)
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
    assert codes == [0, 5, 5, 5, 5, 5]
    assert [name.partition("-")[2] for name in os.listdir(results)] == ["2"]


def test_a_killed_taker_never_blocks_the_next_one(store: LocalStore):
    from artifact_world import killed_at

    kills = 0
    for call in range(1, 60):
        put(
            store,
            dataclasses.replace(lease_file(this_process()), owner=dataclasses.replace(this_process(), pid=999_999)),
        )
        code = killed_at(call, lambda: take(store))
        kills += code == -signal.SIGKILL
        lease = take(store)
        lease.release()
        left = os.listdir(store.folder(TARGET))
        assert left == [], left
        if code == 0:
            break
    assert code == 0
    assert kills > 8


def test_this_process_is_alive_and_a_finished_one_is_not():
    assert not this_process().is_gone()
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert process_start(process.pid) is None


def test_without_proc_a_process_is_asked_by_signal(monkeypatch: pytest.MonkeyPatch, sleeper: subprocess.Popen[bytes]):
    monkeypatch.setattr(owner_module, "PROC", Path("/nowhere"))
    assert process_start(sleeper.pid) == 0
    sleeper.kill()
    sleeper.wait()
    assert process_start(sleeper.pid) is None


def test_an_unknown_field_or_a_missing_one_makes_a_lease_unreadable():
    assert parse_lease(None) is None
    assert parse_lease(b"{}") is None
    assert parse_lease(b'{"owner": {}, "future": 1}') is None


def test_a_sign_of_life_is_one_of_three():
    now = lease_file(this_process())
    assert now.sign() is Sign.alive
    assert other_host(lease_file(this_process(), age_seconds=31)).sign() is Sign.unknown
    assert lease_module.Sign("dead") is Sign.dead


def test_with_wait_a_busy_lock_is_waited_for_too(store: LocalStore, monkeypatch: pytest.MonkeyPatch):
    """Somebody commits just now: without `wait` that is a refusal, with it one more look."""
    from marin_build.artifact import local_store as store_module

    monkeypatch.setattr(store_module, "LOCK_WAIT_SECONDS", 0.05)
    lock = LocalStore(store.prefix).lock(TARGET)
    lock.__enter__()
    with pytest.raises(LeasedError, match="is locked by another process"):
        take(store)
    looks = 0

    def unlock_at_the_second_look() -> bool:
        nonlocal looks
        looks += 1
        if looks == 2:
            lock.__exit__(None, None, None)
        return False

    take(store, wait=True, stop=unlock_at_the_second_look).release()
    assert looks == 2
