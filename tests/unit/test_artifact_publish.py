from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from artifact_world import CHECKPOINT, RAW, RAW_DEV, TOKENIZER, TOKENS, TOKENS_DEV, Parts, World

from marin_build.artifact import forced, mirror
from marin_build.artifact.context import BuildContext, BuildResult
from marin_build.artifact.digest import root_digest
from marin_build.artifact.examine import State
from marin_build.errors import (
    DamageError,
    DriftError,
    MarinError,
    NumericalError,
    RecipeError,
    RefusedError,
    RequestError,
    Stopped,
)
from marin_build.recipe.target import parse_target

FINISHED = {".artifact.json", ".attempt.json", "logs", "part-0", "part-1", "part-2"}


def nothing_to_do(context: BuildContext) -> BuildResult:
    pytest.fail(f"{context.target} was built again")


def failing(error: Exception, after_parts: int = 0):
    def build(context: BuildContext) -> BuildResult:
        Parts(after_parts)(context)
        raise error

    return build


# ---- finished --------------------------------------------------------------------------------------------------------


def test_a_build_makes_a_finished_artifact_and_the_next_one_reuses_it(world: World):
    outcome = world.build(RAW)
    assert outcome.built
    assert world.status(RAW).state is State.finished
    assert world.files(RAW) == FINISHED
    assert world.verify(RAW).ok
    again = world.build(RAW, nothing_to_do)
    assert not again.built
    assert again.record == outcome.record


def test_the_record_says_what_was_made_from_what(world: World):
    world.build_all(RAW, TOKENIZER, TOKENS)
    record = world.record(TOKENS)
    raw = world.record(RAW)
    assert record is not None
    assert raw is not None
    assert (record.name, record.version, record.kind) == ("tokenized/x", "2026.06.28", "tokenized")
    assert record.fingerprint == world.book.fingerprint(parse_target(TOKENS))
    assert record.digest == root_digest(record.content)
    assert [entry["path"] for entry in record.content] == ["part-0", "part-1", "part-2"]
    expected = {"name": "raw/a", "version": "2026.06.28", "fingerprint": raw.fingerprint, "digest": raw.digest}
    assert expected in record.dependencies
    assert len(record.dependencies) == 2
    assert record.metrics == {"parts": 3}
    assert record.provenance["devices"] == ["none"]


def test_validation_sets_are_recorded_apart_from_dependencies(world: World):
    world.build_all(RAW, TOKENIZER, TOKENS, "tokenized/v/2026.06.28", CHECKPOINT)
    record = world.record(CHECKPOINT)
    assert record is not None
    assert [entry["name"] for entry in record.measured] == ["tokenized/v"]
    assert [entry["name"] for entry in record.dependencies] == ["tokenizers/t", "tokenized/x"]


def test_a_builder_sees_recipe_fingerprint_dependencies_and_settings(world: World):
    world.build_all(RAW, TOKENIZER)
    seen: list[BuildContext] = []

    def look(context: BuildContext) -> BuildResult:
        seen.append(context)
        context.check_lease()
        assert not context.stop_requested()
        return Parts()(context)

    world.build(TOKENS, look, processes=7)
    context = seen[0]
    assert str(context.target) == TOKENS
    assert context.recipe == world.book.load(parse_target(TOKENS))
    assert context.fingerprint == world.book.fingerprint(parse_target(TOKENS))
    assert list(context.dependencies) == [TOKENIZER, RAW]
    assert context.dependencies[RAW].folder == world.path(RAW, ".").parent / "2026.06.28"
    assert context.dependencies[RAW].record == world.record(RAW).to_dict()
    assert context.settings.processes == 7


