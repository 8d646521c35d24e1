"""The protocol of an object store keeps its invariant in every schedule, with and without preconditions."""

from __future__ import annotations

from pathlib import Path

import pytest
from explorer import Bounds, explore
from scenarios import CRASH, EVERYTHING, LOST, OBJECTS, PAUSE, Scenario

NAMES = {CRASH: "a crash", PAUSE: "a pause", LOST: "a lost answer"}
QUICK = [pytest.param(s, bounds, id=f"{NAMES[bounds]}: {s}") for s in OBJECTS for bounds in s.quick]


@pytest.mark.parametrize(("scenario", "bounds"), QUICK)
def test_the_invariant_holds_through(folder: Path, scenario: Scenario, bounds: Bounds):
    with scenario.world(folder) as world:
        summary = explore(world, bounds)
    print(summary)
    assert summary.ends > 0


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("bounds", [CRASH, PAUSE, LOST, EVERYTHING], ids=str)
@pytest.mark.parametrize("scenario", OBJECTS, ids=str)
def test_the_invariant_holds_by_name_through(folder: Path, scenario: Scenario, bounds: Bounds):
    with scenario.world(folder) as world:
        print(explore(world, bounds))
