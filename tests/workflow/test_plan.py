"""What a dry run says would run, and that Snakemake's own graph says the same."""

from __future__ import annotations

import os
import re
import shutil

import pytest

RAW = "raw/play/2026.01.01"
BYTES = "tokenizers/bytes/2026.01.01"
TOKENS = "tokenized/play/2026.01.01"
HELD_OUT = "tokenized/held_out/2026.01.01"
MODEL = "checkpoints/tiny/2026.01.01"
TOKENS_DEV = "tokenized/play/dev"
MODEL_DEV = "checkpoints/tiny/dev"


@pytest.fixture
def dry_run(snakemake):
    """A dry run whose table is the jobs of Snakemake's graph; returns target → why."""

    def run(*arguments):
        found = snakemake("-n", *arguments)
        assert found.code == 0, found.text
        jobs = re.findall(r"^rule \w+:\n(?:    .*\n)*?    wildcards: target=(\S+)", found.out, re.MULTILINE)
        assert sorted(found.table) == sorted(jobs)
        return found.table

    return run


def test_a_fresh_repository_builds_the_whole_closure(dry_run):
    assert dry_run(MODEL) == dict.fromkeys((RAW, BYTES, TOKENS, HELD_OUT, MODEL), "missing")


def test_only_what_is_missing_runs(repository, dry_run):
    repository.finish(RAW, BYTES, TOKENS)
    assert dry_run(MODEL) == {HELD_OUT: "missing", MODEL: "missing"}


def test_a_finished_artifact_does_not_bring_back_what_it_was_made_from(repository, dry_run):
    repository.finish_all()
    for gone in (RAW, TOKENS):
        (repository.artifact(gone) / ".artifact.json").unlink()
        (repository.artifact(gone) / "data.txt").unlink()
    assert dry_run(MODEL) == {}
    assert dry_run(MODEL, TOKENS) == {RAW: "missing", TOKENS: "missing"}


def test_a_new_validation_set_builds_only_itself_and_only_when_it_is_named(repository, dry_run):
    repository.finish_all()
    more = "tokenized/more/2026.01.01"
    repository.write(more, repository.path(HELD_OUT).read_text())
    repository.edit(MODEL, f"play: {HELD_OUT}", f"play: {HELD_OUT}, more: {more}")
    assert dry_run(MODEL) == {}
    assert dry_run(MODEL, more) == {more: "missing"}


def test_damage_anywhere_beneath_is_repaired_and_the_files_are_named(repository, dry_run):
    repository.finish_all()
    (repository.artifact(TOKENS) / "data.txt").write_text("cut")
    found = dry_run(MODEL)
    assert list(found) == [TOKENS]
    assert "damaged" in found[TOKENS]
    assert "data.txt" in found[TOKENS]
    repository.finish(TOKENS)
    (repository.artifact(HELD_OUT) / ".artifact.json").write_text("{")
    assert list(dry_run(MODEL)) == [HELD_OUT]


def test_an_artifact_made_elsewhere_needs_no_history(repository, snakemake):
    repository.finish_all()
    assert snakemake(MODEL).is_idle
    shutil.rmtree(repository.folder / ".snakemake")
    shutil.rmtree(repository.folder / ".marin")
    assert snakemake(MODEL).is_idle


@pytest.mark.row(16)
def test_ages_decide_nothing(repository, dry_run):
    repository.finish_all()
    assert dry_run(MODEL) == {}
    for target, seconds in ((RAW, 4e9), (TOKENS, 1e9), (MODEL, 0)):
        for path in (repository.artifact(target) / "data.txt", repository.mirror(target), repository.path(target)):
            os.utime(path, (seconds, seconds))
    assert dry_run(MODEL) == {}


def test_comments_and_descriptions_decide_nothing(repository, dry_run):
    repository.finish_all()
    repository.edit(TOKENS, "add_bos: true", "add_bos: true # as ever")
    repository.edit(MODEL, "measure:\n", "measure:\n  description: better words\n")
    assert dry_run(MODEL) == {}


