"""The builder of checkpoints: a whole tiny run, and everything that is refused before anything is compiled."""

import json
import logging
import math
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
from compiled import compiled_once
from training_world import EOS, TARGET, TOKENIZER, TRAIN, VALID, TrainingWorld

from marin_build.artifact.attempt import Attempt
from marin_build.artifact.digest import list_files
from marin_build.artifact.fsspec_bucket import open_bucket
from marin_build.artifact.object_store import ObjectStore
from marin_build.errors import DamageError, DriftError, NumericalError, RequestError, Stopped
from marin_build.recipe.target import parse_target
from marin_build.training import loop
from marin_build.training.build import build
from marin_build.training.history import History
from marin_build.training.journal import METRICS
from marin_build.training.metrics import read_metrics


@pytest.fixture(scope="module", autouse=True)
def cheaply(tmp_path_factory):
    """Equal programs of this module are compiled once."""
    with compiled_once(tmp_path_factory.mktemp("compiled")):
        yield


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run that nothing disturbed, and its result."""
    world = TrainingWorld(tmp_path_factory.mktemp("straight"))
    return world, build(world.context())


def losses(world):
    return {line["step"]: line["train/loss"] for line in world.metrics if "train/loss" in line}


# ---- a whole run -----------------------------------------------------------------------------------------------------


def test_a_run_learns_and_reports_its_scores(straight):
    world, result = straight
    assert result.metrics["train/loss"] < losses(world)[1] - 2
    assert result.metrics["eval/bpb"] < 4
    assert result.metrics["eval/bpb"] == pytest.approx(
        result.metrics["eval/loss"] / math.log(2) * targets(world) / text_bytes(world)
    )
    assert 2 < result.metrics["baseline/byte_bigram/bpb"] < 3
    assert result.metrics["train/tokens"] == 20 * 8 * 32
    assert len(result.digest) == 32


def ids_of(world, target):
    from marin_build.data.shards import TokenizedSet

    return np.concatenate([shard.ids for shard in TokenizedSet.open(world.folder / target).shards])


def targets(world):
    return len(ids_of(world, VALID)) - 1


def text_bytes(world):
    return int((ids_of(world, VALID)[1:] != EOS).sum())


def test_metrics_have_a_line_for_each_step_and_validation_at_start_every_ten_steps_and_end(straight):
    world, result = straight
    assert [line["step"] for line in world.metrics] == list(range(21))
    assert [line["step"] for line in world.metrics if "eval/loss" in line] == [0, 10, 20]
    last = world.metrics[-1]
    assert {name: value for name, value in last.items() if name != "step"} == dict(result.metrics)
    assert {"train/loss", "train/learning_rate", "train/grad_norm", "train/tokens_per_second"} <= last.keys()
    assert {"train/flops_utilization", "eval/bpb", "eval/macro_bpb", "eval/tiny/valid/bpb"} <= last.keys()


def test_the_first_update_has_the_learning_rate_of_step_zero(straight):
    world, _ = straight
    rates = [line["train/learning_rate"] for line in world.metrics[1:]]
    assert rates[:4] == pytest.approx([0, 2e-2 / 3, 2e-2 * 2 / 3, 2e-2])


def test_kept_checkpoints_stay_and_are_listed_and_rolling_ones_are_neither(straight):
    world, result = straight
    assert result.unlisted == ()
    assert sorted(path.name for path in world.checkpoints.iterdir()) == ["10", "20"]
    assert "checkpoints/20/manifest.json" in list_files(world.folder / "checkpoints/tiny/dev")


def test_the_record_gets_devices_tokens_and_seconds(straight):
    _, result = straight
    assert result.details["devices"]["platform"] == "cpu"
    assert result.details["tokens"] == 5120
    assert result.details["resumed_at"] == []
    assert result.details["training_seconds"] > 0
    json.dumps(dict(result.details))


def test_a_finished_run_that_is_built_again_gives_the_same_digest_without_training(straight):
    world, result = straight
    again = build(world.context())
    assert again.digest == result.digest
    assert again.metrics == result.metrics
    assert again.details["resumed_at"] == [20]


def test_micro_batches_train_to_nearly_the_same_loss(straight, tmp_path):
    world = TrainingWorld(tmp_path, {"micro_batch_size": 2})
    result = build(world.context())
    # float32 sums in another order, 20 steps.
    assert result.metrics["eval/loss"] == pytest.approx(straight[1].metrics["eval/loss"], abs=2e-3)


def test_only_trained_tokens_are_learned_and_scored(straight, tmp_path):
    """Where one letter alone is trained on, a model learns in no time to say nothing else."""
    world = TrainingWorld(tmp_path, {"micro_batch_size": 2}, **{"measure.baselines": []})
    for target in (TRAIN, VALID):
        ids = ids_of(straight[0], target)
        world.write_set(target, np.split(ids, np.flatnonzero(ids == EOS)[:-1] + 1), loss_mask=mask_of(ids))
    result = build(world.context())
    assert result.metrics["train/loss"] < 0.2  # of all tokens it is above 2
    assert result.metrics["eval/loss"] < 0.2
    # Each letter is a byte, so both are the same sum over the same number.
    assert result.metrics["eval/bpb"] == pytest.approx(result.metrics["eval/loss"] / math.log(2), rel=1e-5)
    assert mask_of(ids_of(world, VALID)[1:]).sum() < targets(world) / 4


def mask_of(ids):
    return (ids == ord("e")).astype(np.uint8)


# ---- stops and resumes -----------------------------------------------------------------------------------------------


def stop_after(world, lines):
    """Request a stop once metrics.jsonl has this many lines."""
    path = world.folder / "checkpoints/tiny/dev/metrics.jsonl"
    return lambda: path.exists() and path.read_bytes().count(b"\n") >= lines


def test_a_stop_finishes_the_step_saves_and_the_next_build_ends_with_the_same_bits(straight, tmp_path):
    world = TrainingWorld(tmp_path)
    with pytest.raises(Stopped, match=r"stopped at step 6 of 20, which is saved"):
        build(world.context(stop_requested=stop_after(world, 7)))
    assert [path.name for path in world.checkpoints.iterdir()] == ["6"]
    result = build(world.context())
    assert result.details["resumed_at"] == [6]
    assert result.digest == straight[1].digest
    assert losses(world) == losses(straight[0])


STAGES = {
    "data.train.late": {"target": VALID, "weight": 0, "max_epochs": 3},
    "data.stages": [{"from_step": 10, "weights": {"tiny": 1, "late": 1}}],
}


def test_a_run_resumed_before_a_stage_ends_with_the_bits_of_one_that_was_not(tmp_path, straight):
    whole = build(TrainingWorld(tmp_path / "whole", **STAGES).context())
    world = TrainingWorld(tmp_path / "resumed", **STAGES)
    with pytest.raises(Stopped, match=r"stopped at step 8 of 20"):
        build(world.context(stop_requested=stop_after(world, 9)))
    resumed = build(world.context())
    assert resumed.digest == whole.digest != straight[1].digest
    assert resumed.details["epochs"] == whole.details["epochs"]
    assert 0 < whole.details["epochs"]["late"] < 3
    ten = {step: loss for step, loss in losses(world).items() if step <= 10}
    assert ten == {step: loss for step, loss in losses(straight[0]).items() if step <= 10}
    assert losses(world)[11] != losses(straight[0])[11]


def test_a_stop_before_the_first_step_saves_nothing_and_starts_again(tmp_path):
    world = TrainingWorld(tmp_path)
    with pytest.raises(Stopped, match="stopped before its first step, so nothing was saved"):
        build(world.context(stop_requested=lambda: True))
    assert list(world.checkpoints.iterdir()) == []


def test_a_stop_during_validation_saves_and_the_validation_is_made_up_for(straight, tmp_path, monkeypatch):
    world, score = TrainingWorld(tmp_path), History.score

    def interrupted(self, step, *arguments):
        if step == 10:
            world.stop.set()
        return score(self, step, *arguments)

    monkeypatch.setattr(History, "score", interrupted)
    with pytest.raises(Stopped, match="stopped at step 10 "):
        build(world.context())
    assert "eval/loss" not in world.metrics[10]
    world.stop.clear()
    monkeypatch.undo()
    result = build(world.context())
    assert [line["step"] for line in world.metrics] == list(range(21))
    for name in ("eval/loss", "train/loss"):
        assert world.metrics[10][name] == straight[0].metrics[10][name]
    assert result.digest == straight[1].digest


@pytest.mark.row(21)
def test_a_damaged_last_checkpoint_falls_back_and_the_run_still_ends_with_the_same_bits(straight, tmp_path, caplog):
    world = TrainingWorld(tmp_path)
    with pytest.raises(Stopped):
        build(world.context(stop_requested=stop_after(world, 15)))
    assert sorted(path.name for path in world.checkpoints.iterdir()) == ["10", "14"]
    (world.checkpoints / "14" / "parameters" / "manifest.ocdbt").unlink()
    result = build(world.context())
    assert "FALLING BACK to the one of step 10" in caplog.text
    assert result.details["resumed_at"] == [10]
    assert result.details["checkpoint_problems"] == ["step 14: parameters/manifest.ocdbt is missing, or a link"]
    assert result.digest == straight[1].digest
    assert losses(world) == losses(straight[0])
    assert result.unlisted == ("checkpoints/damaged-14/",)
    result.after_record()
    assert sorted(path.name for path in world.checkpoints.iterdir()) == ["10", "20"]


def test_a_run_whose_checkpoints_are_all_damaged_never_starts_again_by_itself(tmp_path):
    world = TrainingWorld(tmp_path)
    with pytest.raises(Stopped):
        build(world.context(stop_requested=stop_after(world, 5)))
    (world.checkpoints / "4" / "manifest.json").write_text("{}")
    with pytest.raises(DamageError, match=r"no checkpoint in .* is whole"):
        build(world.context())


def test_checkpoints_of_other_data_are_refused(tmp_path):
    world = TrainingWorld(tmp_path)
    with pytest.raises(Stopped):
        build(world.context(stop_requested=stop_after(world, 5)))
    world.make_set(TRAIN, documents=200, seed=9)
    with pytest.raises(DriftError, match=r"belongs to another training \(data changed\)"):
        build(world.context())


# ---- numbers that are none -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, {"log_every_steps": 100, "rolling_checkpoint_steps": 1}],
    ids=["logged each step", "saved each step"],
)
@pytest.mark.row(20)
def test_a_number_that_is_none_stops_before_its_state_is_saved_and_dumps_the_batch(tmp_path, settings):
    world = TrainingWorld(tmp_path, settings, **{"optimizer.learning_rate": 1e30, "optimizer.weight_decay": 0.0})
    with pytest.raises(NumericalError, match=r"train/\w+ is (nan|inf) at step 2: training stops"):
        build(world.context())
    # The learning rate of the first update is 0; the second makes parameters whose norm overflows.
    saved = [int(path.name) for path in world.checkpoints.iterdir()]
    assert saved == ([1] if settings else [])
    assert all(math.isfinite(line["train/loss"]) for line in world.metrics if "train/loss" in line)
    dumped = np.load(tmp_path / "checkpoints/tiny/dev/logs/batch-1.npz")
    assert dumped["tokens"].shape == (8, 33)
    assert dumped["segment_ids"].shape == (8, 33)


# ---- refused before anything is compiled -----------------------------------------------------------------------------


@pytest.fixture
def nothing_compiles(monkeypatch):
    def fail(*_, **__):
        raise AssertionError("compiled before the check")

    monkeypatch.setattr(loop, "compile_steps", fail)
    monkeypatch.setattr(loop, "initial_state", fail)


def refused(tmp_path, message, settings=MappingProxyType({}), prepare=lambda world: None, **changes):
    world = TrainingWorld(tmp_path, settings, **changes)
    prepare(world)
    with pytest.raises(RequestError, match=message):
        build(world.context())
    assert not world.checkpoints.exists()


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path, nothing_compiles):
    refused(tmp_path, "model.vocab_size 256 is smaller than the vocabulary .* has 257 ids", **{"model.vocab_size": 256})


def test_a_set_with_more_ids_than_the_model_is_refused(tmp_path, nothing_compiles):
    def prepare(world):
        world.write_set(VALID, [np.array([300] * 50, np.uint16)], vocabulary_size=301)

    refused(tmp_path, r"measure.validation.sets.tiny/valid: .* has ids up to 300", prepare=prepare)


def test_a_sequence_longer_than_the_data_is_refused(tmp_path, nothing_compiles):
    refused(tmp_path, "sequence_length: 100000 is longer than the data", **{"data.sequence_length": 100_000})


def test_more_epochs_than_the_limit_are_refused(tmp_path, nothing_compiles):
    message = (
        r"data.train.tiny.max_epochs: the run reads 0\.\d+ epochs of it, more than the limit of 0.01\n.*\n.* fewer st"
    )
    refused(tmp_path, message, **{"data.train.tiny.max_epochs": 0.01})


def test_a_set_of_another_tokenizer_is_refused(tmp_path, nothing_compiles):
    def prepare(world):
        world._tokenizer_digest = "9" * 32

    refused(tmp_path, "data.train.tiny: .* was made with another tokenizer than data.tokenizer", prepare=prepare)


def test_conversations_that_would_see_each_other_are_refused(tmp_path, nothing_compiles):
    def prepare(world):
        ids = np.arange(200, dtype=np.uint16) % 256
        world.write_set(VALID, [ids], loss_mask=np.ones(200, np.uint8))

    message = r"measure.validation.sets.tiny/valid is chat data, and data.attention_across_documents is true"
    refused(tmp_path, message, prepare=prepare, **{"data.attention_across_documents": True})


def test_a_validation_set_without_a_target_is_refused(tmp_path, nothing_compiles):
    def prepare(world):
        world.write_set(VALID, [np.array([1], np.uint16)])

    refused(tmp_path, "measure.validation.sets.tiny/valid: a validation set needs at least 2 tokens", prepare=prepare)


def test_a_mesh_that_does_not_fit_the_devices_is_refused(tmp_path, nothing_compiles):
    refused(tmp_path, r"execution.mesh \{data: 3.*\} does not fit 1 device", {"mesh": {"data": 3, "fsdp": 1}})


def test_a_micro_batch_that_does_not_divide_the_batch_is_refused(tmp_path, nothing_compiles):
    refused(tmp_path, "micro_batch_size 3 does not divide global_batch_size 8", {"micro_batch_size": 3})


def test_baselines_without_validation_sets_are_refused(tmp_path, nothing_compiles):
    refused(tmp_path, "measure.baselines needs validation sets", **{"measure.validation": None})


def test_an_id_outside_the_vocabulary_in_a_damaged_set_stops_the_run(tmp_path):
    world = TrainingWorld(tmp_path, **{"measure.validation": None, "measure.baselines": []})
    world.write_set(TRAIN, [np.array([65000] * 4000, np.uint16)])
    with pytest.raises(
        DamageError,
        match=r"id 65000 is outside the vocabulary of 257 ids: window \d+ of tiny, in the batch of step \d+",
    ):
        build(world.context())


def test_a_run_without_validation_or_kept_steps_needs_none(tmp_path):
    world = TrainingWorld(
        tmp_path,
        {"rolling_checkpoint_steps": None, "log_every_steps": 7},
        **{"measure": {}, "steps": 8, "data.attention_across_documents": True},
    )
    result = build(world.context())
    assert [line["step"] for line in world.metrics] == [7, 8]
    assert "eval/bpb" not in result.metrics
    assert [path.name for path in world.checkpoints.iterdir()] == ["8"]


def test_progress_lines_tell_how_it_goes(tmp_path, caplog):
    caplog.set_level(logging.INFO, "tiny")
    world = TrainingWorld(tmp_path, **{"steps": 6})
    build(world.context())
    lines = [record.message for record in caplog.records if record.name == "tiny"]
    assert any(
        line.startswith("step 6/6 100.0% | loss ") and "tokens/s" in line and "ETA 0:00:00" in line for line in lines
    )
    assert any(line.startswith("final validation: ") and "bits per byte" in line for line in lines)
    assert any(line.startswith("byte-bigram model on the same text: ") for line in lines)
    assert any("measured on this CPU" in line for line in lines)


def test_the_tokenizer_of_the_world_is_a_real_one(tmp_path):
    from marin_build.data.tokenizer import load_tokenizer

    world = TrainingWorld(tmp_path)
    assert load_tokenizer(world.folder / TOKENIZER).token_bytes()[65] == b"A"


def test_another_machine_goes_on_training_from_what_was_brought_to_an_object_store(tmp_path, monkeypatch, straight):
    """Killed after the checkpoint of step 6; only what was kept is there, and the end is that of an undisturbed run."""
    monkeypatch.chdir(tmp_path)
    undisturbed, expected = straight
    world = TrainingWorld(tmp_path / "world")
    store = ObjectStore(open_bucket("memory://marin/training"), tmp_path / "first machine")
    target = parse_target(TARGET)
    attempt = Attempt("first", target.name, target.version, "f" * 32, {}, (), ".", 1, "now", "here")
    work = store.rebuild(attempt)

    def keep_and_die(names, dropped=()):
        work.keep(names, dropped)
        if "checkpoints/6" in names:
            raise SystemExit("killed")

    with pytest.raises(SystemExit):
        build(world.context(folder=work.folder, keep=keep_and_die))
    elsewhere = ObjectStore(store.bucket, tmp_path / "second machine")
    resumed = elsewhere.resume(replace(attempt, id="second", token=2), work.attempt)
    assert [path.name for path in (resumed.folder / "checkpoints").iterdir()] == ["6"], "step 3 was let go"
    result = build(world.context(folder=resumed.folder, keep=resumed.keep))
    assert result.details["resumed_at"] == [6]
    assert result.digest == expected.digest
    lines = {line["step"]: line.get("train/loss") for line in read_metrics(resumed.folder / METRICS)}
    assert lines == {line["step"]: line.get("train/loss") for line in undisturbed.metrics}