def test_logs_and_what_the_builder_says_are_listed_but_outside_the_digest(world: World):
    def build(context: BuildContext) -> BuildResult:
        Parts(1)(context)
        (context.folder / "metrics.jsonl").write_text("{}\n")
        (context.folder / "charts").mkdir()
        (context.folder / "charts" / "a.svg").write_text("<svg/>")
        (context.folder / "rolling").mkdir()
        (context.folder / "rolling" / "state").write_text("big")
        (context.folder / "left.tmp").write_text("of a killed writer")
        return BuildResult(
            digest="d" * 32,
            outside_digest=("metrics.jsonl", "charts/"),
            unlisted=("rolling/",),
            after_record=lambda: shutil.rmtree(context.folder / "rolling"),
        )

    record = world.build(RAW, build).record
    outside = {entry["path"] for entry in record.files if entry.get("outside_digest")}
    assert record.digest == "d" * 32
    assert [entry["path"] for entry in record.content] == ["part-0"]
    assert outside == {"metrics.jsonl", "charts/a.svg", *(f"logs/{log}" for log in os.listdir(world.path(RAW, "logs")))}
    assert world.files(RAW) == {".artifact.json", ".attempt.json", "logs", "part-0", "metrics.jsonl", "charts"}
    assert world.verify(RAW).ok
    world.path(RAW, "metrics.jsonl").unlink()
    assert world.status(RAW).state is State.finished, "what is not content is no reason to build anew"
    assert [str(problem) for problem in world.verify(RAW, full=False).problems] == ["metrics.jsonl: missing"]


def test_housekeeping_that_fails_leaves_a_finished_artifact(world: World, capsys: pytest.CaptureFixture[str]):
    def build(context: BuildContext) -> BuildResult:
        Parts()(context)
        return BuildResult(after_record=lambda: (context.folder / "gone").unlink())

    assert world.build(RAW, build).built
    assert world.status(RAW).state is State.finished
    assert "tidying up failed" in capsys.readouterr().err


def test_the_mirror_and_only_the_mirror_is_written_beside_the_artifact(world: World):
    record = world.build(RAW).record
    path = mirror.path(parse_target(RAW))
    assert json.loads(path.read_text())["digest"] == record.digest
    assert set(os.listdir(world.folder)) == {"config", "artifacts", ".marin"}
    path.unlink()
    world.build(RAW, nothing_to_do)
    assert path.exists(), "also when nothing is to be done"


# ---- requests that cannot be met ------------------------------------------------------------------------------------


def test_a_missing_dependency_is_named_with_the_command_that_builds_it(world: World):
    world.build(TOKENIZER)
    with pytest.raises(RequestError, match=rf"{TOKENS}: its dependency {RAW} is not finished; .*\n  snakemake {RAW}"):
        world.build(TOKENS, nothing_to_do)
    assert not world.path(TOKENS).exists(), "a refusal leaves no trace"


def test_a_missing_validation_set_is_a_missing_dependency(world: World):
    world.build_all(RAW, TOKENIZER, TOKENS)
    with pytest.raises(RequestError, match=r"its dependency tokenized/v/.* is not finished"):
        world.build(CHECKPOINT, nothing_to_do)


def test_a_damaged_dependency_is_named_with_its_file(world: World):
    world.build_all(RAW, TOKENIZER)
    world.path(RAW, "part-1").write_text("short")
    with pytest.raises(DamageError, match=rf"its dependency {RAW} is damaged: part-1: has 5 bytes instead of 185"):
        world.build(TOKENS, nothing_to_do)
    assert not world.path(TOKENS).exists()


def test_a_dependency_marked_by_a_full_verification_is_damaged(world: World):
    world.build_all(RAW, TOKENIZER)
    flip(world.path(RAW, "part-1"))
    world.build(TOKENS)
    assert not world.verify(RAW).ok
    with pytest.raises(DamageError, match="part-1: other bytes"):
        world.build(TOKENS, nothing_to_do, force="again")


def test_an_unresolved_source_is_refused_with_the_command_that_pins_it(world: World):
    world.edit(RAW, "0123456789abcdef0123456789abcdef", "unresolved")
    with pytest.raises(
        RequestError, match=rf"config/{RAW}.yaml: source.digest is unresolved.*\n  marin-build pin {RAW}"
    ):
        world.build(RAW, nothing_to_do)
    assert not world.path(RAW).exists()


