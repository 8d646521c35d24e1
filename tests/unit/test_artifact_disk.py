"""Disks that are full, read-only, failing or in the way: one clear line, the old artifact whole, a rerun goes on."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from artifact_world import RAW, Parts, World, in_child, watched

from marin_build.artifact.examine import State
from marin_build.errors import MarinError, RequestError

DISK_BYTES = 256 << 10


def mounted(*arguments: str) -> Iterator[None]:
    """Mount for one test; skip where that is not permitted."""
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not permitted: {done.stderr.strip()}")
    yield
    subprocess.run(["umount", "-l", arguments[-1]], check=True)


@pytest.fixture
def small_disk(world: World) -> Iterator[Path]:
    """The prefix of the world is a disk of 256 KiB."""
    prefix = world.folder / "artifacts"
    prefix.mkdir()
    for _ in mounted("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(prefix)):
        yield prefix


def fill(disk: Path, leave_bytes: int = 0) -> Path:
    """Fill a disk to the last block, but for `leave_bytes`."""
    filler = disk / "filler"
    with open(filler, "ab", buffering=0) as file, suppress(OSError):
        while True:
            file.write(b"x" * 4096)
    if leave_bytes:
        os.truncate(filler, filler.stat().st_size - leave_bytes)
    return filler


def big_part(context) -> None:
    """What a builder does that is not careful: it writes more than there is room for."""
    with open(context.folder / "big", "wb", buffering=0) as file:
        for _ in range(1000):
            file.write(b"y" * 4096)


@pytest.mark.row(5)
def test_a_disk_that_fills_while_a_builder_writes_is_told_in_one_line(world: World, small_disk: Path):
    def build(context):
        Parts()(context)
        big_part(context)

    with pytest.raises(MarinError) as caught:
        world.build(RAW, build, run="r1")
    first, *rest = str(caught.value).splitlines()
    assert re.fullmatch(rf"the disk is full: {world.path(RAW)}/?: at least [\d,]+ bytes needed, [\d,]+ free", first)
    assert rest == ["  free some space and run the same command again: what was done is kept"]
    assert caught.value.exit_code == 1
    assert world.record(RAW) is None
    world.path(RAW, "big").unlink()
    builder = Parts()
    assert world.build(RAW, builder, run="r1").built, "a full disk is not a final failure"
    assert builder.made == []
    assert world.verify(RAW).ok


@pytest.mark.parametrize(
    "wrap", [lambda e: RuntimeError(f"could not write: {os.strerror(e.errno)}"), lambda e: ValueError("x")]
)
def test_a_full_disk_is_recognised_inside_the_errors_of_libraries(world: World, small_disk: Path, wrap: Callable):
    def build(context):
        try:
            big_part(context)
        except OSError as error:
            raise wrap(error) from error

    with pytest.raises(MarinError, match="the disk is full"):
        world.build(RAW, build)


@pytest.mark.row(5)
def test_a_disk_without_room_for_the_record_commits_nothing_and_names_the_bytes(world: World, small_disk: Path):
    fillers = []

    def build(context):
        result = Parts()(context)
        fillers.append(fill(small_disk))
        return result

    with pytest.raises(MarinError, match=r"the disk is full: .*/\.artifact\.json.*: [\d,]+ bytes needed, 0 free"):
        world.build(RAW, build)
    assert world.record(RAW) is None
    assert not [name for name in os.listdir(world.path(RAW)) if name.endswith(".tmp")], "no half-written file stays"
    fillers[0].unlink()
    builder = Parts()
    assert world.build(RAW, builder).built
    assert builder.made == []


def test_a_disk_that_is_full_from_the_start_is_told(world: World, small_disk: Path):
    fill(small_disk)
    with pytest.raises(MarinError, match=r"the disk is full: .*: [\d,]+ bytes needed, 0 free"):
        world.build(RAW)
    (small_disk / "filler").unlink()
    assert world.build(RAW).built


@pytest.mark.row(5)
def test_a_forced_rebuild_without_room_keeps_the_old_artifact(world: World, small_disk: Path):
    old = world.build(RAW).record

    def build(context):
        Parts(1)(context)
        big_part(context)

    with pytest.raises(MarinError, match="the disk is full"):
        world.build(RAW, build, force="r1")
    assert world.record(RAW) == old
    assert world.verify(RAW).ok
    world.path(RAW, ".rebuild/big").unlink()
    assert world.build(RAW, force="r1").built
    assert world.verify(RAW).ok


@pytest.mark.parametrize("room_bytes", range(0, 40_960, 4096))
@pytest.mark.row(5)
def test_whatever_room_is_left_a_rebuild_ends_with_one_whole_artifact(world: World, small_disk: Path, room_bytes: int):
    old = world.build(RAW).record
    fill(small_disk, room_bytes)
    digest = None
    try:
        digest = world.build(RAW, Parts(salt="new"), force="r1").record.digest
    except MarinError as error:
        message = str(error)
    if digest is None:
        assert "the disk is full" in message
        assert world.record(RAW) == old
    assert world.verify(RAW).ok
    (small_disk / "filler").unlink()
    assert (
        world.build(RAW, Parts(salt="new"), force="r1").record.digest
        == (digest or world.record(RAW).digest)
        != old.digest
    )
    assert world.verify(RAW).ok


@pytest.mark.row(5)
def test_a_full_disk_stops_the_log_with_one_loud_line_and_not_the_work(
    world: World, small_disk: Path, capsys: pytest.CaptureFixture[str]
):
    def build(context):
        result = Parts()(context)
        filler = fill(small_disk)
        for _ in range(200):
            context.logger.info("x" * 1000)
        filler.unlink()
        return result

    assert world.build(RAW, build).built
    assert capsys.readouterr().err.count("the work goes on") == 1
    assert world.verify(RAW).ok


def test_a_full_disk_for_the_heartbeat_is_survived(world: World, small_disk: Path, capsys: pytest.CaptureFixture[str]):
    import time

    def build(context):
        result = Parts()(context)
        filler = fill(small_disk)
        time.sleep(0.8)
        filler.unlink()
        time.sleep(0.4)
        context.check_lease()
        return result

    assert world.build(RAW, build, lease_seconds=0.6).built
    assert capsys.readouterr().err.count("the heartbeat of") == 1


# ---- prefixes that cannot be written to -----------------------------------------------------------------------------


@pytest.fixture
def read_only(world: World) -> Iterator[Callable[[], None]]:
    """A function that makes the prefix read-only; root may write everywhere else."""
    prefix = world.folder / "artifacts"
    prefix.mkdir()
    made: list[Path] = []
    for _ in mounted("--bind", str(prefix), str(prefix)):

        def make() -> None:
            """Put a read-only view on top, so that it also works while files below are open."""
            subprocess.run(["mount", "--bind", str(prefix), str(prefix)], check=True)
            made.append(prefix)
            subprocess.run(["mount", "-o", "remount,bind,ro", str(prefix)], check=True)

        yield make
        for path in made:
            subprocess.run(["umount", "-l", str(path)], check=True)


def test_an_unwritable_prefix_is_a_bad_request_that_names_it(world: World, read_only: Callable[[], None]):
    read_only()
    with pytest.raises(RequestError, match=rf"cannot write {world.folder}/artifacts/raw: Read-only file system"):
        world.build(RAW)


def test_a_finished_artifact_is_reused_from_a_read_only_prefix(world: World, read_only: Callable[[], None]):
    world.build(RAW)
    world.path(RAW, ".lock").touch()
    read_only()
    assert not world.build(RAW).built
    assert world.status(RAW).state is State.finished
    assert world.verify(RAW).ok


def test_damage_that_cannot_be_noted_is_still_reported(world: World, read_only: Callable[[], None]):
    world.build(RAW)
    world.path(RAW, "part-1").write_bytes(b"?" * 185)
    read_only()
    problems = [str(problem) for problem in world.verify(RAW).problems]
    assert problems[0].startswith("part-1: other bytes")
    assert "the result could not be noted" in problems[1]


def test_a_prefix_becoming_read_only_during_the_build_commits_nothing(world: World, read_only: Callable[[], None]):
    def build(context):
        result = Parts()(context)
        read_only()
        return result

    with pytest.raises(RequestError, match="Read-only file system"):
        world.build(RAW, build)
    assert world.record(RAW) is None


def test_a_file_in_place_of_the_prefix_is_named(world: World):
    (world.folder / "artifacts").write_text("not a folder")
    with pytest.raises(RequestError, match=f"cannot write {world.folder}/artifacts: Not a directory"):
        world.build(RAW)


def test_an_unwritable_working_directory_is_named_but_the_artifact_is_finished(world: World):
    (world.folder / ".marin").write_text("not a folder")
    with pytest.raises(RequestError, match=r"cannot write \.marin"):
        world.build(RAW)
    assert world.status(RAW).state is State.finished
    (world.folder / ".marin").unlink()
    assert not world.build(RAW).built


# ---- disks that fail -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize("when", [1, 4, 9, 14])
@pytest.mark.row(6)
def test_a_failing_fsync_commits_nothing_and_a_rerun_goes_on(world: World, when: int):
    inject = [
        "strace",
        "-f",
        "-qq",
        "-o",
        "/dev/null",
        "-e",
        "trace=fsync",
        "-e",
        f"inject=fsync:error=EIO:when={when}",
    ]
    done = subprocess.run(inject + world.command(RAW), capture_output=True, text=True, cwd=world.folder)
    assert done.returncode == 1, done.stderr
    assert re.search(r"^/\S+: (cannot be read at byte [\d,]+: )?Input/output error$", done.stderr, re.MULTILINE), (
        done.stderr
    )
    assert "Traceback" not in done.stderr
    record = world.record(RAW)
    # When the sync of the folder fails after the rename, the record is there: whole, as a reader would see it.
    assert record is None or (when == 14 and world.verify(RAW).ok)
    assert world.build(RAW).built is (record is None)
    assert world.verify(RAW).ok


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.row(6)
def test_a_file_that_cannot_be_read_back_is_named_with_the_offset(world: World):
    """strace fails the reads of one file of the artifact while it is hashed."""
    part = world.path(RAW, "part-1")
    inject = [
        "strace",
        "-f",
        "-qq",
        "-o",
        "/dev/null",
        "-P",
        str(part),
        "-e",
        "trace=read",
        "-e",
        "inject=read:error=EIO",
    ]
    done = subprocess.run(inject + world.command(RAW), capture_output=True, text=True, cwd=world.folder)
    assert done.returncode == 1
    assert f"{part}: cannot be read at byte 0: Input/output error" in done.stderr
    assert world.record(RAW) is None
    assert world.build(RAW).built


@pytest.mark.row(5)
def test_every_write_failing_with_a_full_disk_leaves_the_old_or_the_new_artifact(memory_world: World):
    """ENOSPC at each call that writes, one later each time: never half an artifact, and a rerun converges."""
    world = memory_world
    old = world.build(RAW).record
    shutil.copytree(world.folder / "artifacts", world.folder / "old")
    new = world.build(RAW, Parts(salt="new"), force="r0").record
    seen: set[str | None] = set()
    for call in range(1, 100):
        shutil.rmtree(world.folder / "artifacts")
        shutil.copytree(world.folder / "old", world.folder / "artifacts")
        code = in_child(lambda: build_failing_at(world, call))  # noqa: B023
        assert code in (0, 1)
        record = world.record(RAW)
        seen.add(record and record.digest)
        assert record is None or world.verify(RAW).ok
        assert world.build(RAW, Parts(salt="new"), force="r1").record.digest == new.digest
        assert world.verify(RAW).ok
        if code == 0 and call > 50:
            break
    assert seen - {None} == {old.digest, new.digest}


def build_failing_at(world: World, call: int) -> None:
    """A rebuild whose `call`-th writing call finds the disk full."""
    calls = 0

    def fail(name: str, arguments: tuple) -> None:
        nonlocal calls
        calls += name in ("write", "mkdir", "link", "rename", "replace")
        if calls == call and name != "fsync":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with watched(fail):
        world.build(RAW, Parts(salt="new"), force="r1")
