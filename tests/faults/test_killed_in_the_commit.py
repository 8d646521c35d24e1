"""SIGKILL as the process enters each system call of the commit: the old artifact or the new one, and a rerun converges.

The process stops itself as the commit begins; strace is attached and kills it at its n-th call of a kind. From then on
every call counts that can change a disk or drop a lock: the record, the swap of a rebuild, the end of the lease.
`tests/unit/test_artifact_crash.py` kills whole builds at each such call of Python.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from artifact_world import RAW, TOKENIZER, TOKENS, Parts, World

from marin_build.artifact import local_work
from marin_build.artifact.examine import State
from marin_build.build import builder_of

pytestmark = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")

CALLS = ("openat", "write", "fsync", "rename", "link", "unlink", "rmdir", "flock")
MAX_CALLS = 60


@pytest.fixture
def world(memory_world: World) -> World:
    return memory_world


def killed_in(call: str, when: int, work: Callable[[], Any]) -> int:
    """Run `work` in a child that dies by SIGKILL at its `when`-th `call` after the commit began; its exit code."""
    pid = os.fork()
    if pid == 0:
        os._exit(in_this_process(lambda: stopped_at_the_record(work)))
    os.waitpid(pid, os.WUNTRACED)
    inject = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}"]
    inject += ["-e", f"inject={call}:signal=KILL:when={when}", "-p", str(pid)]
    with subprocess.Popen(inject, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as tracer:
        while not is_traced(pid):
            if tracer.poll() is not None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                pytest.skip(f"this machine lets no process be traced: {tracer.communicate()[1]}")
            time.sleep(0.005)
        os.kill(pid, signal.SIGCONT)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def stopped_at_the_record(work: Callable[[], Any]) -> None:
    """Do the work, and wait for SIGCONT where it is about to write the record."""
    real = local_work.write_record

    def stop_first(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        real(*arguments)

    local_work.write_record = stop_first  # type: ignore[assignment]
    work()


def in_this_process(work: Callable[[], Any]) -> int:
    try:
        work()
    except BaseException:
        return 1
    return 0


def is_traced(pid: int) -> bool:
    """True once strace has taken every thread of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all("TracerPid:\t0" not in (task / "status").read_text() for task in tasks)


def kill_everywhere(world: World, prepared: Path, work: Callable[[], Any], check: Callable[[], None]) -> int:
    """Kill at each call of each kind, until a run ends by itself; how many kills there were."""
    kills = 0
    for call in CALLS:
        for when in range(1, MAX_CALLS):
            shutil.rmtree(world.folder / "artifacts")
            shutil.copytree(prepared, world.folder / "artifacts")
            code = killed_in(call, when, work)
            assert code in (0, -signal.SIGKILL), (call, when, code)
            check()
            if code == 0:
                break
            kills += 1
        else:
            raise AssertionError(f"{call}: the commit never ended")
    return kills


@pytest.mark.row(1)
@pytest.mark.parametrize("rebuild", [False, True], ids=["first build", "rebuild"])
def test_killed_at_any_system_call_of_the_commit_there_is_the_old_artifact_or_the_new(
    world: World, tmp_path: Path, rebuild: bool
):
    old = world.build(RAW, Parts(2)).record.digest if rebuild else None
    (world.folder / "artifacts").mkdir(exist_ok=True)
    shutil.copytree(world.folder / "artifacts", tmp_path / "prepared")
    force = "r1" if rebuild else None
    new = world.build(RAW, Parts(2, salt="new"), force=force).record.digest
    seen = set()

    def check() -> None:
        record = world.record(RAW)
        seen.add(record and record.digest)
        assert record is None or (record.digest in (old, new) and world.verify(RAW).ok)
        builder = Parts(2, salt="new")
        assert world.build(RAW, builder).record.digest == new, "a plain rerun goes on"
        assert builder.made == [], "all that the commit was about was there"
        assert world.verify(RAW).ok
        assert world.status(RAW).state is State.finished

    kills = kill_everywhere(
        world, tmp_path / "prepared", lambda: world.build(RAW, Parts(2, salt="new"), force=force), check
    )
    assert kills > (30 if rebuild else 15)
    assert seen >= {old, new}


@pytest.mark.row(4)
def test_killed_as_the_record_is_opened_nothing_is_tokenized_again(world: World, tmp_path: Path):
    """The real builder: whole shards are checked and used again, a flipped one is found."""
    builder = builder_of("tokenized")
    world.edit(TOKENS, "type: text, document: file", "type: text, document: line")
    world.edit(TOKENS, "shard_bytes: 1000", "shard_bytes: 40")
    world.build(RAW)
    world.build(TOKENIZER, builder_of("tokenizers"))
    shutil.copytree(world.folder / "artifacts", tmp_path / "prepared")
    expected = world.build(TOKENS, builder, processes=1).record
    for harm in (False, True):
        shutil.rmtree(world.folder / "artifacts")
        shutil.copytree(tmp_path / "prepared", world.folder / "artifacts")
        assert killed_in("openat", 1, lambda: world.build(TOKENS, builder, processes=1)) == -signal.SIGKILL
        assert world.record(TOKENS) is None
        if harm:
            shard = sorted(world.path(TOKENS).glob("*.arrow"))[1]
            data = bytearray(shard.read_bytes())
            data[len(data) // 2] ^= 1
            shard.write_bytes(data)
        record = world.build(TOKENS, builder, processes=1).record
        assert record.digest == expected.digest
        assert record.provenance["shards_made"] == int(harm)
        assert record.provenance["shards_kept"] == expected.metrics["shards"] - int(harm) > 1