def test_changed_rules_decide_nothing(repository, dry_run):
    repository.finish_all()
    assert dry_run(MODEL) == {}
    for rules in (repository.folder / "rules").iterdir():
        rules.write_text(rules.read_text().replace("-m marin_build", "-u -m marin_build"))
    assert dry_run(MODEL) == {}


# ---- force -----------------------------------------------------------------------------------------------------------


def test_force_names_that_target_only(repository, dry_run):
    repository.finish_all()
    assert dry_run("-f", MODEL) == {MODEL: "forced"}
    assert dry_run("-f", TOKENS) == {TOKENS: "forced"}


def test_forceall_names_the_closure(repository, dry_run):
    repository.finish_all()
    assert dry_run("-F", MODEL) == dict.fromkeys((RAW, BYTES, TOKENS, HELD_OUT, MODEL), "forced")


def test_forcerun_takes_artifacts_and_rules(repository, dry_run):
    repository.finish_all()
    assert dry_run("-R", TOKENS, "--", MODEL) == {TOKENS: "forced"}
    assert dry_run("-R", "tokenize", "--", MODEL) == {TOKENS: "forced", HELD_OUT: "forced"}
    assert dry_run("-R", f"./{TOKENS}/", "raw", "--", MODEL) == {RAW: "forced", TOKENS: "forced"}


def test_forcing_both_ends_leaves_the_middle_alone(repository, dry_run):
    repository.finish_all()
    assert dry_run("-R", RAW, MODEL, "--", MODEL) == {RAW: "forced", MODEL: "forced"}
    assert dry_run("-R", RAW, MODEL, "--omit-from", TOKENS, "--", MODEL) == {RAW: "forced"}


def test_a_missing_target_behind_a_damaged_one_runs_too(repository, dry_run):
    repository.finish(RAW, BYTES, TOKENS, HELD_OUT)
    (repository.artifact(TOKENS) / "data.txt").unlink()
    assert list(dry_run(MODEL)) == [TOKENS, MODEL]


def test_a_forced_target_gets_its_missing_inputs_first(repository, dry_run):
    repository.finish_all()
    (repository.artifact(TOKENS) / ".artifact.json").unlink()
    (repository.artifact(TOKENS) / "data.txt").unlink()
    assert dry_run("-f", MODEL) == {TOKENS: "missing", MODEL: "forced"}


# ---- part of a graph -------------------------------------------------------------------------------------------------


def test_until_stops_there(dry_run):
    assert set(dry_run(MODEL, "--until", TOKENS)) == {RAW, BYTES, TOKENS}
    assert set(dry_run(MODEL, "--until", "tokenize")) == {RAW, BYTES, TOKENS, HELD_OUT}


def test_omit_from_drops_what_follows(dry_run):
    assert set(dry_run(MODEL, "--omit-from", TOKENS)) == {RAW, BYTES, HELD_OUT}
    assert set(dry_run(MODEL, "--omit-from", "tokenize")) == {RAW, BYTES}


def test_a_prioritized_artifact_is_wanted_too(repository, dry_run):
    repository.finish(RAW, BYTES)
    assert dry_run(TOKENS, "--prioritize", HELD_OUT) == {TOKENS: "missing", HELD_OUT: "missing"}


# ---- dev -------------------------------------------------------------------------------------------------------------


def test_a_typed_dev_is_rebuilt_and_its_unchanged_inputs_are_not(repository, dry_run):
    repository.finish_all()
    repository.finish(TOKENS_DEV, MODEL_DEV)
    assert dry_run(MODEL_DEV) == {MODEL_DEV: "dev: rebuilt whenever it is asked for"}
    assert dry_run(TOKENS_DEV) == {TOKENS_DEV: "dev: rebuilt whenever it is asked for"}