def test_a_missing_recipe_is_the_books_error(world: World):
    with pytest.raises(RecipeError):
        world.build("raw/b/2026.06.28", nothing_to_do)


# ---- resuming --------------------------------------------------------------------------------------------------------


def test_what_an_earlier_attempt_made_is_resumed(world: World):
    with pytest.raises(Stopped):
        world.build(RAW, failing(Stopped("pre-empted"), after_parts=2))
    assert world.status(RAW).state is State.partial
    builder = Parts()
    record = world.build(RAW, builder).record
    assert builder.made == ["part-2"]
    assert len(record.provenance["attempts"]) == 2
    assert len(os.listdir(world.path(RAW, "logs"))) == 2, "a log for each attempt"


def test_an_unfinished_build_has_the_same_bytes_as_an_undisturbed_one(world: World):
    with pytest.raises(MarinError):
        world.build(RAW, failing(MarinError("flaky"), after_parts=1))
    digest = world.build(RAW).record.digest
    assert world.build(RAW, force="again").record.digest == digest


@pytest.mark.row(4)
def test_a_lost_record_costs_no_work(world: World):
    digest = world.build(RAW).record.digest
    world.path(RAW, ".artifact.json").unlink()
    builder = Parts()
    assert world.build(RAW, builder).record.digest == digest
    assert builder.made == []


def test_a_failure_before_any_work_does_not_bind_the_recipe(world: World):
    with pytest.raises(RequestError):
        world.build(RAW, failing(RequestError("no such corpus")))
    world.edit(RAW, "quickstart", "dclm_smoke")
    assert world.status(RAW).state is State.missing
    assert world.build(RAW).built


def test_unfinished_work_of_another_recipe_is_refused_with_the_fields(world: World):
    with pytest.raises(Stopped):
        world.build(RAW, failing(Stopped("pre-empted"), after_parts=2))
    world.edit(RAW, "quickstart", "dclm_smoke")
    before = world.files(RAW)
    with pytest.raises(
        DriftError, match=r"its unfinished work is of another recipe: source.corpus: quickstart .* dclm_smoke"
    ):
        world.build(RAW, nothing_to_do)
    assert world.files(RAW) == before, "nothing is lost"
    world.edit(RAW, "dclm_smoke", "quickstart")
    assert world.build(RAW).built


def test_force_drops_the_unfinished_work_of_another_recipe(world: World):
    with pytest.raises(Stopped):
        world.build(RAW, failing(Stopped("pre-empted"), after_parts=2))
    world.edit(RAW, "quickstart", "dclm_smoke")
    builder = Parts(1)
    record = world.build(RAW, builder, force="r1").record
    assert builder.made == ["part-0"]
    assert [entry["path"] for entry in record.content] == ["part-0"]
    assert world.verify(RAW).foreign == ()


def test_unfinished_work_on_other_input_bytes_is_refused(world: World):
    world.build_all(RAW, TOKENIZER)
    with pytest.raises(Stopped):
        world.build(TOKENS, failing(Stopped("pre-empted"), after_parts=2))
    world.build(RAW, Parts(salt="not reproducible"), force="r1")
    assert world.status(TOKENS).state is State.drifted
    with pytest.raises(DriftError, match=rf"on other input bytes: {RAW} digest: .*\n  snakemake -f {TOKENS}"):
        world.build(TOKENS, nothing_to_do)
    builder = Parts()
    world.build(TOKENS, builder, force="r2")
    assert builder.made == ["part-0", "part-1", "part-2"]


def test_unfinished_work_resumes_when_a_rebuilt_input_has_the_same_bytes(world: World):
    world.build_all(RAW, TOKENIZER)
    with pytest.raises(Stopped):
        world.build(TOKENS, failing(Stopped("pre-empted"), after_parts=2))
    world.build(RAW, force="r1")
    builder = Parts()
    world.build(TOKENS, builder)
    assert builder.made == ["part-2"]


