"""The explorer itself: it finds what needs a certain order, walks every order once, and lets nothing go around it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest
from disk import Disk
from explorer import Actor, Bounds, Process, Run, Violation, current_actor, explore, shortest_violation


class Counter:
    """A number in shared memory; adding to it is a read and a write."""

    def __init__(self, work: Callable[[Counter], str], names: str = "AB") -> None:
        self.shared, self._work, self._names = self, work, names
        self.value = 0

    def reset(self) -> None:
        self.value = 0

    def state(self) -> bytes:
        return str(self.value).encode()

    def crash(self, process: Process) -> None:
        pass

    def wake(self, actor: Actor) -> Callable[[], bool]:
        return lambda: False

    def start(self, run: Run) -> None:
        for name in self._names:
            run.add(name, lambda: self._work(self))

    def check(self, run: Run) -> None:
        pass

    def finish(self, run: Run) -> None:
        done = [actor.outcome for actor in run.actors.values()].count("added")
        if self.value < done:
            raise AssertionError(f"{done} added, and the number is {self.value}")

    def step(self, label: str) -> Actor:
        actor = current_actor()
        assert actor is not None
        actor.pause(label)
        return actor


def add_in_two_steps(counter: Counter) -> str:
    actor = counter.step("read")
    seen = counter.value
    actor.note(seen)
    counter.step("write")
    counter.value = seen + 1
    return "added"


def add_in_one_step(counter: Counter) -> str:
    counter.step("add")
    counter.value += 1
    return "added"


def test_a_lost_update_is_found_with_its_shortest_schedule():
    found = shortest_violation(Counter(add_in_two_steps), Bounds(preemptions=2, crashes=0, jumps=0))
    assert str(found).splitlines() == [
        "2 added, and the number is 1",
        "",
        "after this schedule:",
        "A: starts",
        "A: read",
        "B: starts",
        "B: read",
        "B: write",
        "A: write",
        "then a plain run, alone",
    ]


def test_what_is_one_step_holds_in_every_order_and_through_crashes():
    summary = explore(Counter(add_in_one_step, "ABC"), Bounds(crashes=3, jumps=0))
    assert {"A added, B added, C added", "A crashed, B crashed, C crashed"} <= summary.outcomes
    assert len(summary.outcomes) == 8


def test_without_a_change_of_actors_nothing_is_lost():
    assert explore(Counter(add_in_two_steps), Bounds(preemptions=0, crashes=0, jumps=0)).schedules == 2


def test_orders_that_lead_to_one_state_are_walked_on_once():
    summary = explore(Counter(add_in_one_step, "ABCD"), Bounds(crashes=0, jumps=0))
    assert summary.states == 3**4, "each has not started, is about to add, or has added"
    assert summary.schedules < 300, "there are 2,520 orders"


def test_a_world_that_is_not_deterministic_is_refused():
    calls = iter(range(1000))

    def work(counter: Counter) -> str:
        for _ in range(next(calls) % 3 + 1):
            counter.step("one more")
        return "done"

    with pytest.raises(Violation, match="not deterministic"):
        explore(Counter(work))


def test_a_call_that_goes_around_the_explorer_is_found(folder):
    (folder / "initial").mkdir()
    disk = Disk(folder / "shared", folder / "initial")
    around = os.mkdir

    class Sneak(Counter):
        def start(self, run: Run) -> None:
            run.add("A", lambda: str(around(f"{folder}/shared/x")))

    world = Sneak(add_in_one_step)
    world.shared = disk
    with disk.intercepted(), pytest.raises(Violation, match=r"A: os.mkdir .*/shared/x goes around the explorer"):
        explore(world)
    assert subprocess.run(["ls", folder / "shared"], capture_output=True, check=True).stdout == b""
