"""Which targets of a closure will run, and why: the plan of a build, as a pure function of what is on disk.

Finished artifacts never wait for what they were made from: a finished checkpoint stays finished when its shards are
gone. A damaged artifact is repaired wherever it is in the closure. A `dev` one is rebuilt when it is asked for, and
when something that it is made from is not what it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from marin_build.artifact.examine import State, Status
from marin_build.recipe.target import Target

NOT_BUILT = "not built yet"
"""What `examine` says of a plainly missing target: no news."""

Needs = Mapping[Target, Sequence[Target]]
"""What each target needs directly."""


@dataclass(frozen=True)
class Plan:
    """What a run will do."""

    runs: Mapping[Target, str] = field(default_factory=dict)
    """Each target that will run, dependencies first, and why."""
    forced: frozenset[Target] = frozenset()
    """Of these, the ones that are made from nothing although they are finished or begun."""


def decide(
    statuses: Sequence[Status], needs: Needs, typed: Iterable[Target] = (), forced: Iterable[Target] = ()
) -> Plan:
    """Plan the closure that `statuses` describe, dependencies first.

    A target runs when it is forced, damaged, an asked-for `dev`, a `dev` of other inputs, or when it is not finished
    and either typed or needed by a target that runs.
    """
    typed, forced = frozenset(typed), frozenset(forced)
    why: dict[Target, str] = {}
    known = -1
    while len(why) > known:  # what runs pulls what it needs and what follows it, until that is all
        known = len(why)
        for status in statuses:
            if reason := _reason(status, typed, forced) or _pulled(status, needs, why):
                why.setdefault(status.target, reason)
    again = {s.target for s in statuses if s.target.is_dev and s.target in typed and not is_unfinished(s)}
    return Plan({s.target: why[s.target] for s in statuses if s.target in why}, forced | again)


def table(plan: Plan, members: int, parts: Mapping[Target, int]) -> str:
    """A line for each target that would run, out of a closure of `members`, with the number of `parts` that share the
    work on it; nothing where none would run.
    """
    width = max((len(str(target)) for target in plan.runs), default=0)
    shared = {target: f", joined from {count:,} part jobs" for target, count in parts.items()}
    lines = [f"  {target!s:{width}}  {why}{shared.get(target, '')}\n" for target, why in plan.runs.items()]
    return "".join([f"{len(lines)} of {members} artifacts would be built:\n", *lines]) if lines else ""


def state_of(status: Status) -> State:
    """The state apart from who may be building it."""
    return status.beneath or status.state


def is_unfinished(status: Status) -> bool:
    """True where there is nothing finished of the recipe of now, or a rebuild of it was begun and can go on."""
    state = state_of(status)
    is_of_old = status.target.is_derived and state in (State.drifted, State.outdated)
    return status.record is None or state is State.partial or is_of_old


def restrict(plan: Plan, needs: Needs, until: Iterable[Target], omit_from: Iterable[Target]) -> Plan:
    """The part of `plan` that `--until` and `--omit-from` leave."""
    kept = set(plan.runs)
    if until := set(until):
        kept &= _upstream(until, needs)
    omitted = set(omit_from)
    kept = {target for target in kept if omitted.isdisjoint(_upstream({target}, needs))}
    return Plan({target: why for target, why in plan.runs.items() if target in kept}, plan.forced & kept)


def _reason(status: Status, typed: frozenset[Target], forced: frozenset[Target]) -> str | None:
    """Why a target runs by itself, whatever else runs."""
    target, state = status.target, state_of(status)
    if target in forced:
        return "forced"
    if state is State.damaged:
        return _described("damaged", status)
    if is_unfinished(status):
        return _unfinished(status) if target in typed else None
    if target.is_dev and state in (State.drifted, State.outdated):
        return _described("dev", status)
    return "dev: rebuilt whenever it is asked for" if target.is_dev and target in typed else None


def _pulled(status: Status, needs: Needs, why: Mapping[Target, str]) -> str | None:
    """Why a target runs because others do."""
    if is_unfinished(status):
        return _unfinished(status) if any(status.target in needs[consumer] for consumer in why) else None
    rebuilt = [need for need in needs[status.target] if need.is_dev and not need.is_derived and need in why]
    return f"dev: its dependency {rebuilt[0]} is rebuilt" if rebuilt else None


def _unfinished(status: Status) -> str:
    state = state_of(status)
    return _described("partial: resumes" if state is State.partial else str(state), status)


def _described(word: str, status: Status) -> str:
    reasons = [reason for reason in status.reasons if reason != NOT_BUILT]
    return f"{word} ({'; '.join(reasons)})" if reasons else word


def _upstream(targets: set[Target], needs: Needs) -> set[Target]:
    found, todo = set(targets), list(targets)
    while todo:
        new = set(needs.get(todo.pop(), ())) - found
        found |= new
        todo += new
    return found
