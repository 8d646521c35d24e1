"""Two runners on one target, a builder that sleeps through its lease, readers during a rebuild, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from artifact_world import RAW, TOKENIZER, TOKENS, Parts, World

from marin_build.artifact.digest import hash_file
from marin_build.artifact.examine import State
from marin_build.artifact.lease import holder
from marin_build.errors import LeasedError, MarinError, Stopped
from marin_build.recipe.target import parse_target

Process = subprocess.Popen[str]


@pytest.fixture
def run(world: World) -> Iterator[object]:
    """Start builders of the world as other processes; whatever is left of them at the end is killed."""
    started: list[Process] = []

    def start(target: str, *options: str) -> Process:
        command = world.command(target, *options)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=world.folder)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_for(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.row(12)
def test_of_two_runners_one_builds_and_the_other_refuses_at_once(world: World, run):
    first = run(RAW, "--part-seconds", "0.5")
    wait_for(lambda: holder(world.store, parse_target(RAW)) is not None)
    assert world.status(RAW).state is State.building
    begin = time.monotonic()
    with pytest.raises(LeasedError, match=f"{RAW} is being built by .*process {first.pid}"):
        world.build(RAW)
    assert time.monotonic() - begin < 1
    second = run(RAW)
    assert second.wait() == 5
    assert f"{RAW} is being built by" in second.stderr.readline()
    assert first.wait() == 0
    assert first.stdout.read().split() == ["built", "part-0", "part-1", "part-2"]
    assert world.verify(RAW).ok


@pytest.mark.row(12)
def test_a_runner_that_waits_reuses_what_the_other_built(world: World, run):
    first = run(RAW, "--part-seconds", "0.4")
    wait_for(lambda: holder(world.store, parse_target(RAW)) is not None)
    second = run(RAW, "--wait")
    assert first.wait() == 0
    assert second.wait() == 0, second.stderr.read()
    assert second.stdout.read().split() == ["reused"]
    assert len(os.listdir(world.path(RAW, "logs"))) == 1


def test_a_runner_that_waits_resumes_what_a_killed_one_left(world: World, run):
    first = run(RAW, "--part-seconds", "0.3", "--lease-seconds", "60")
    wait_for(lambda: world.path(RAW, "part-0").exists())
    second = run(RAW, "--wait")
    time.sleep(0.2)
    first.kill()
    assert second.wait() == 0, second.stderr.read()
    made = second.stdout.read().split()
    assert made[0] == "built"
    assert "part-0" not in made


@pytest.mark.row(12)
def test_many_runners_at_once_make_one_artifact(world: World, run):
    processes = [run(RAW, "--wait", "--part-seconds", "0.02") for _ in range(5)]
    assert [process.wait() for process in processes] == [0] * 5
    outputs = sorted(process.stdout.read().split() for process in processes)
    assert outputs == [["built", "part-0", "part-1", "part-2"], *[["reused"]] * 4]
    assert world.verify(RAW).ok
    assert len(os.listdir(world.path(RAW, "logs"))) == 1


@pytest.mark.row(13)
def test_runners_of_disjoint_targets_do_not_touch_each_other(world: World, run):
    slow = run(RAW, "--part-seconds", "0.5")
    wait_for(lambda: holder(world.store, parse_target(RAW)) is not None)
    assert run(TOKENIZER).wait() == 0
    assert world.status(RAW).state is State.building
    assert slow.wait() == 0


@pytest.mark.row(10)
def test_a_killed_builder_is_replaced_at_once_and_its_work_resumed(world: World, run):
    first = run(RAW, "--part-seconds", "0.5", "--lease-seconds", "3600")
    wait_for(lambda: world.path(RAW, "part-0").exists())
    first.kill()
    first.wait()
    assert world.status(RAW).state is State.partial
    builder = Parts()
    world.build(RAW, builder)
    assert "part-0" not in builder.made
    assert builder.made


@pytest.mark.row(14)
def test_a_builder_that_slept_through_its_lease_commits_nothing(world: World, run):
    """Paused past its lease, replaced, woken: its bytes are not committed, and the other's are whole."""
    sleepy = run(RAW, "--part-seconds", "0.3", "--lease-seconds", "0.6", "--salt", "of the sleeper", "--parts", "4")
    wait_for(lambda: world.path(RAW, "part-0").exists())
    sleepy.send_signal(signal.SIGSTOP)
    with pytest.raises(LeasedError):
        world.build(RAW)
    time.sleep(0.8)
    record = world.build(RAW, Parts(4), lease_seconds=30).record
    sleepy.send_signal(signal.SIGCONT)
    assert sleepy.wait() == 5
    assert f"{RAW}: this builder was silent for too long and lost its lease" in sleepy.stderr.read()
    assert world.record(RAW) == record
    assert world.verify(RAW).ok
    assert len(os.listdir(world.path(RAW, "logs"))) == 2
    assert world.files(RAW) == {".artifact.json", ".attempt.json", "logs", *(f"part-{number}" for number in range(4))}