def test_files_of_unknown_origin_are_set_aside_and_never_mixed_in(world: World):
    world.path(RAW).mkdir(parents=True)
    world.path(RAW, "part-0").write_text("from somewhere")
    builder = Parts()
    world.build(RAW, builder)
    assert builder.made == ["part-0", "part-1", "part-2"]
    assert world.verify(RAW).foreign == (".aside/part-0",)
    assert world.path(RAW, ".aside/part-0").read_text() == "from somewhere"


# ---- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [RequestError, DriftError, DamageError, NumericalError, RefusedError])
def test_a_failure_that_a_retry_cannot_cure_stops_the_retries_of_its_run(world: World, kind: type[MarinError]):
    with pytest.raises(kind):
        world.build(RAW, failing(kind("loss is NaN at step 3\n  details"), after_parts=1), run="r1")
    with pytest.raises(kind, match=r"^loss is NaN at step 3\n  details$"):
        world.build(RAW, nothing_to_do, run="r1")
    assert "the last attempt failed: loss is NaN at step 3" in world.status(RAW).reasons
    assert world.build(RAW, run="r2").built, "another run tries again"
    assert not world.build(RAW, run="r1").built, "and what is finished is finished"


@pytest.mark.parametrize("error", [Stopped("pre-empted"), MarinError("flaky network"), ValueError("a bug")])
def test_other_failures_are_tried_again_in_the_same_run(world: World, error: Exception):
    with pytest.raises(type(error)):
        world.build(RAW, failing(error, after_parts=1), run="r1")
    assert world.build(RAW, run="r1").built


def test_a_failure_is_in_the_log_and_a_bug_with_its_traceback(world: World):
    for error in (MarinError("flaky network"), ValueError("a bug")):
        with pytest.raises(type(error)):
            world.build(RAW, failing(error))
    texts = [path.read_text() for path in world.path(RAW, "logs").iterdir()]
    expected, unexpected = sorted(texts, key=lambda text: "a bug" in text)
    assert "ERROR flaky network" in expected
    assert "Traceback" not in expected
    assert "ValueError: a bug" in unexpected
    assert "Traceback" in unexpected


def test_a_metric_that_is_not_finite_is_a_numerical_failure(world: World):
    def build(context: BuildContext) -> BuildResult:
        Parts()(context)
        return BuildResult(metrics={"eval/loss": float("nan")})

    with pytest.raises(NumericalError, match="the metric eval/loss is nan"):
        world.build(RAW, build)
    assert world.record(RAW) is None


def test_numpy_scalars_are_metrics_too(world: World):
    import numpy

    def build(context: BuildContext) -> BuildResult:
        Parts()(context)
        return BuildResult(metrics={"loss": numpy.float32(0.5), "tokens": numpy.int64(3)})

    assert world.build(RAW, build).record.metrics == {"loss": 0.5, "tokens": 3}


@pytest.mark.parametrize("make", [lambda folder: None, lambda folder: (folder / "x").symlink_to("/etc/hostname")])
def test_a_builder_that_makes_nothing_that_can_be_kept_is_an_error(world: World, make):
    def build(context: BuildContext) -> BuildResult:
        make(context.folder)
        return BuildResult()

    with pytest.raises(MarinError, match=r"the builder made no file|plain files only"):
        world.build(RAW, build)
    assert world.record(RAW) is None


# ---- what changes while a build runs --------------------------------------------------------------------------------


@pytest.mark.row(22)
def test_a_recipe_edited_during_the_build_is_not_committed_and_nothing_is_lost(world: World):
    def build(context: BuildContext) -> BuildResult:
        result = Parts()(context)
        world.edit(RAW, "quickstart", "dclm_smoke")
        return result

    with pytest.raises(DriftError, match=r"source.corpus: quickstart .* dclm_smoke(.*\n)*.*edited during the build"):
        world.build(RAW, build)
    assert world.record(RAW) is None
    world.edit(RAW, "dclm_smoke", "quickstart")
    builder = Parts()
    assert world.build(RAW, builder).built
    assert builder.made == []


