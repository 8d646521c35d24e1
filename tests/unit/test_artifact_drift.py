"""Drift: what a user is told, root cause first, and how it is accepted."""

from __future__ import annotations

import pytest
from artifact_world import CHECKPOINT, RAW, TOKENIZER, TOKENS, World

from marin_build.artifact import mirror
from marin_build.artifact.accept import accept
from marin_build.artifact.examine import State
from marin_build.errors import DamageError, DriftError, LeasedError, MarinError, RequestError
from marin_build.recipe.target import parse_target

VALIDATION = "tokenized/v/2026.06.28"
REASON = "only the comment of the field was wrong"


def refusal(world: World, target: str) -> str:
    with pytest.raises(DriftError) as caught:
        world.build(target)
    return str(caught.value)


def accepted(world: World, target: str, reason: str = REASON) -> list[str]:
    return accept(world.store, world.book, parse_target(target), reason)


@pytest.fixture
def finished(world: World) -> World:
    world.build_all(RAW, TOKENIZER, TOKENS, VALIDATION, CHECKPOINT)
    return world


def test_a_changed_field_is_shown_with_both_values_and_the_commands_that_help(finished: World):
    finished.edit(CHECKPOINT, "learning_rate: 3e-3", "learning_rate: 1e-3")
    lines = refusal(finished, CHECKPOINT).splitlines()
    assert lines[0].startswith(f"drift: {CHECKPOINT}: it was built from another recipe: optimizer.learning_rate: 0.003")
    assert lines[0].endswith("0.001")
    commands = "\n".join(lines[1:])
    assert f"  marin-build bump {CHECKPOINT}  " in commands
    assert f"  snakemake -f {CHECKPOINT}  " in commands
    assert f"  marin-build accept {CHECKPOINT} --reason '…'" in commands


def test_every_changed_field_is_shown(finished: World):
    finished.edit(CHECKPOINT, "learning_rate: 3e-3", "learning_rate: 1e-3")
    finished.edit(CHECKPOINT, "seed: 0", "seed: 1")
    finished.edit(CHECKPOINT, "max_grad_norm: null", "max_grad_norm: 1")
    status = finished.status(CHECKPOINT)
    assert status.state is State.drifted
    assert {change.field: (change.old, change.new) for change in status.changes} == {
        "optimizer.learning_rate": (0.003, 0.001),
        "optimizer.max_grad_norm": (None, 1.0),
        "seed": (0, 1),
    }
    text = refusal(finished, CHECKPOINT)
    assert "(and 2 more)" in text.splitlines()[0]
    assert all(f"  {change}" in text for change in status.changes)


def test_the_root_cause_comes_first_with_its_target_and_its_fields(finished: World):
    finished.edit(RAW, "quickstart", "dclm_smoke")
    finished.edit(CHECKPOINT, "seed: 0", "seed: 1")
    status = finished.status(CHECKPOINT)
    assert [change.field for change in status.changes] == [f"{RAW} source.corpus", "seed"]
    assert status.drifted == tuple(map(parse_target, (RAW, TOKENS, CHECKPOINT)))
    text = refusal(finished, CHECKPOINT)
    assert f"{RAW} source.corpus: quickstart" in text.splitlines()[0]
    assert f"marin-build bump {RAW}" in text
    assert f"snakemake -f {RAW} {TOKENS} {CHECKPOINT}" in text
    in_order = [text.index(f"marin-build accept {target} ") for target in (RAW, TOKENS, CHECKPOINT)]
    assert in_order == sorted(in_order)


def test_a_cause_that_reaches_a_target_twice_is_shown_once(finished: World):
    """The tokenizer is a dependency of the checkpoint and of its token set."""
    finished.edit(TOKENIZER, "eos: <eos>", "eos: <end>")
    fields = [change.field for change in finished.status(CHECKPOINT).changes]
    assert fields == [f"{TOKENIZER} tokenizer.special_tokens.eos"]


def test_the_fields_of_a_dependency_that_was_rebuilt_since_are_still_known(finished: World):
    finished.edit(RAW, "quickstart", "dclm_smoke")
    finished.build(RAW, force="r1")
    text = refusal(finished, TOKENS)
    assert f"{RAW} source.corpus: quickstart" in text.splitlines()[0]
    assert f"marin-build bump {TOKENS}" in text, "the dependency is of its recipe again, so its user is bumped"
    assert f"snakemake -f {TOKENS}  " in text
    assert f"marin-build accept {RAW} " not in text


def test_a_dependency_whose_old_recipe_nobody_knows_shows_as_its_fingerprint(finished: World):
    finished.edit(RAW, "quickstart", "dclm_smoke")
    finished.path(RAW, ".artifact.json").unlink()
    changes = finished.status(TOKENS).changes
    assert [change.field for change in changes] == [f"{RAW} fingerprint"]


