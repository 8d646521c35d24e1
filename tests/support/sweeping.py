"""Calls of `marin-build gc` in a small world, for tests on every kind of store."""

from __future__ import annotations

import logging
import time

import pytest
from artifact_world import Parts, World

from marin_build.artifact import sightings
from marin_build.artifact.gc import Item, Sweeper
from marin_build.artifact.sightings import DAY
from marin_build.errors import Stopped
from marin_build.settings import Settings

VALIDATION = "tokenized/v/2026.06.28"
LOG = logging.getLogger("gc")


class Clock:
    """The clocks that gc reads; `boot` is another one after a restart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self.wall, self.boot = 1000.0, time.time(), "boot"
        monkeypatch.setattr(sightings, "boot_id", lambda: self.boot)
        monkeypatch.setattr(sightings.time, "clock_gettime", lambda clock: self.seconds)
        monkeypatch.setattr(sightings.time, "time", lambda: self.wall)

    def pass_days(self, days: float) -> None:
        self.seconds += days * DAY
        self.wall += days * DAY


def sweeper(world: World, days: float = 7, **settings) -> Sweeper:
    merged = {
        "prefix": world.prefix or str(world.folder / "artifacts"),
        "recipes": str(world.folder / "config"),
        "lease_seconds": 1,
    }
    return Sweeper(world.store, Settings(**{**merged, **settings}), days * DAY, LOG)


def found(world: World, **settings) -> dict[tuple[str, str], Item]:
    return {(item.place, item.what): item for item in sweeper(world, **settings).look()}


def deleted(world: World, days: float = 0, **settings) -> list[Item]:
    sweep = sweeper(world, days, **settings)
    return sweep.delete(sweep.look())


def drop_recipe(world: World, *targets: str) -> None:
    for target in targets:
        (world.folder / "config" / f"{target}.yaml").unlink()


def interrupted(world: World, target: str, parts: int = 3, **options) -> None:
    """A build that is stopped before its third part."""

    def stop(context, number):
        if number == 2:
            raise Stopped("stop")

    with pytest.raises(Stopped):
        world.build(target, Parts(parts, before_part=stop), **options)
