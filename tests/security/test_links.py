"""Links below the prefix: one that leads out of it is damage, and nothing is read, written or deleted behind it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from artifact_world import RAW, RAW_DEV, TOKENS, World

from marin_build.artifact.context import BuildContext, BuildResult
from marin_build.artifact.examine import State
from marin_build.artifact.record import read_record
from marin_build.artifact.store import open_store
from marin_build.errors import DamageError, MarinError
from marin_build.recipe.target import parse_target

TARGET = parse_target(RAW)


def in_folders(context: BuildContext) -> BuildResult:
    for name in ("sub/a", "sub/b", "c"):
        (context.folder / name).parent.mkdir(exist_ok=True)
        (context.folder / name).write_text(f"{name} {context.fingerprint}")
    return BuildResult()


@pytest.fixture
def outside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of somebody's, which has to stay as it is."""
    folder = tmp_path_factory.mktemp("outside") / "folder"
    folder.mkdir()
    for name in ("a", "b", "mine.txt", ".artifact.json", ".lease.json", "x.tmp", ".y.tmp"):
        (folder / name).write_text("mine")
    return folder


def untouched(outside: Path) -> bool:
    names = {"a", "b", "mine.txt", ".artifact.json", ".lease.json", "x.tmp", ".y.tmp"}
    return set(os.listdir(outside)) == names and all((outside / name).read_text() == "mine" for name in names)


def link_file(world: World, outside: Path) -> None:
    text = world.path(RAW, "sub/a").read_text()
    world.path(RAW, "sub/a").unlink()
    (outside.parent / "same").write_text(text)
    world.path(RAW, "sub/a").symlink_to(outside.parent / "same")


def link_folder(world: World, outside: Path) -> None:
    real = world.path(RAW, "sub")
    elsewhere = outside.parent / "sub"
    real.rename(elsewhere)
    real.symlink_to(elsewhere)


@pytest.mark.parametrize("make", [link_file, link_folder])
def test_a_file_behind_a_link_out_is_a_problem_although_its_bytes_are_right(
    world: World, outside: Path, make: Callable[[World, Path], None]
):
    world.build(RAW, in_folders)
    make(world, outside)
    for full in (False, True):
        report = world.verify(RAW, full=full)
        assert [problem.path for problem in report.problems][:1] == ["sub/a"]
        assert "is a link out of the prefix, to " in report.problems[0].problem
        assert "marin-build adopt" in report.problems[0].problem
    assert world.status(RAW).state is State.damaged


def test_a_repair_moves_the_link_away_and_not_what_is_behind_it(world: World, outside: Path):
    world.build(RAW, in_folders)
    link_folder(world, outside)
    assert world.build(RAW, in_folders).built
    assert sorted(os.listdir(outside.parent / "sub")) == ["a", "b"]
    assert not world.path(RAW, "sub").is_symlink()
    assert world.verify(RAW).ok


def test_links_within_the_prefix_and_a_linked_prefix_are_followed(world: World, tmp_path: Path):
    world.build(RAW, in_folders)
    world.path(RAW, "sub").rename(world.store.prefix / "moved")
    world.path(RAW, "sub").symlink_to("../../../moved")
    assert world.verify(RAW).ok
    (tmp_path / "linked").symlink_to(world.store.prefix)
    record = read_record(open_store(tmp_path / "linked"), TARGET)
    assert record
    assert open_store(tmp_path / "linked").files(record).size("sub/a")


@pytest.mark.parametrize("name", ["raw", "raw/a", RAW])
def test_a_linked_target_is_damaged_and_nothing_is_built_behind_the_link(world: World, outside: Path, name: str):
    place = world.store.prefix / name
    place.parent.mkdir(parents=True)
    outside = outside.parent / "empty"
    outside.mkdir()
    place.symlink_to(outside)
    (outside / RAW.removeprefix(name).strip("/")).mkdir(parents=True, exist_ok=True)
    (outside / RAW.removeprefix(name).strip("/") / ".artifact.json").write_text("mine")
    before = sorted(path for path in outside.rglob("*"))
    assert world.status(RAW).state is State.damaged
    assert "leads out of the prefix" in world.status(RAW).reasons[0]
    for force in (None, "run"):
        with pytest.raises(
            DamageError, match=r"leads out of the prefix, to .*\n  remove the link; .*marin-build adopt"
        ):
            world.build(RAW, force=force)
    assert sorted(path for path in outside.rglob("*")) == before


@pytest.mark.parametrize("name", ["logs", ".rebuild", ".aside", "sub", "part-0"])
@pytest.mark.parametrize("state", ["nothing", "finished", "damaged", "partial"])
@pytest.mark.parametrize("force", [None, "run"])
def test_builders_and_deletions_follow_no_link(world: World, outside: Path, name: str, state: str, force: str | None):
    def fail(context: BuildContext) -> BuildResult:
        in_folders(context)
        raise MarinError("stopped")

    if state in ("finished", "damaged"):
        world.build(RAW, in_folders)
    if state == "damaged":
        world.path(RAW, "c").unlink()
    if state == "partial":
        with pytest.raises(MarinError):
            world.build(RAW, fail)
    place = world.path(RAW, name)
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.is_dir():
        place.rename(outside.parent / f"old-{name}")
    place.symlink_to(outside / "mine.txt" if "." in name[1:] or "part" in name else outside)
    with contextlib.suppress(MarinError):
        world.build(RAW, in_folders, force=force)
    assert untouched(outside)


def test_a_rebuild_deletes_nothing_behind_a_link(world: World, outside: Path):
    world.build(RAW, in_folders)
    link_folder(world, outside)

    def others(context: BuildContext) -> BuildResult:
        (context.folder / "new").write_text("new")
        return BuildResult()

    world.build(RAW, others, force="run")
    assert sorted(os.listdir(outside.parent / "sub")) == ["a", "b"]


def test_a_dependency_behind_a_link_out_is_not_read(world: World, outside: Path):
    world.build(RAW, in_folders)
    world.build("tokenizers/t/2026.06.28")
    link_folder(world, outside)
    with pytest.raises(DamageError, match=r"its dependency raw/a/2026\.06\.28 is damaged: sub/a: is a link out"):
        world.build(TOKENS)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
@pytest.mark.parametrize("name", [".artifact.json", ".attempt.json", ".lease.json"])
def test_a_small_file_that_is_none_is_damage_and_nobody_waits_for_it(
    world: World, name: str, make: Callable[[Path], None]
):
    path = world.path(RAW_DEV, name)
    path.parent.mkdir(parents=True)
    make(path)
    with pytest.raises(MarinError, match=r"is no plain file|is a link|Is a directory"):
        world.store.read(parse_target(RAW_DEV), name)
    with contextlib.suppress(MarinError):
        world.build(RAW_DEV)


def test_housekeeping_removes_a_link_and_not_what_is_behind_it(world: World, outside: Path):
    world.build(RAW, in_folders)
    world.path(RAW, "linked").symlink_to(outside)
    world.store.remove(TARGET, ["linked/mine.txt"])
    assert untouched(outside)
    assert not os.path.lexists(world.path(RAW, "linked"))


def test_the_guard_does_not_hide_ordinary_damage(world: World):
    world.build(RAW, in_folders)
    world.path(RAW, "sub/a").write_bytes(b"x" * world.path(RAW, "sub/a").stat().st_size)
    assert [problem.path for problem in world.verify(RAW, full=True).problems] == ["sub/a"]