def test_a_comment_edited_during_the_build_changes_nothing(world: World):
    def build(context: BuildContext) -> BuildResult:
        world.edit(RAW, "source:", "# why not\nsource:")
        return Parts()(context)

    assert world.build(RAW, build).built


def test_a_recipe_broken_or_removed_during_the_build_is_not_committed(world: World):
    def break_it(context: BuildContext) -> BuildResult:
        world.edit(RAW, "source:", "source: [")
        return Parts()(context)

    with pytest.raises(DriftError, match="its recipe cannot be read any more"):
        world.build(RAW, break_it)
    (world.folder / "config" / f"{RAW}.yaml").unlink()
    assert world.record(RAW) is None


def test_the_recipe_of_a_dependency_edited_during_the_build_is_not_committed(world: World):
    world.build_all(RAW, TOKENIZER)

    def build(context: BuildContext) -> BuildResult:
        world.edit(RAW, "quickstart", "dclm_smoke")
        return Parts()(context)

    with pytest.raises(DriftError, match=rf"{RAW} source.corpus"):
        world.build(TOKENS, build)
    assert world.record(TOKENS) is None


@pytest.mark.row(24)
def test_a_dependency_rebuilt_to_other_bytes_during_the_build_is_not_mixed_in(world: World):
    world.build_all(RAW, TOKENIZER)

    def build(context: BuildContext) -> BuildResult:
        result = Parts()(context)
        world.build(RAW, Parts(salt="not reproducible"), force="r1")
        return result

    with pytest.raises(DriftError, match=f"its dependency {RAW} was rebuilt to other bytes during the build"):
        world.build(TOKENS, build)
    assert world.record(TOKENS) is None


def test_a_dependency_rebuilt_to_the_same_bytes_during_the_build_does_no_harm(world: World):
    world.build_all(RAW, TOKENIZER)

    def build(context: BuildContext) -> BuildResult:
        result = Parts()(context)
        world.build(RAW, force="r1")
        return result

    assert world.build(TOKENS, build).built


@pytest.mark.parametrize("harm", ["append", "remove", "unfinish"])
@pytest.mark.row(24)
def test_a_dependency_harmed_during_the_build_is_noticed(world: World, harm: str):
    world.build_all(RAW, TOKENIZER)

    def build(context: BuildContext) -> BuildResult:
        result = Parts()(context)
        if harm == "append":
            with open(world.path(RAW, "part-0"), "a") as file:
                file.write("more")
        else:
            world.path(RAW, "part-0" if harm == "remove" else ".artifact.json").unlink()
        return result

    with pytest.raises(DamageError, match=rf"its dependency {RAW} was (damaged|removed) during the build"):
        world.build(TOKENS, build)
    assert world.record(TOKENS) is None


def test_a_validation_set_rebuilt_during_the_build_can_be_tried_again(world: World):
    validation = "tokenized/v/2026.06.28"
    world.build_all(RAW, TOKENIZER, TOKENS, validation)

    def build(context: BuildContext) -> BuildResult:
        result = Parts()(context)
        world.build(validation, Parts(salt="other"), force="r1")
        return result

    with pytest.raises(MarinError, match="was rebuilt to other bytes") as caught:
        world.build(CHECKPOINT, build, run="r2")
    assert caught.value.exit_code == 1
    builder = Parts()
    assert world.build(CHECKPOINT, builder, run="r2").built
    assert builder.made == [], "the training itself is kept"


# ---- force -----------------------------------------------------------------------------------------------------------


def test_a_forced_rebuild_keeps_the_old_artifact_until_the_new_one_is_finished(world: World):
    old = world.build(RAW).record
    states = []

    def build(context: BuildContext) -> BuildResult:
        result = Parts(2, salt="new")(context)
        states.append((world.record(RAW), world.verify(RAW).ok))
        return result

    new = world.build(RAW, build, force="r1").record
    assert states == [(old, True)]
    assert new.digest != old.digest
    assert world.record(RAW) == new
    assert world.verify(RAW).ok
    assert world.files(RAW) == FINISHED - {"part-2"}, "what only the old one had is gone"