def test_a_changed_dev_is_rebuilt_where_it_is_needed(repository, dry_run):
    repository.finish_all()
    repository.finish(TOKENS_DEV, MODEL_DEV)
    repository.edit(TOKENS_DEV, "add_eos: true", "add_eos: false")
    found = dry_run(MODEL_DEV)
    assert list(found) == [TOKENS_DEV, MODEL_DEV]
    assert "add_eos" in found[TOKENS_DEV]


def test_a_dev_is_rebuilt_where_its_input_has_other_bytes(repository, dry_run):
    repository.finish_all()
    repository.finish(TOKENS_DEV, MODEL_DEV)
    repository.finish(RAW, content="other")
    assert set(dry_run(MODEL_DEV)) == {TOKENS_DEV, MODEL_DEV}
    assert dry_run(MODEL) == {}, "fixed versions are outdated, not rebuilt"


def test_a_fixed_version_may_not_need_a_dev_one(repository, snakemake):
    repository.edit(MODEL, TOKENS, TOKENS_DEV)
    found = snakemake("-n", MODEL)
    assert found.code == 1
    assert f"config/{MODEL}.yaml" in found.text
    assert TOKENS_DEV in found.text


# ---- drift -----------------------------------------------------------------------------------------------------------


@pytest.mark.row(22)
def test_drift_stops_before_the_graph_with_the_fields(repository, snakemake):
    repository.finish_all()
    repository.edit(MODEL, "learning_rate: 3e-3", "learning_rate: 1e-3")
    for arguments in ([MODEL], ["-n", MODEL], ["-n", f"./{MODEL}/"]):
        found = snakemake(*arguments)
        assert found.code == 1
        assert "Building DAG" not in found.text
        for said in ("drift", "optimizer.learning_rate", "0.003", "0.001", "marin-build bump", "snakemake -f"):
            assert said in found.text
        assert "Traceback" not in found.text


def test_drift_upstream_shows_the_root_cause_once(repository, snakemake):
    repository.finish_all()
    repository.edit(BYTES, "<|end_of_text|>", "<|the_end|>")
    found = snakemake("-n", MODEL)
    assert found.code == 1
    assert "special_tokens.eos" in found.text
    assert BYTES in found.text
    assert found.text.count("what helps") == 2, "one for the model, one for the validation set beside it"


def test_pictures_are_drawn_of_a_drifted_target_with_a_warning(repository, snakemake):
    repository.finish_all()
    repository.edit(MODEL, "learning_rate: 3e-3", "learning_rate: 1e-3")
    for arguments in ([MODEL, "--dag"], [MODEL, "--rulegraph"]):
        found = snakemake(*arguments)
        assert found.code == 0
        assert found.out.startswith("digraph")
        assert "Warning: drift" in found.err
    assert MODEL in snakemake(MODEL, "--summary").out


def test_a_forced_target_may_have_drifted(repository, dry_run):
    repository.finish_all()
    repository.edit(MODEL, "learning_rate: 3e-3", "learning_rate: 1e-3")
    assert dry_run("-f", MODEL) == {MODEL: "forced"}


def test_drift_beneath_a_forced_target_still_stops(repository, snakemake):
    repository.finish_all()
    repository.edit(TOKENS, "add_eos: true", "add_eos: false")
    found = snakemake("-n", "-f", MODEL)
    assert found.code == 1
    assert "add_eos" in found.text


def test_unpinned_sources_are_planned_but_stop_a_real_run(repository, snakemake):
    for target in (RAW,):
        text = repository.path(target).read_text()
        repository.write(target, re.sub(r"digest: \S+", "digest: unresolved", text))
    assert snakemake("-n", TOKENS).code == 0
    found = snakemake(TOKENS)
    assert found.code == 1
    assert f"marin-build pin {RAW}" in found.text
    assert "source.digest" in found.text
    assert not repository.artifact(BYTES).exists(), "nothing was begun"
