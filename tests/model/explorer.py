"""A deterministic explorer: every interleaving of a few actors, with crashes and the passing of time, by replay.

Each actor is a thread that runs real code; one runs at a time. Before an operation on shared state it calls `pause`,
and there the explorer decides what happens next: a step of any actor, the crash of a process, or a jump of the clock.
The walk is depth first. A schedule is replayed from the start up to its last decision; a schedule that reaches a
state seen before ends there. A state is what is shared, and all that each living actor has observed: actors are
deterministic, so their observations stand for their memory, and steps that commute lead to one state.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from marin_build.errors import MarinError

CPU_SECONDS = time.process_time
LONG_SECONDS = 1000.0
"""How far the clock jumps: longer than every lease and every wait for a lock."""
MAX_FREE_JUMPS = 20
"""Jumps of the clock while nobody can do anything else; more mean that somebody waits for ever."""


class Crashed(BaseException):
    """Raised in an actor that no longer exists, at whatever it does."""


class Violation(AssertionError):
    """The invariant does not hold. The message is the schedule, one operation a line."""


class Shared(Protocol):
    """The state that actors share."""

    def reset(self) -> None:
        """As before the first step of a schedule."""

    def state(self) -> bytes:
        """A digest of all of it."""

    def crash(self, process: Process) -> None:
        """What the system does when a process ends: its locks are free."""

    def wake(self, actor: Actor) -> Callable[[], bool]:
        """When an actor that goes to sleep now has a reason to look again before time has passed."""


class World(Protocol):
    """What one schedule is made of."""

    shared: Shared

    def start(self, run: Run) -> None:
        """Add the actors."""

    def check(self, run: Run) -> None:
        """Raise AssertionError unless the invariant holds in this state."""

    def finish(self, run: Run) -> None:
        """The same when nobody does anything any more."""


@dataclass
class Process:
    """What crashes as one: one or more actors."""

    name: str
    pid: int
    host: str
    alive: bool = True
    beats: int = 0
    """Heartbeats that it may still make."""


class Actor:
    """One thread of a process."""

    def __init__(self, run: Run, process: Process, name: str, work: Callable[[], Any], background: bool) -> None:
        self.run, self.process, self.name, self.background = run, process, name, background
        self.over = False
        self.outcome = ""
        self.label = "starts"
        self.ready: Callable[[], bool] | None = None
        self.observed = b""
        self.counter = 0
        self.writes = 0
        """How often it wrote an object."""
        self.can_lose = False
        """Whether the answer to the request that it is about to make can be lost."""
        self.loses = False
        self.blocked_on: str | None = None
        """The lock that it just found taken."""
        self.before_lock = b""
        """What it had observed before it tried: a failed try is forgotten."""
        self._work = work
        self._turn = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._live, daemon=True)
        self.thread.start()

    def can_step(self) -> bool:
        return self.process.alive and not self.over and (self.ready is None or self.ready())

    def note(self, *observations: object) -> None:
        """Remember what this actor saw: from here on it may depend on that."""
        self.observed = hashlib.blake2b(repr(observations).encode(), key=self.observed, digest_size=16).digest()

    def pause(self, label: str, ready: Callable[[], bool] | None = None, *, may_lose_its_answer: bool = False) -> bool:
        """Let others go first, in every possible way. `ready` says when the step may be taken; None means always.

        True when the explorer lets the answer of this step be lost.
        """
        if self.run.over or not self.process.alive:
            raise Crashed
        self.label, self.ready, self.can_lose, self.loses = label, ready, may_lose_its_answer, False
        self.run.decide(self)
        self.ready, self.can_lose = None, False
        return self.loses

    def resume(self) -> None:
        self._turn.release()

    def wait_for_turn(self) -> None:
        self._turn.acquire()
        if self.run.over or not self.process.alive:
            raise Crashed

    def _live(self) -> None:
        _here.actor = self
        try:
            self._act()
        except BaseException as error:
            self.run.break_off(error)

    def _act(self) -> None:
        try:
            self.wait_for_turn()
            self.outcome = str(self._work())
        except Crashed:
            return
        except Exception as error:
            self.outcome = type(error).__name__
            self.run.explain(self, error)
        self.over = True
        self.run.ended(self)
        self.run.decide(self)


_here = threading.local()


def current_actor() -> Actor | None:
    """The actor that runs this code; None outside of a schedule."""
    return getattr(_here, "actor", None)


def is_modelled() -> bool:
    """False in threads of libraries that know nothing of a schedule."""
    return current_actor() is not None or hasattr(_here, "run")


def current_run() -> Run:
    """The schedule that this code runs in, or after."""
    actor = current_actor()
    run: Run = actor.run if actor else _here.run
    return run


def violate(message: str) -> None:
    """Say that the actor that runs just now broke the invariant, whatever it makes of the error itself.

    Raises:
        AssertionError: always.
    """
    current_run().violation = message
    raise AssertionError(message)


@contextmanager
def outside(run: Run) -> Iterator[None]:
    """What runs inside belongs to the explorer and to no actor."""
    before = current_actor()
    _here.actor, _here.run = None, run
    try:
        yield
    finally:
        _here.actor = before


Choice = tuple[str, str]
"""("step", actor), ("crash", process), ("time", ""), ("pause", actor): time passes, then that actor's step;
("lose", actor): its step, whose answer is lost."""


@dataclass(frozen=True)
class Bounds:
    """How much may happen in one schedule. None: as much as there is."""

    preemptions: int | None = None
    """Changes from an actor that could go on to another one."""
    crashes: int = 1
    jumps: int = 1
    """Jumps of the clock; those while everybody waits come free."""
    lost_answers: int = 0
    """Writes to a store whose answer is lost."""
    only_pauses: bool = False
    """Let the clock jump only while one actor is paused for another one, not at any moment."""


@dataclass
class Summary:
    """What one walk saw."""

    schedules: int = 0
    states: int = 0
    ends: int = 0
    """Distinct states in which nobody could do anything any more."""
    steps: int = 0
    longest: int = 0
    cpu_seconds: float = 0.0
    outcomes: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        return (
            f"{self.schedules:,} schedules, {self.states:,} states, {self.ends:,} ends, {self.steps:,} steps, "
            f"longest {self.longest}, {self.cpu_seconds:.1f} CPU-seconds"
        )


class Run:
    """One schedule."""

    def __init__(self, world: World, choose: Callable[[Run, list[Choice]], Choice | None], bounds: Bounds) -> None:
        self.world, self._choose = world, choose
        self.crashes, self.jumps, self.preemptions = bounds.crashes, bounds.jumps, bounds.preemptions
        self._only_pauses, self.lost_answers = bounds.only_pauses, bounds.lost_answers
        self.clock = 0.0
        self.free_jumps = 0
        self.rerun_host = "here"
        """Where the plain run happens that follows a schedule."""
        self.rerun_counter = 0
        self.over = False
        self.current: Actor | None = None
        self.actors: dict[str, Actor] = {}
        self.processes: dict[str, Process] = {}
        self.trace: list[str] = []
        self.shared_state = b""
        """State of what is shared, at the last decision."""
        self.are_alike = False
        """Whether all actors do the same, so that it does not matter which one begins."""
        self.violation: str | None = None
        self._ended = threading.Semaphore(0)

    def add(self, name: str, work: Callable[[], Any], *, host: str = "here", beats: int = 0) -> None:
        """A process with one actor of the same name."""
        process = self.processes[name] = Process(name, 1000 + len(self.processes), host, beats=beats)
        self.actors[name] = Actor(self, process, name, work, background=False)

    def add_background(self, process: Process, name: str, work: Callable[[], Any]) -> None:
        """One more actor of a process; it ends with the process's own."""
        self.actors[name] = Actor(self, process, name, work, background=True)

    def go(self) -> None:
        """Run the schedule to its end, and take all that it left apart."""
        self.world.shared.reset()
        self.world.start(self)
        try:
            self.decide(None)
            self._ended.acquire()
        finally:
            self.over = True
            for actor in self.actors.values():
                actor.resume()
                actor.thread.join()

    def break_off(self, error: BaseException) -> None:
        """End the schedule for an error of the explorer itself."""
        self.violation = "".join(traceback.format_exception(error))
        self._ended.release()

    def ended(self, actor: Actor) -> None:
        """An actor has done all its work; with the last of the foreground its process ends."""
        if not actor.background:
            with outside(self):
                actor.process.alive = False
                self.world.shared.crash(actor.process)

    def decide(self, me: Actor | None) -> None:
        """Do what the explorer chooses until it is a step of `me`; others run meanwhile."""
        while True:
            try:
                with outside(self):
                    choice = self._choose(self, self._choices())
            except Exception as error:
                self.violation = explained(error)
                choice = None
            if choice is None:
                self._ended.release()
                break
            with outside(self):
                actor = self._happen(*choice)
            if actor is me and me is not None:
                return
            if actor is not None:
                actor.resume()
                break
        if me is not None and not me.over:
            me.wait_for_turn()

    def _happen(self, kind: str, name: str) -> Actor | None:
        """Bring about a choice; the actor whose step it is, if it is one."""
        if kind == "crash":
            self.crashes -= 1
            self.processes[name].alive = False
            self.world.shared.crash(self.processes[name])
            self.trace.append(f"{name}: ✗ crashes before: {self.actors[name].label}")
            return None
        if kind in ("time", "pause"):
            if any(actor.can_step() for actor in self.actors.values()):
                self.jumps -= 1
            else:
                self.free_jumps += 1
            self.clock += LONG_SECONDS
            self.trace.append("time passes")
        if kind == "time":
            return None
        actor = self.actors[name]
        if self.current is not actor and self._could_go_on() and self.preemptions is not None:
            self.preemptions -= 1
        self.current = actor
        actor.loses = kind == "lose"
        self.lost_answers -= actor.loses
        self.trace.append(f"{name}: {actor.label}{' ✗ its answer is lost' if actor.loses else ''}")
        return actor

    def _could_go_on(self) -> bool:
        return self.current is not None and self.current.can_step()

    def _choices(self) -> list[Choice]:
        """What may happen now. The actor that ran last comes first, so that the first schedules are the plainest."""
        able = [actor for actor in self.actors.values() if actor.can_step()]
        able.sort(key=lambda actor: actor is not self.current)
        if (self._could_go_on() and self.preemptions == 0) or (self.current is None and self.are_alike):
            able = able[:1]
        found = [("step", actor.name) for actor in able]
        if self.lost_answers:
            found += [("lose", actor.name) for actor in able if actor.can_lose]
        busy = [process.name for process in self.processes.values() if process.alive]
        if self.crashes:
            found += [("crash", name) for name in busy]
        if busy and (not able or (self.jumps and not self._only_pauses)):
            found.append(("time", ""))
        elif self.jumps and self._could_go_on():
            found += [("pause", actor.name) for actor in able if actor is not self.current]
        assert able or not busy or self.free_jumps < MAX_FREE_JUMPS, f"{', '.join(busy)} cannot go on, however long"
        return found

    def explain(self, actor: Actor, error: Exception) -> None:
        """Note how an actor failed; something else than an error for people is a violation by itself."""
        self.trace.append(f"{actor.name}: raised {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        if not isinstance(error, MarinError) and self.violation is None:
            self.violation = explained(error)

    def state(self) -> bytes:
        """What everything that may still happen follows from."""
        memories = [
            (actor.name, actor.observed, actor.label, actor.over)
            if actor.process.alive
            else (actor.name, actor.outcome if actor.over else "gone")
            for actor in self.actors.values()
        ]
        self.shared_state = self.world.shared.state()
        parts = (self.shared_state, memories, self.clock, self.crashes, self.jumps, self.lost_answers, self._beats())
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()

    def _beats(self) -> list[int]:
        return [process.beats for process in self.processes.values() if process.alive]

    def outcomes(self) -> str:
        ends = {name: self.actors[name].outcome or "crashed" for name in self.processes}
        return ", ".join(f"{name} {outcome}" for name, outcome in ends.items())


@dataclass
class _Fork:
    """A decision of the current schedule: what may happen there, and which of it is being tried."""

    choices: list[Choice]
    tried: int = 0

    @property
    def choice(self) -> Choice:
        return self.choices[self.tried]


def explore(world: World, bounds: Bounds | None = None) -> Summary:
    """Walk through every schedule of `world` within `bounds`.

    Raises:
        Violation: the invariant does not hold in some state, or an actor failed in a way it must not.
    """
    walk = _Walk(world, bounds or Bounds())
    began = CPU_SECONDS()
    while walk.next_schedule():
        pass
    walk.summary.cpu_seconds = CPU_SECONDS() - began
    return walk.summary


def shortest_violation(world: World, bounds: Bounds) -> Violation | None:
    """The violation within `bounds` that needs the fewest changes between actors; None where there is none."""
    for preemptions in range((bounds.preemptions or 0) + 1):
        try:
            explore(world, dataclasses.replace(bounds, preemptions=preemptions))
        except Violation as found:
            return found
    return None


class _Walk:
    def __init__(self, world: World, bounds: Bounds) -> None:
        self.world, self.bounds = world, bounds
        self.summary = Summary()
        self._forks: list[_Fork] = []
        self._depth = 0
        self._seen: dict[bytes, int] = {}
        """Each state, and how many preemptions were left when it was walked on from."""
        self._ends: set[bytes] = set()

    def next_schedule(self) -> bool:
        """Run the next schedule; False when there is none."""
        self._depth = 0
        run = Run(self.world, self._choose, self.bounds)
        with outside(run):
            run.go()
            if run.violation is None and not any(process.alive for process in run.processes.values()):
                self._end(run)
        self.summary.schedules += 1
        self.summary.steps += len(run.trace)
        self.summary.longest = max(self.summary.longest, len(run.trace))
        if run.violation is not None:
            raise Violation("\n".join([run.violation, "", "after this schedule:", *run.trace]))
        while self._forks and self._forks[-1].tried + 1 == len(self._forks[-1].choices):
            self._forks.pop()
        if self._forks:
            self._forks[-1].tried += 1
        return bool(self._forks)

    def _choose(self, run: Run, choices: list[Choice]) -> Choice | None:
        if run.violation is not None:
            return None
        if self._depth < len(self._forks):
            fork = self._forks[self._depth]
            assert fork.choices == choices, f"not deterministic: {fork.choices} became {choices}"
        else:
            if not self._is_new(run):
                return None
            self.world.check(run)
            if not choices:
                return None
            self._forks.append(fork := _Fork(choices))
        self._depth += 1
        return fork.choice

    def _is_new(self, run: Run) -> bool:
        state = run.state()
        if run.preemptions is None:
            left = 0
        else:
            left = run.preemptions
            state += repr(run.current and run.current.name).encode()
        if self._seen.get(state, -1) >= left:
            return False
        self.summary.states += state not in self._seen
        self._seen[state] = left
        return True

    def _end(self, run: Run) -> None:
        self.summary.outcomes.add(run.outcomes())
        state = self.world.shared.state()
        if state in self._ends:
            return
        self._ends.add(state)
        self.summary.ends = len(self._ends)
        try:
            self.world.finish(run)
        except Exception as error:
            run.trace.append("then a plain run, alone")
            run.violation = explained(error)


def explained(error: Exception) -> str:
    """An assertion in its own words, anything else with its traceback."""
    return str(error) if isinstance(error, AssertionError) else "".join(traceback.format_exception(error))


@contextmanager
def attributes_replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace (object, name, value) for a while."""
    old = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    for owner, name, value in replacements:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in reversed(old):
            setattr(owner, name, value)
