"""`marin-build du`: the room that artifacts take, what they share, and what a removal would free."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from artifact_world import Parts, World
from sharing import DONOR, TAKER, THIRD, Shards, texts, with_takers
from store_kinds import on, servers, world
from sweeping import interrupted

from marin_build.artifact.store import RECORD
from marin_build.artifact.usage import Report, measure, selected
from marin_build.cli import main
from marin_build.errors import RequestError
from marin_build.recipe.target import parse_target

__all__ = ["servers", "world"]

everywhere = on("disk", "memory", "gs", "s3")
on_disk = on("disk")


def of(report: Report) -> dict[str, Any]:
    return {str(usage.target): usage for usage in report.usages}


def content(files: dict[str, bytes]) -> int:
    return sum(len(data) for data in files.values())


def logs(world: World, target: str) -> int:
    return sum(entry["bytes"] for entry in world.record(target).files if entry.get("outside_digest"))


@everywhere
def test_what_two_artifacts_share_is_shared_in_both_and_counts_once(world: World):
    with_takers(world).build(DONOR, Shards(texts(3)))
    world.build(TAKER, Shards(texts(5)))
    world.build(THIRD, Shards({"alone": b"x" * 999}))
    report = measure(world.store, world.store.named())
    usages = of(report)
    for target, files in ((DONOR, texts(3)), (TAKER, texts(5)), (THIRD, {"alone": b"x" * 999})):
        assert usages[target].recorded == content(files) + logs(world, target)
        assert usages[target].files == len(files) + 1
    assert usages[DONOR].shared == usages[TAKER].shared == content(texts(3))
    assert usages[THIRD].shared == 0
    assert usages[DONOR].freed == usages[DONOR].size - content(texts(3))
    assert usages[THIRD].freed == usages[THIRD].size
    assert report.size == sum(usage.size for usage in report.usages) - content(texts(3))
    assert report.freed == report.size
    assert [str(usage.target) for usage in report.usages] == [TAKER, DONOR, THIRD]
    alone = measure(world.store, [parse_target(DONOR)])
    assert of(alone)[DONOR] == usages[DONOR], "what is shared is known without looking at the others"
    assert alone.freed == usages[DONOR].freed
    pair = measure(world.store, [parse_target(DONOR), parse_target(TAKER)])
    assert pair.freed == pair.size


@on_disk
def test_what_is_freed_is_what_a_removal_frees(world: World):
    with_takers(world).build(DONOR, Shards(texts(3)))
    world.build(TAKER, Shards(texts(5)))
    interrupted(world, THIRD)
    before = measure(world.store, world.store.named())
    promised = of(before)[TAKER].freed
    store, target = world.store, parse_target(TAKER)
    store.remove(target, list(store.listing(target)))
    assert measure(store, store.named()).size == before.size - promised


@everywhere
def test_unfinished_work_and_what_was_replaced_is_not_in_the_record(world: World):
    with_takers(world).build(DONOR, Parts(3))
    whole = of(measure(world.store, [parse_target(DONOR)]))[DONOR]
    interrupted(world, DONOR, force="a run")
    halfway = of(measure(world.store, [parse_target(DONOR)]))[DONOR]
    assert halfway.recorded == whole.recorded
    assert halfway.other > whole.other
    interrupted(world, THIRD)
    begun = of(measure(world.store, [parse_target(THIRD)]))[THIRD]
    assert (begun.recorded, begun.files) == (0, 0)
    assert begun.other == begun.freed > 0


@on_disk
def test_a_record_that_cannot_be_read_is_told_and_its_files_are_counted(world: World):
    with_takers(world).build(DONOR, Shards(texts(3)))
    size = of(measure(world.store, [parse_target(DONOR)]))[DONOR].size
    length = world.path(DONOR, RECORD).stat().st_size
    world.path(DONOR, RECORD).write_bytes(b"x" * length)
    usage = of(measure(world.store, [parse_target(DONOR)]))[DONOR]
    assert "damaged" in usage.problem
    assert usage.other == usage.size == size


@on_disk
def test_what_was_adopted_takes_no_room(world: World, tmp_path: Path):
    from marin_build.adopt import adopt
    from marin_build.settings import Settings

    place = tmp_path / "elsewhere"
    place.mkdir()
    (place / "a").write_bytes(b"x" * 10_000)
    settings = Settings(prefix=str(world.folder / "artifacts"), recipes=str(world.folder / "config"))
    adopt(with_takers(world).store, world.book, settings, str(place), parse_target(DONOR), "there already", [])
    usage = of(measure(world.store, [parse_target(DONOR)]))[DONOR]
    assert (usage.recorded, usage.shared, usage.external) == (10_000, 0, str(place))
    assert usage.freed == usage.size == usage.other < 10_000


@on("memory")
def test_shared_files_that_nothing_names_are_told(world: World):
    with_takers(world).build(DONOR, Shards(texts(3)))
    store, target = world.store, parse_target(DONOR)
    assert measure(store, store.named()).unnamed == 0
    store.remove(target, list(store.listing(target)))
    world.build(TAKER, Shards(texts(1)))
    assert measure(store, store.named()).unnamed == content(texts(3)) - content(texts(1))


@on_disk
def test_targets_are_picked_by_name_front_or_glob(world: World):
    for target in (DONOR, TAKER, "raw/donor/inner/2026.06.28"):
        world.write(target, (world.folder / "config" / "raw/a/2026.06.28.yaml").read_text())
        world.build(target, Parts(1))

    def picked(*patterns: str) -> list[str]:
        return [str(target) for target in selected(world.store, patterns)]

    assert picked() == [DONOR, "raw/donor/inner/2026.06.28", TAKER]
    assert picked(DONOR) == [DONOR]
    assert picked("raw/donor") == picked("raw/donor/") == [DONOR, "raw/donor/inner/2026.06.28"]
    assert picked("*/taker/*", "raw/donor/inner") == ["raw/donor/inner/2026.06.28", TAKER]
    with pytest.raises(
        RequestError, match=r"'raw/don' is nothing that is in .*; there is: raw/donor, raw/donor/inner, "
    ):
        picked("raw/don")


@on_disk
def test_the_command_prints_a_table_and_json(world: World, capsys: pytest.CaptureFixture[str]):
    with_takers(world).build(DONOR, Shards(texts(3)))
    world.build(TAKER, Shards(texts(5)))

    def du(*words: str) -> str:
        assert main(["du", *words]) == 0
        return capsys.readouterr().out

    table = du()
    assert table.index("raw/taker") < table.index("raw/donor")
    assert "freed if removed" in table
    assert "what is shared counted once" in table
    body = json.loads(du("--json", "artifacts/raw/taker"))
    (entry,) = body["artifacts"]
    assert entry["target"] == TAKER
    assert entry["shared_bytes"] == content(texts(3))
    assert body["total"]["bytes"] >= entry["recorded_bytes"]
    assert main(["du", "raw/nothing"]) == 2
    assert "is nothing that is in" in capsys.readouterr().err


@on_disk
def test_one_file_under_hundreds_of_names_counts_once(world: World):
    first = "raw/a/2026.06.28"
    world.build(first, Parts(1))
    for number in range(300):
        copy = world.folder / "artifacts" / "raw" / f"n{number}" / "2026.06.28"
        copy.mkdir(parents=True)
        os.link(world.path(first, "part-0"), copy / "part-0")
    report = measure(world.store, world.store.named())
    assert len(report.usages) == 301
    assert report.size == report.freed == of(report)[first].size
