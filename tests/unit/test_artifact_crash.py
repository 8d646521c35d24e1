"""Killed anywhere: at each call that changes something, a builder dies by SIGKILL; then one plain rerun converges.

At every such instant a reader sees nothing, the old complete artifact or the new complete one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from artifact_world import RAW, RAW_DEV, TOKENIZER, TOKENS, Parts, World, killed_at, watched
from sharing import DONOR, TAKER, Shards, texts, with_takers

from marin_build.artifact.accept import accept
from marin_build.artifact.examine import State
from marin_build.errors import Stopped
from marin_build.recipe.target import parse_target

MAX_CALLS = 400
CLEAN = {".artifact.json", ".attempt.json", "logs", "part-0", "part-1", "part-2"}


@pytest.fixture
def world(memory_world: World) -> World:
    return memory_world


def parts_with_a_folder(salt: str = "") -> Callable[[Any], Any]:
    """Two files at the top and two in a folder, so that a rebuild replaces both."""
    inner = Parts(2, salt=salt)

    def build(context):
        for number in range(2):
            path = context.folder / "inside" / f"{number}"
            if not path.exists():
                path.parent.mkdir(exist_ok=True)
                temporary = path.with_suffix(".tmp")
                temporary.write_text(f"{context.fingerprint} {salt} {number}")
                os.replace(temporary, path)
        return inner(context)

    return build


def kill_everywhere(
    world: World, prepare: Callable[[], None], act: Callable[[], Any], check: Callable[[], None]
) -> int:
    """Run `act` again and again from the same start, killed one call later each time; how often it was killed."""
    for call in range(1, MAX_CALLS):
        shutil.rmtree(world.folder / "artifacts", ignore_errors=True)
        shutil.rmtree(world.folder / ".marin", ignore_errors=True)
        prepare()
        code = killed_at(call, act)
        assert code in (0, -signal.SIGKILL), (call, code)
        check()
        if code == 0:
            return call - 1
    raise AssertionError("the work never ended")


def assert_whole_or_nothing(world: World, target: str, *digests: str) -> str | None:
    """What a reader finds: nothing, or one of the complete artifacts, every byte of it."""
    record = world.record(target)
    if record is not None:
        report = world.verify(target)
        assert report.ok, report.problems
        assert record.digest in digests
    return record.digest if record else None


def snapshot(world: World, to: Path) -> None:
    shutil.copytree(world.folder / "artifacts", to)


def restore(world: World, snapshot: Path) -> None:
    shutil.copytree(snapshot, world.folder / "artifacts", dirs_exist_ok=True)


@pytest.mark.row(1)
def test_a_first_build_killed_anywhere_is_resumed_by_a_plain_rerun(world: World):
    digest = world.build(RAW).record.digest
    seen = set()

    def check() -> None:
        seen.add(assert_whole_or_nothing(world, RAW, digest))
        assert world.build(RAW).record.digest == digest
        assert world.verify(RAW).ok
        assert world.verify(RAW).foreign == ()
        assert world.files(RAW) - {".lock"} == CLEAN

    kills = kill_everywhere(world, lambda: None, lambda: world.build(RAW), check)
    assert kills > 30
    assert seen == {None, digest}


@pytest.mark.row(1)
def test_a_build_that_takes_files_over_killed_anywhere_hurts_no_donor_and_is_resumed(world: World, tmp_path: Path):
    with_takers(world).build(DONOR, Shards(texts(2)))
    snapshot(world, tmp_path / "donor")
    digest = world.build(TAKER, Shards(texts(3))).record.digest
    seen = set()

    def check() -> None:
        seen.add(assert_whole_or_nothing(world, TAKER, digest))
        assert world.verify(DONOR).ok
        outcome = world.build(TAKER, Shards(texts(3)))
        assert outcome.record.digest == digest
        assert world.path(TAKER, "shard-1").stat().st_ino == world.path(DONOR, "shard-1").stat().st_ino
        for target in (DONOR, TAKER):
            assert world.verify(target).ok
            assert world.verify(target).foreign == ()
        assert world.files(TAKER) - {".lock"} == {".artifact.json", ".attempt.json", "logs", *texts(3)}

    kills = kill_everywhere(
        world,
        lambda: restore(world, tmp_path / "donor"),
        lambda: world.build(TAKER, Shards(texts(3))),
        check,
    )
    assert kills > 30
    assert seen == {None, digest}


@pytest.mark.parametrize("edited", [False, True], ids=["same recipe", "edited recipe"])
@pytest.mark.row(1)
def test_a_forced_rebuild_killed_anywhere_leaves_the_old_or_the_new_and_goes_on(
    world: World, tmp_path: Path, edited: bool
):
    old = world.build(RAW, parts_with_a_folder()).record
    world.path(RAW, "notes.txt").write_text("a foreign file")
    snapshot(world, tmp_path / "old")
    if edited:
        world.edit(RAW, "quickstart", "dclm_smoke")
    new = world.build(RAW, parts_with_a_folder("new"), force="r0").record
    assert new.digest != old.digest
    seen = set()

    def check() -> None:
        seen.add(assert_whole_or_nothing(world, RAW, old.digest, new.digest))
        status = world.status(RAW)
        begun = status.state is State.partial or (status.record is not None and status.record.digest == new.digest)
        # Before a rebuild leaves its first trace, a plain run of an edited recipe is still refused: force it again.
        outcome = world.build(RAW, parts_with_a_folder("new"), force=None if begun else "r1")
        assert outcome.record.digest == new.digest
        assert world.verify(RAW).ok
        assert world.verify(RAW).foreign == ("notes.txt",)
        assert world.files(RAW) - {".lock"} == {
            ".artifact.json",
            ".attempt.json",
            "logs",
            "part-0",
            "part-1",
            "inside",
            "notes.txt",
        }
        assert world.status(RAW).state is State.finished

    kills = kill_everywhere(
        world,
        lambda: restore(world, tmp_path / "old"),
        lambda: world.build(RAW, parts_with_a_folder("new"), force="r1"),
        check,
    )
    assert kills > 45
    assert seen == {None, old.digest, new.digest}


@pytest.mark.row(1)
def test_a_swap_that_is_killed_twice_still_goes_on(world: World, tmp_path: Path):
    old = world.build(RAW, parts_with_a_folder()).record
    staged = tmp_path / "staged"

    class Enough(Exception):
        pass

    def stop_before_the_swap(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "rename" and str(arguments[1]).endswith("replaced.json"):
            snapshot(world, staged)
            (staged / RAW / ".lease.json").unlink()
            raise Enough

    with pytest.raises(Enough), watched(stop_before_the_swap):
        world.build(RAW, parts_with_a_folder("new"), force="r1")
    shutil.rmtree(world.folder / "artifacts")
    restore(world, staged)
    assert world.record(RAW) == old
    halves = 0
    for first in range(1, 60):
        shutil.rmtree(world.folder / "artifacts")
        restore(world, staged)
        if killed_at(first, lambda: world.build(RAW, parts_with_a_folder("new"))) == 0:
            break
        for second in (1, 5, 9, 13, 17):
            killed_at(second, lambda: world.build(RAW, parts_with_a_folder("new")))
            halves += assert_whole_or_nothing(world, RAW, old.digest, digest_of_new(world)) is None
        assert world.build(RAW, parts_with_a_folder("new")).record.provenance["forced"] == "r1"
        assert world.verify(RAW).ok
        assert ".rebuild" not in world.files(RAW)
    assert halves > 5


def digest_of_new(world: World) -> str:
    found = world.record(RAW)
    if found is not None:
        return found.digest
    staged = world.path(RAW, ".rebuild/.artifact.json")
    return json.loads(staged.read_text())["digest"] if staged.exists() else ""


def test_a_dev_rebuild_killed_anywhere_converges(world: World, tmp_path: Path):
    old = world.build(RAW_DEV).record
    snapshot(world, tmp_path / "old")
    world.edit(RAW_DEV, "quickstart", "dclm_smoke")
    new = world.build(RAW_DEV).record

    def check() -> None:
        assert_whole_or_nothing(world, RAW_DEV, old.digest, new.digest)
        assert world.build(RAW_DEV).record.digest == new.digest
        assert world.files(RAW_DEV) - {".lock"} == CLEAN

    kill_everywhere(world, lambda: restore(world, tmp_path / "old"), lambda: world.build(RAW_DEV), check)


def test_work_set_aside_or_dropped_is_never_resumed_when_killed_half_way(world: World, tmp_path: Path):
    """Force on unfinished work of another recipe: killed while the old work is removed, no old byte may survive."""

    def stop_early(context):
        Parts(2)(context)
        raise Stopped("pre-empted")

    with pytest.raises(Stopped):
        world.build(RAW, stop_early)
    snapshot(world, tmp_path / "old")
    world.edit(RAW, "quickstart", "dclm_smoke")
    digest = world.build(RAW, force="r0").record.digest

    def check() -> None:
        assert_whole_or_nothing(world, RAW, digest)
        drifted = world.status(RAW).state is State.drifted
        assert world.build(RAW, force="r1" if drifted else None).record.digest == digest
        assert world.verify(RAW).ok

    kill_everywhere(world, lambda: restore(world, tmp_path / "old"), lambda: world.build(RAW, force="r1"), check)


def pair(stop_after: int = 2) -> Callable[[Any], Any]:
    """A builder that believes what it finds: two files belong together, and one without the other spoils the bytes."""

    def build(context):
        there = sorted(name for name in ("a", "b") if (context.folder / name).exists())
        spoilt = f"only {there} was there" if len(there) == 1 else ""
        if not there:
            for name in ("a", "b")[:stop_after]:
                (context.folder / name).write_text(context.fingerprint)
        Parts(1, salt=spoilt)(context)
        if stop_after < 3:
            raise Stopped("pre-empted")
        return Parts(1)(context)

    return build


@pytest.mark.parametrize("beside", [False, True], ids=["in place", "beside a finished one"])
def test_half_removed_work_of_the_same_recipe_is_never_believed(world: World, tmp_path: Path, beside: bool):
    """Forced again from nothing, and killed while the unfinished work of an earlier attempt is removed."""
    if beside:
        world.build(RAW)
    with pytest.raises(Stopped):
        world.build(RAW, pair(), force="r1" if beside else None)
    snapshot(world, tmp_path / "old")
    digest = world.build(RAW, pair(3), force="r2").record.digest

    def check() -> None:
        status = world.status(RAW)
        outcome = world.build(RAW, pair(3), force="r3" if status.state is State.finished else None)
        assert outcome.record.digest == digest
        assert world.verify(RAW).ok

    kill_everywhere(
        world, lambda: restore(world, tmp_path / "old"), lambda: world.build(RAW, pair(3), force="r2"), check
    )


def test_a_repair_killed_anywhere_converges_to_the_same_bytes(world: World, tmp_path: Path):
    digest = world.build(RAW).record.digest
    os.truncate(world.path(RAW, "part-1"), 3)
    snapshot(world, tmp_path / "damaged")

    def check() -> None:
        record = world.record(RAW)
        assert record is None or world.status(RAW).state in (State.damaged, State.finished)
        assert world.build(RAW).record.digest == digest
        assert world.verify(RAW).ok

    kills = kill_everywhere(world, lambda: restore(world, tmp_path / "damaged"), lambda: world.build(RAW), check)
    assert kills > 20


def test_accepting_killed_anywhere_leaves_the_old_record_or_the_new_one(world: World, tmp_path: Path):
    world.build(RAW)
    snapshot(world, tmp_path / "old")
    world.edit(RAW, "quickstart", "dclm_smoke")
    states = set()

    def check() -> None:
        states.add(world.status(RAW).state)
        assert world.verify(RAW).ok

    kill_everywhere(
        world,
        lambda: restore(world, tmp_path / "old"),
        lambda: accept(world.store, world.book, parse_target(RAW), "the same text"),
        check,
    )
    assert states == {State.drifted, State.finished}


def test_marking_damage_killed_anywhere_leaves_a_readable_record(world: World, tmp_path: Path):
    world.build(RAW)
    data = world.path(RAW, "part-1").read_bytes()
    world.path(RAW, "part-1").write_bytes(data[:-1] + b"?")
    snapshot(world, tmp_path / "flipped")
    states = set()
    kill_everywhere(
        world,
        lambda: restore(world, tmp_path / "flipped"),
        lambda: world.verify(RAW),
        lambda: states.add(world.status(RAW).state),
    )
    assert states == {State.finished, State.damaged}


# ---- what a power cut would leave -----------------------------------------------------------------------------------


@dataclasses.dataclass
class DurableOrder:
    """Follows file functions, and knows which files and folders have changes that are not on disk yet."""

    top: str
    open_files: dict[int, str] = dataclasses.field(default_factory=dict)
    unsynced: set[str] = dataclasses.field(default_factory=set)
    at_record: list[set[str]] = dataclasses.field(default_factory=list)

    def see(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name == "fsync":
            self.unsynced.discard(os.readlink(f"/proc/self/fd/{arguments[0]}"))
        elif name == "write":
            self.unsynced.add(os.readlink(f"/proc/self/fd/{arguments[0]}"))
        elif name in ("replace", "rename", "link"):
            source, destination = (os.fspath(path) for path in arguments[:2])
            if os.path.basename(destination) == ".artifact.json":
                self.at_record.append({path for path in self.unsynced if path.startswith(self.top)})
            if source in self.unsynced:
                self.unsynced.add(destination)
            self.unsynced |= {os.path.dirname(source), os.path.dirname(destination)}
        elif name in ("mkdir", "unlink", "rmdir") and isinstance(arguments[0], str | os.PathLike):
            self.unsynced.add(os.path.dirname(os.fspath(arguments[0])))


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.row(34)
def test_all_that_a_record_implies_is_on_disk_before_the_record(world: World, forced: bool):
    """A record that survives a power cut implies that its files do: each is synced, and the folders that name them."""
    if forced:
        world.build(RAW, parts_with_a_folder())
    order = DurableOrder(str(world.path(RAW, ".").parent / "2026.06.28"))

    def build(context):
        result = parts_with_a_folder("new")(context)
        for folder, _, names in os.walk(context.folder):
            order.unsynced |= {folder, *(os.path.join(folder, name) for name in names)}
        return result

    with watched(order.see):
        world.build(RAW, build, force="r1" if forced else None)
    own = (".lease.json", ".attempt.json", ".lock", ".tmp")
    assert len(order.at_record) == (2 if forced else 1)
    for unsynced in order.at_record:
        content = {path for path in unsynced if not path.endswith(own) and ".artifact.json" not in path}
        folders_of_the_record_itself = {
            str(world.path(RAW, ".").parent / "2026.06.28"),
            str(world.path(RAW, ".rebuild")),
        }
        assert content - folders_of_the_record_itself == set()


# ---- real system calls ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize("call", ["fsync", "rename", "unlink", "mkdir"])
@pytest.mark.row(1)
def test_a_process_killed_inside_a_system_call_converges(world: World, call: str):
    """The same from outside: strace kills the process as it enters the n-th call, threads included."""
    world.build(TOKENIZER)
    world.build(RAW)
    expected = world.build(TOKENS).record.digest
    killed = 0
    for when in (1, 2, 3, 5, 8, 13):
        shutil.rmtree(world.path(TOKENS))
        inject = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}"]
        inject += ["-e", f"inject={call}:signal=KILL:when={when}"]
        done = subprocess.run(inject + world.command(TOKENS), capture_output=True, text=True, cwd=world.folder)
        killed += done.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)
        assert_whole_or_nothing(world, TOKENS, expected)
        assert world.build(TOKENS).record.digest == expected
        assert world.verify(TOKENS).ok
        if done.returncode == 0:
            break
    assert killed > 0, done.stderr