@pytest.mark.row(14)
def test_a_sleeper_that_wakes_while_the_other_builds_does_not_disturb_it(world: World, run):
    sleepy = run(RAW, "--part-seconds", "0.2", "--lease-seconds", "0.6", "--parts", "30")
    wait_for(lambda: world.path(RAW, "part-0").exists())
    sleepy.send_signal(signal.SIGSTOP)
    time.sleep(0.8)
    second = run(RAW, "--part-seconds", "0.2", "--parts", "30")
    wait_for(lambda: (owner := holder(world.store, parse_target(RAW))) is not None and owner.pid == second.pid)
    sleepy.send_signal(signal.SIGCONT)
    assert sleepy.wait() == 5
    assert holder(world.store, parse_target(RAW)).pid == second.pid, "the woken one must not take the lease away"
    assert second.wait() == 0, second.stderr.read()
    assert world.verify(RAW).ok


@pytest.mark.row(14)
def test_a_builder_paused_in_the_middle_of_its_commit_keeps_others_out(world: World, monkeypatch: pytest.MonkeyPatch):
    """Inside the commit the lock is held: a runner that finds the lease silent still cannot take over."""
    from marin_build.artifact import local_store as store_module

    monkeypatch.setattr(store_module, "LOCK_WAIT_SECONDS", 0.2)
    pid = os.fork()
    if pid == 0:
        real = os.replace

        def pause_at_the_record(source, destination):
            if str(destination).endswith(".artifact.json"):
                os.kill(os.getpid(), signal.SIGSTOP)
            real(source, destination)

        os.replace = pause_at_the_record
        try:
            world.build(RAW, lease_seconds=0.3)
            os._exit(0)
        finally:
            os._exit(1)
    os.waitpid(pid, os.WUNTRACED)
    time.sleep(0.5)
    with pytest.raises(LeasedError, match="is locked by another process"):
        world.build(RAW)
    assert world.record(RAW) is None
    os.kill(pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert world.verify(RAW).ok
    assert not world.build(RAW).built


@pytest.mark.row(1)
def test_readers_see_whole_artifacts_only_while_they_are_replaced(world: World):
    """A reader that finds the same record before and after has read the bytes that the record names."""
    old = world.build(RAW, Parts(2, salt="0")).record
    done = threading.Event()
    seen: set[str] = set()
    broken: list[str] = []
    nothing = 0

    def read() -> None:
        nonlocal nothing
        while not done.is_set():
            before = world.record(RAW)
            if before is None:
                nothing += 1
                continue
            try:
                read = {entry["path"]: hash_file(world.path(RAW, entry["path"]))[1] for entry in before.content}
            except MarinError as error:
                read = {"": str(error)}
            if world.record(RAW) == before:
                seen.add(before.digest)
                if read != {entry["path"]: entry["xxh3_128"] for entry in before.content}:
                    broken.append(f"{before.digest}: {read}")

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    digests = {old.digest}
    try:
        for number in range(1, 9):
            digests.add(world.build(RAW, Parts(2, salt=str(number)), force=f"r{number}").record.digest)
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert broken == []
    assert len(digests) == 9
    assert seen <= digests
    assert len(seen) > 2


# ---- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_stops_resumably(world: World, run, number: signal.Signals):
    process = run(RAW, "--part-seconds", "0.4")
    wait_for(lambda: world.path(RAW, "part-0").exists())
    process.send_signal(number)
    assert process.wait() == 6
    text = process.stderr.read()
    assert f"{number.name}: saving and stopping; once more stops at once" in text
    assert "stopped before part" in text
    assert world.status(RAW).state is State.partial
    assert holder(world.store, parse_target(RAW)) is None
    builder = Parts()
    assert world.build(RAW, builder).built
    assert "part-0" not in builder.made


@pytest.mark.row(18)
def test_the_second_signal_ends_the_process_at_once(world: World, run):
    process = run(RAW, "--part-seconds", "30")
    wait_for(lambda: world.path(RAW, ".attempt.json").exists())
    time.sleep(0.3)
    process.terminate()
    time.sleep(0.6)
    begin = time.monotonic()
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    assert time.monotonic() - begin < 5
    assert world.build(RAW).built, "its lease is that of a dead process, and replaced at once"


def test_the_same_request_delivered_twice_counts_once(world: World, run):
    """Ctrl-C in a terminal reaches the job from the terminal and again from Snakemake."""
    process = run(RAW, "--part-seconds", "1")
    wait_for(lambda: world.path(RAW, ".attempt.json").exists())
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 6


def test_a_signal_while_waiting_for_a_lease_ends_the_wait(world: World, run):
    first = run(RAW, "--part-seconds", "30")
    wait_for(lambda: holder(world.store, parse_target(RAW)) is not None)
    second = run(RAW, "--wait")
    assert "waiting for" in second.stderr.readline()
    second.terminate()
    assert second.wait() == 6
    first.kill()


def test_signal_handlers_are_given_back(world: World):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    world.build(RAW)

    def stop(context):
        raise Stopped("stopped")

    with pytest.raises(Stopped):
        world.build(TOKENIZER, stop)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_build_in_another_thread_works_without_signals(world: World):
    outcomes: list[bool] = []
    thread = threading.Thread(target=lambda: outcomes.append(world.build(RAW).built))
    thread.start()
    thread.join()
    assert outcomes == [True]


def test_a_folder_taken_away_under_a_builder_commits_nothing(world: World, tmp_path: Path):
    def build(context):
        result = Parts()(context)
        os.rename(world.path(RAW, "."), tmp_path / "moved")
        return result

    with pytest.raises(LeasedError, match="lost its lease, which was removed"):
        world.build(RAW, build)
    assert world.record(RAW) is None
    assert world.build(RAW).built
    assert world.build(TOKENIZER).built
    assert world.build(TOKENS).built