def test_a_run_forces_once(world: World):
    world.build(RAW)
    assert world.build(RAW, force="r1").built
    assert not world.build(RAW, nothing_to_do, force="r1").built
    assert world.build(RAW, force="r2").built


def test_the_note_of_a_forced_run_is_cleared_when_it_is_done(world: World):
    target = parse_target(RAW)
    forced.write(target, "r1")
    assert forced.read(target) == "r1"
    world.build(RAW, force=forced.read(target))
    assert forced.read(target) is None


def test_a_forced_rebuild_that_fails_keeps_the_old_one(world: World):
    old = world.build(RAW).record
    with pytest.raises(NumericalError):
        world.build(RAW, failing(NumericalError("NaN"), after_parts=2), force="r1", run="r1")
    assert world.record(RAW) == old
    assert world.verify(RAW).ok
    with pytest.raises(NumericalError):
        world.build(RAW, nothing_to_do, force="r1", run="r1")


def test_an_interrupted_rebuild_is_resumed_by_a_plain_run_and_by_a_retry_of_its_run(world: World):
    world.build(RAW)
    for force in (None, "r1"):
        with pytest.raises(Stopped):
            world.build(RAW, failing(Stopped("pre-empted"), after_parts=2), force="r1" if force else "r0")
        status = world.status(RAW)
        assert status.state is State.partial
        assert status.record is not None
        builder = Parts()
        assert world.build(RAW, builder, force=force).built
        assert builder.made == ["part-2"]
        assert world.files(RAW) == FINISHED


def test_another_force_starts_from_nothing(world: World):
    world.build(RAW)
    with pytest.raises(Stopped):
        world.build(RAW, failing(Stopped("pre-empted"), after_parts=2), force="r1")
    builder = Parts()
    world.build(RAW, builder, force="r2")
    assert builder.made == ["part-0", "part-1", "part-2"]


def test_an_interrupted_rebuild_can_be_given_up_by_removing_its_folder(world: World):
    old = world.build(RAW).record
    with pytest.raises(Stopped):
        world.build(RAW, failing(Stopped("pre-empted"), after_parts=2), force="r1")
    assert any(".rebuild" in reason for reason in world.status(RAW).reasons)
    shutil.rmtree(world.path(RAW, ".rebuild"))
    assert world.build(RAW, nothing_to_do).record == old


def test_an_interrupted_rebuild_of_an_edited_recipe_is_left_when_the_recipe_is_restored(world: World):
    old = world.build(RAW).record
    world.edit(RAW, "quickstart", "dclm_smoke")
    with pytest.raises(Stopped):
        world.build(RAW, failing(Stopped("pre-empted"), after_parts=2), force="r1")
    world.edit(RAW, "dclm_smoke", "quickstart")
    assert world.status(RAW).state is State.finished
    assert world.build(RAW, nothing_to_do).record == old


def test_force_rebuilds_a_drifted_artifact_and_remembers_what_it_replaced(world: World):
    old = world.build(RAW).record
    world.edit(RAW, "quickstart", "dclm_smoke")
    new = world.build(RAW, force="r1").record
    assert world.status(RAW).state is State.finished
    assert [entry["fingerprint"] for entry in new.replaced] == [old.fingerprint]
    assert new.replaced[0]["recipe"] == old.recipe


def test_a_file_may_become_a_folder_and_a_folder_a_file(world: World):
    def build(*names: str):
        def make(context: BuildContext) -> BuildResult:
            for name in names:
                (context.folder / name).parent.mkdir(parents=True, exist_ok=True)
                (context.folder / name).write_text(name)
            return BuildResult()

        return make

    for number, names in enumerate((("a", "b/c", "d/e/f"), ("a/b", "b", "g"), ("a", "b/c", "d/e/f"))):
        record = world.build(RAW, build(*names), force=f"r{number}").record
        assert tuple(entry["path"] for entry in record.content) == names
        assert world.verify(RAW).ok
        assert world.verify(RAW).foreign == ()
    assert "g" not in world.files(RAW)


