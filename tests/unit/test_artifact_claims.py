"""Claims: what one run of a working directory makes, no other one begins; they end with their process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from marin_build.artifact.claims import Claims
from marin_build.artifact.owner import this_process
from marin_build.errors import RequestError
from marin_build.recipe.target import Target

RAW, TOKENS, MODEL = (Target(f"{kind}/a", "2026.06.28") for kind in ("raw", "tokenized", "checkpoints"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def other(folder: Path):
    """Another process that has claimed RAW and TOKENS; its id."""
    ready, written = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            claims = Claims("other", folder)
            claims.add([RAW])
            claims.add([TOKENS])
            os.write(written, b".")
            signal.pause()
        finally:
            os._exit(1)
    os.read(ready, 1)
    yield pid
    end(pid)


def end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def test_what_another_run_has_is_refused_with_who_and_claims_nothing(folder: Path, other: int):
    mine = Claims("mine", folder)
    taken = mine.add([MODEL, TOKENS])
    assert list(taken) == [TOKENS]
    assert f"(process {other})" in taken[TOKENS]
    assert mine.targets == frozenset()
    assert Claims("third", folder).add([MODEL]) == {}


def test_disjoint_targets_are_free(folder: Path, other: int):
    mine = Claims("mine", folder)
    assert mine.add([MODEL]) == {}
    assert mine.targets == {MODEL}


def test_a_killed_run_claims_nothing_and_its_file_goes(folder: Path, other: int):
    end(other)
    mine = Claims("mine", folder)
    assert mine.add([RAW, TOKENS]) == {}
    assert sorted(os.listdir(folder)) == ["lock", "mine.json"]


def test_an_earlier_run_of_this_process_has_ended(folder: Path):
    earlier = Claims("earlier", folder)
    earlier.add([RAW])
    assert Claims("mine", folder).add([RAW]) == {}
    assert str(this_process()) in (folder / "earlier.json").read_text()


def test_of_many_runs_at_once_one_gets_a_target(folder: Path):
    go, start = os.pipe()
    pids = []
    for number in range(8):
        pid = os.fork()
        if pid == 0:
            os.read(go, 1)
            claims = Claims(str(number), folder)  # held as long as it is there
            taken = claims.add([RAW, TOKENS] if number % 2 else [TOKENS])
            if not taken:
                (folder / f"won-{number}").touch()
                signal.pause()
            os._exit(5)
        pids.append(pid)
    os.write(start, b"." * len(pids))
    codes = [os.waitstatus_to_exitcode(os.waitpid(-1, 0)[1]) for _ in pids[1:]]
    won = list(folder.glob("won-*"))
    for pid in pids:
        end(pid)
    assert codes == [5] * 7
    assert len(won) == 1


def test_a_working_directory_that_cannot_be_written_to_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match=r"cannot write .*file"):
        Claims("mine", tmp_path / "file").add([RAW])