def test_another_dependency_is_a_change_of_the_recipe_itself(finished: World):
    finished.edit(TOKENS, "tokenizers/t/2026.06.28", "tokenizers/u/2026.06.28")
    finished.write("tokenizers/u/2026.06.28", (finished.folder / "config" / f"{TOKENIZER}.yaml").read_text())
    assert [change.field for change in finished.status(TOKENS).changes] == ["tokenizer"]


def test_what_is_measured_or_how_it_runs_is_no_drift(finished: World):
    finished.edit(CHECKPOINT, "every_steps: 10", "every_steps: 5")
    finished.edit(CHECKPOINT, "measure:", "execution: {default: {micro_batch_size: 1}}\nmeasure:")
    assert finished.status(CHECKPOINT).state is State.finished
    assert not finished.build(CHECKPOINT).built


# ---- accept ----------------------------------------------------------------------------------------------------------


def test_accepted_drift_is_finished_and_remembered_with_its_reason(finished: World):
    old = finished.record(TOKENS)
    finished.edit(TOKENS, "shard_bytes: 1000", "shard_bytes: 2000")
    lines = accepted(finished, TOKENS)
    assert lines[0] == f"accepted for {TOKENS}: {REASON}"
    assert lines[1].startswith("  shard_bytes: 1000 ")
    assert finished.status(TOKENS).state is State.finished
    assert not finished.build(TOKENS).built
    record = finished.record(TOKENS)
    assert record.digest == old.digest
    assert record.recipe["shard_bytes"] == 2000
    (memory,) = record.accepted
    assert (memory["reason"], memory["fingerprint"], memory["recipe"]) == (REASON, old.fingerprint, old.recipe)
    assert {"user", "host", "time"} <= set(memory)
    assert record.fingerprint in mirror.path(parse_target(TOKENS)).read_text()


def test_the_consumers_of_an_accepted_artifact_drift_with_its_fields_and_are_accepted_in_turn(finished: World):
    finished.edit(RAW, "quickstart", "dclm_smoke")
    with pytest.raises(RequestError, match=f"its dependency {RAW} has drifted itself; accept or rebuild that first"):
        accepted(finished, TOKENS)
    accepted(finished, RAW)
    assert [change.field for change in finished.status(TOKENS).changes] == [f"{RAW} source.corpus"]
    accepted(finished, TOKENS)
    accepted(finished, VALIDATION)
    assert [change.field for change in finished.status(CHECKPOINT).changes] == [f"{RAW} source.corpus"]
    accepted(finished, CHECKPOINT)
    assert finished.status(CHECKPOINT).state is State.finished
    assert not finished.build(CHECKPOINT).built
    raw, tokens = finished.record(RAW), finished.record(TOKENS)
    used = {entry["name"]: entry for entry in tokens.dependencies}["raw/a"]
    assert (used["fingerprint"], used["digest"]) == (raw.fingerprint, raw.digest)


def test_drift_can_be_accepted_again_and_each_time_is_remembered(finished: World):
    for size in (2000, 3000):
        finished.edit(TOKENS, f"shard_bytes: {size - 1000}", f"shard_bytes: {size}")
        accepted(finished, TOKENS, f"to {size}")
    assert [memory["reason"] for memory in finished.record(TOKENS).accepted] == ["to 2000", "to 3000"]


@pytest.mark.parametrize("reason", ["", "  \n"])
def test_accepting_needs_a_reason(finished: World, reason: str):
    finished.edit(TOKENS, "shard_bytes: 1000", "shard_bytes: 2000")
    with pytest.raises(RequestError, match="needs a reason"):
        accepted(finished, TOKENS, reason)
    assert finished.status(TOKENS).state is State.drifted


def test_only_finished_drift_can_be_accepted(world: World):
    with pytest.raises(RequestError, match=rf"nothing to accept: it is not finished\n  snakemake {RAW}"):
        accepted(world, RAW)
    assert not world.path(RAW).exists()
    world.build(RAW)
    with pytest.raises(RequestError, match="it was built from the recipe that is there"):
        accepted(world, RAW)
    world.path(RAW, ".artifact.json").write_text("{")
    with pytest.raises(DamageError):
        accepted(world, RAW)


def test_bytes_of_another_dependency_cannot_be_accepted(finished: World):
    finished.write("tokenizers/u/2026.06.28", (finished.folder / "config" / f"{TOKENIZER}.yaml").read_text())
    finished.edit(TOKENS, "tokenizers/t/2026.06.28", "tokenizers/u/2026.06.28")
    with pytest.raises(RequestError, match=r"was not made from tokenizers/u/2026\.06\.28"):
        accepted(finished, TOKENS)


def test_nothing_is_accepted_while_somebody_builds(finished: World):
    finished.edit(TOKENS, "shard_bytes: 1000", "shard_bytes: 2000")
    refused: list[MarinError] = []

    def build(context):
        try:
            accepted(finished, TOKENS)
        except LeasedError as error:
            refused.append(error)
        raise MarinError("enough")

    with pytest.raises(MarinError, match="enough"):
        finished.build(TOKENS, build, force="r1")
    assert "is being built by" in str(refused[0])