def test_foreign_files_survive_a_rebuild(world: World):
    world.build(RAW)
    world.path(RAW, "notes.txt").write_text("mine")
    world.build(RAW, force="r1")
    assert world.path(RAW, "notes.txt").read_text() == "mine"
    assert world.verify(RAW).foreign == ("notes.txt",)


def test_the_name_of_the_logs_folder_is_reserved(world: World):
    world.build(RAW)

    def build(context: BuildContext) -> BuildResult:
        (context.folder / "logs").mkdir()
        return Parts()(context)

    with pytest.raises(MarinError, match="logs: the name is reserved"):
        world.build(RAW, build, force="r1")


# ---- early cutoff, outdated, dev ------------------------------------------------------------------------------------


def test_nothing_downstream_changes_when_a_rebuilt_dependency_has_the_same_bytes(world: World):
    world.build_all(RAW, TOKENIZER, TOKENS)
    world.build(RAW, force="r1")
    assert world.status(TOKENS).state is State.finished
    assert not world.build(TOKENS, nothing_to_do).built


def test_an_outdated_artifact_is_kept_and_told_and_rebuilt_by_force_only(world: World):
    world.build_all(RAW, TOKENIZER, TOKENS)
    world.build(RAW, Parts(salt="not reproducible"), force="r1")
    status = world.status(TOKENS)
    assert status.state is State.outdated
    assert not status.needs_build
    outcome = world.build(TOKENS, nothing_to_do)
    assert not outcome.built
    assert any(f"{RAW} digest" in reason for reason in outcome.reasons)
    assert world.build(TOKENS, force="r2").built
    assert world.status(TOKENS).state is State.finished


def test_a_finished_artifact_needs_its_dependencies_no_more(world: World):
    world.build_all(RAW, TOKENIZER, TOKENS)
    shutil.rmtree(world.path(RAW))
    assert world.status(TOKENS).state is State.finished
    assert not world.build(TOKENS, nothing_to_do).built


def test_a_dev_version_is_rebuilt_when_its_recipe_changed(world: World):
    world.build(RAW_DEV)
    assert not world.build(RAW_DEV, nothing_to_do).built
    world.edit(RAW_DEV, "quickstart", "dclm_smoke")
    status = world.status(RAW_DEV)
    assert status.state is State.drifted
    assert status.needs_build
    assert world.build(RAW_DEV).built
    assert world.status(RAW_DEV).state is State.finished


def test_a_dev_version_is_rebuilt_when_the_bytes_of_a_dependency_changed_and_not_otherwise(world: World):
    world.build_all(RAW_DEV, TOKENIZER, TOKENS_DEV)
    world.build(RAW_DEV, force="r1")
    assert not world.build(TOKENS_DEV, nothing_to_do).built
    world.build(RAW_DEV, Parts(salt="other"), force="r2")
    assert world.status(TOKENS_DEV).needs_build
    builder = Parts()
    assert world.build(TOKENS_DEV, builder).built
    assert builder.made == ["part-0", "part-1", "part-2"]


def test_unfinished_dev_work_of_another_recipe_is_set_aside(world: World):
    with pytest.raises(Stopped):
        world.build(RAW_DEV, failing(Stopped("pre-empted"), after_parts=2))
    world.edit(RAW_DEV, "quickstart", "dclm_smoke")
    builder = Parts(1)
    world.build(RAW_DEV, builder)
    assert builder.made == ["part-0"]
    assert world.verify(RAW_DEV).ok
    assert world.verify(RAW_DEV).foreign == (".aside/part-0", ".aside/part-1")


def test_a_drifted_dev_dependency_has_to_be_built_first(world: World):
    world.build_all(RAW_DEV, TOKENIZER, TOKENS_DEV)
    world.edit(RAW_DEV, "quickstart", "dclm_smoke")
    with pytest.raises(RequestError, match=f"its dependency {RAW_DEV} is of an older recipe; build it first"):
        world.build(TOKENS_DEV, nothing_to_do)


