"""Which targets run, and why: the plan as a function of states."""

from __future__ import annotations

from marin_build.artifact.examine import State, Status
from marin_build.artifact.record import Record
from marin_build.recipe.target import Target
from marin_build.runs import Plan, decide, restrict

RAW, TOKENS, MODEL = (Target(name, "2026.01.01") for name in ("raw/a", "tokenized/a", "checkpoints/a"))
RAW_DEV, TOKENS_DEV, MODEL_DEV = (Target(target.name, "dev") for target in (RAW, TOKENS, MODEL))
CHAIN = {RAW: [], TOKENS: [RAW], MODEL: [TOKENS, RAW]}
DEV_CHAIN = {RAW: [], RAW_DEV: [], TOKENS_DEV: [RAW_DEV, RAW], MODEL_DEV: [TOKENS_DEV]}


def status(target: Target, state: State, *reasons: str, record: bool | None = None, beneath: State | None = None):
    has_record = state not in (State.missing, State.partial) if record is None else record
    made = Record(target.name, target.version, target.kind, "f", "d", {}, (), ()) if has_record else None
    return Status(target, state, made, reasons, beneath=beneath)


def plan(needs, states, typed=(), forced=()) -> Plan:
    every = [states.get(target, State.finished) for target in needs]
    given = [s if isinstance(s, Status) else status(t, s) for t, s in zip(needs, every, strict=True)]
    return decide(given, needs, typed, forced)


def test_nothing_runs_when_all_is_finished():
    assert plan(CHAIN, {}, [MODEL]) == Plan()


def test_a_missing_target_runs_with_all_that_it_lacks_dependencies_first():
    states = dict.fromkeys(CHAIN, State.missing)
    assert list(plan(CHAIN, states, [MODEL]).runs) == [RAW, TOKENS, MODEL]


def test_a_missing_target_uses_the_finished_ones_and_never_looks_behind_them():
    assert plan(CHAIN, {RAW: State.missing, TOKENS: State.finished, MODEL: State.missing}, [MODEL]).runs == {
        RAW: "missing",
        MODEL: "missing",
    }
    assert plan({RAW: [], TOKENS: [RAW]}, {RAW: State.missing}, [TOKENS]).runs == {}


def test_a_damaged_dependency_of_a_finished_artifact_is_repaired():
    damaged = status(TOKENS, State.damaged, "part-0.arrow: is missing")
    assert plan(CHAIN, {TOKENS: damaged}, [MODEL]).runs == {TOKENS: "damaged (part-0.arrow: is missing)"}


def test_a_repair_brings_back_the_missing_input_that_it_reads():
    assert list(plan(CHAIN, {RAW: State.missing, TOKENS: State.damaged}, [MODEL]).runs) == [RAW, TOKENS]


def test_an_outdated_or_drifted_fixed_version_never_runs_by_itself():
    for state in (State.outdated, State.drifted):
        assert plan(CHAIN, {MODEL: state}, [MODEL]).runs == {}


def test_partial_work_is_resumed_and_not_forced():
    found = plan(CHAIN, {MODEL: status(MODEL, State.partial, "unfinished since noon")}, [MODEL])
    assert found == Plan({MODEL: "partial: resumes (unfinished since noon)"})


def test_an_interrupted_rebuild_goes_on_beside_the_finished_artifact():
    half = status(MODEL, State.partial, record=True)
    assert plan(CHAIN, {MODEL: half}, [MODEL]) == Plan({MODEL: "partial: resumes"})
    half_dev = status(MODEL_DEV, State.partial, record=True)
    assert plan(DEV_CHAIN, {MODEL_DEV: half_dev}, [MODEL_DEV]).forced == frozenset()


def test_forced_targets_run_alone_and_are_marked():
    assert plan(CHAIN, {}, [MODEL], [MODEL]) == Plan({MODEL: "forced"}, frozenset({MODEL}))
    assert plan(CHAIN, {}, [MODEL], [RAW]) == Plan({RAW: "forced"}, frozenset({RAW}))


def test_a_forced_target_brings_back_the_missing_inputs_that_it_reads():
    assert list(plan(CHAIN, {RAW: State.missing}, [TOKENS], [TOKENS]).runs) == [RAW, TOKENS]


def test_a_typed_dev_is_always_rebuilt_from_nothing():
    found = plan(DEV_CHAIN, {}, [MODEL_DEV])
    assert found == Plan({MODEL_DEV: "dev: rebuilt whenever it is asked for"}, frozenset({MODEL_DEV}))


def test_a_typed_dev_that_was_never_built_is_not_forced():
    assert plan(DEV_CHAIN, {MODEL_DEV: State.missing}, [MODEL_DEV]) == Plan({MODEL_DEV: "missing"})


def test_a_needed_dev_runs_only_when_its_recipe_or_its_inputs_changed():
    for state in (State.drifted, State.outdated):
        found = plan(DEV_CHAIN, {TOKENS_DEV: status(TOKENS_DEV, state, "steps: 1 → 2")}, [MODEL_DEV])
        assert found.runs[TOKENS_DEV] == "dev (steps: 1 → 2)"
        assert found.forced == {MODEL_DEV}
    assert TOKENS_DEV not in plan(DEV_CHAIN, {}, [MODEL_DEV]).runs


def test_a_dev_runs_when_a_dev_that_it_needs_runs():
    found = plan(DEV_CHAIN, {RAW_DEV: State.drifted}, [MODEL_DEV])
    assert found.runs[TOKENS_DEV] == "dev: its dependency raw/a/dev is rebuilt"
    assert found.forced == {MODEL_DEV}


def test_a_missing_dev_input_of_a_finished_dev_is_left_alone():
    assert list(plan(DEV_CHAIN, {RAW_DEV: State.missing}, [MODEL_DEV]).runs) == [MODEL_DEV]


def test_a_live_builder_does_not_hide_what_is_beneath():
    busy = status(MODEL, State.building, "ann is building it", record=False, beneath=State.missing)
    assert plan(CHAIN, {MODEL: busy}, [MODEL]).runs == {MODEL: "missing (ann is building it)"}
    rebuilding = status(MODEL, State.building, record=True, beneath=State.finished)
    assert plan(CHAIN, {MODEL: rebuilding}, [MODEL]).runs == {}


def test_until_keeps_what_leads_to_it_and_omit_from_drops_what_follows():
    whole = plan(CHAIN, dict.fromkeys(CHAIN, State.missing), [MODEL], [MODEL, RAW])
    assert list(restrict(whole, CHAIN, [TOKENS], []).runs) == [RAW, TOKENS]
    assert restrict(whole, CHAIN, [TOKENS], []).forced == {RAW}
    assert list(restrict(whole, CHAIN, [], [TOKENS]).runs) == [RAW]
    assert restrict(whole, CHAIN, [], []) == whole