# ---- damage ----------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    """Flip one bit in the middle of a file; its size and time stay."""
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("harm", ["remove", "truncate", "flip"])
@pytest.mark.row(7)
@pytest.mark.row(9)
def test_a_damaged_artifact_repairs_only_what_is_damaged(world: World, harm: str):
    digest = world.build(RAW).record.digest
    path = world.path(RAW, "part-1")
    if harm == "remove":
        path.unlink()
    elif harm == "truncate":
        os.truncate(path, 7)
    else:
        flip(path)
        assert world.status(RAW).state is State.finished
        assert not world.verify(RAW).ok
    assert world.status(RAW).state is State.damaged
    builder = Parts()
    assert world.build(RAW, builder).record.digest == digest
    assert builder.made == ["part-1"]
    assert world.verify(RAW).ok
    assert world.status(RAW).state is State.finished


def test_damaged_bytes_are_set_aside_for_who_wants_to_look(world: World):
    world.build(RAW)
    os.truncate(world.path(RAW, "part-1"), 7)
    world.build(RAW)
    assert world.path(RAW, ".aside/part-1").stat().st_size == 7


def test_a_record_that_cannot_be_read_is_made_again_without_work(world: World):
    digest = world.build(RAW).record.digest
    flip(world.path(RAW, ".artifact.json"))
    assert world.status(RAW).state is State.damaged
    builder = Parts()
    assert world.build(RAW, builder).record.digest == digest
    assert builder.made == []


def test_without_record_and_attempt_cheap_kinds_are_built_anew(world: World):
    world.build(RAW)
    flip(world.path(RAW, ".artifact.json"))
    world.path(RAW, ".attempt.json").write_text("{")
    builder = Parts()
    assert world.build(RAW, builder).built
    assert builder.made == ["part-0", "part-1", "part-2"]
    assert world.verify(RAW).ok


def test_without_record_and_attempt_a_checkpoint_is_retrained_by_force_only(world: World):
    world.build_all(RAW, TOKENIZER, TOKENS, "tokenized/v/2026.06.28", CHECKPOINT)
    flip(world.path(CHECKPOINT, ".artifact.json"))
    world.path(CHECKPOINT, ".attempt.json").unlink()
    with pytest.raises(
        DamageError, match=rf"nothing says what its files were made from(.*\n)*  snakemake -f {CHECKPOINT}"
    ):
        world.build(CHECKPOINT, nothing_to_do)
    assert world.path(CHECKPOINT, "part-0").exists()
    assert world.build(CHECKPOINT, force="r1").built
    assert world.status(CHECKPOINT).state is State.finished


def test_a_damaged_artifact_is_not_repaired_from_other_input_bytes(world: World):
    world.build_all(RAW, TOKENIZER, TOKENS)
    world.build(RAW, Parts(salt="not reproducible"), force="r1")
    world.path(TOKENS, "part-1").unlink()
    with pytest.raises(DriftError, match="it is damaged, and was built on other input bytes"):
        world.build(TOKENS, nothing_to_do)
    assert world.record(TOKENS) is not None


def test_drift_of_a_damaged_artifact_is_told_first(world: World):
    world.build(RAW)
    world.path(RAW, "part-1").unlink()
    world.edit(RAW, "quickstart", "dclm_smoke")
    with pytest.raises(DriftError):
        world.build(RAW, nothing_to_do)


@pytest.mark.row(16)
def test_times_decide_nothing(world: World):
    world.build_all(RAW, TOKENIZER, TOKENS)
    for number, (folder, _, names) in enumerate(os.walk(world.folder)):
        for name in names:
            os.utime(os.path.join(folder, name), (number * 1e8, 4e9 - number * 1e8))
    for target in (RAW, TOKENIZER, TOKENS):
        assert not world.build(target, nothing_to_do).built
        assert world.verify(target).ok
