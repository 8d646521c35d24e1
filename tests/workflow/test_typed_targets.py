"""What a user may type for an artifact, and what is said to a typo."""

from __future__ import annotations

import pytest

RAW = "raw/play/2026.01.01"
TOKENS = "tokenized/play/2026.01.01"
HELD_OUT = "tokenized/held_out/2026.01.01"
MODEL = "checkpoints/tiny/2026.01.01"
QUICKSTART = "checkpoints/quickstart/2026.06.28"


@pytest.mark.parametrize(
    "typed",
    [
        MODEL,
        f"./{MODEL}",
        f"{MODEL}/",
        f"artifacts/{MODEL}",
        f"artifacts/{MODEL}/.artifact.json",
        f"config/{MODEL}.yaml",
        f".marin/records/{MODEL}.json",
        "{folder}/artifacts/" + MODEL,
        "{folder}/config/" + MODEL + ".yaml",
    ],
)
def test_every_spelling_of_a_finished_artifact_is_that_artifact(repository, snakemake, typed):
    repository.finish_all()
    assert snakemake(typed.format(folder=repository.folder)).is_idle


@pytest.mark.parametrize("typed", [MODEL, f"artifacts/{MODEL}/", f"config/{MODEL}.yaml"])
def test_every_spelling_of_a_missing_artifact_is_planned(snakemake, typed):
    assert snakemake("-n", typed).table[MODEL] == "missing"


def test_several_targets_are_planned_together(repository, snakemake):
    repository.finish(RAW)
    found = snakemake("-n", TOKENS, f"./{HELD_OUT}")
    assert set(found.table) == {"tokenizers/bytes/2026.01.01", TOKENS, HELD_OUT}


def test_no_target_is_the_quickstart(snakemake):
    found = snakemake("-n")
    assert list(found.table)[-1] == QUICKSTART
    assert len(found.table) == 6


def test_the_name_of_a_rule_is_still_a_target(snakemake):
    assert list(snakemake("-n", "quickstart").table)[-1] == QUICKSTART


def test_force_without_a_target_forces_the_quickstart_and_not_only_its_alias(repository, snakemake):
    chain = ["raw", "tokenizers", "tokenized", "checkpoints"]
    names = [f"{kind}/quickstart/2026.06.28" for kind in chain]
    names[2:3] = ["tokenized/quickstart/train/2026.06.28", "tokenized/quickstart/validation/2026.06.28"]
    repository.finish(*names)
    found = snakemake("-n", "-f")
    assert found.table == {QUICKSTART: "forced"}
    assert "rule train:" in found.out
    assert snakemake().is_idle


def test_a_rule_for_many_artifacts_is_no_target(snakemake):
    found = snakemake("-n", "train")
    assert found.code == 1
    assert "'train' is a rule for many artifacts" in found.text
    assert "Traceback" not in found.text


def test_a_file_of_a_rule_of_ones_own_pulls_the_artifacts_that_it_reads(repository, snakemake):
    rule = f"""
rule note:
    input:
        ".marin/records/{TOKENS}.json",
    output:
        "note.txt",
    shell:
        "cp {{input}} {{output}}"
"""
    snakefile = repository.folder / "Snakefile"
    snakefile.write_text(snakefile.read_text() + rule)
    assert set(snakemake("-n", "note.txt").table) == {RAW, "tokenizers/bytes/2026.01.01", TOKENS}
    assert list(snakemake("-n", "note").table)[-1] == TOKENS


@pytest.mark.parametrize(
    ("typed", "said", "meant"),
    [
        ("checkpoints/tiny/2026.1.01", "neither YYYY.MM.DD", MODEL),
        ("checkpoints/tiny/2026.02.30", "not a real date", MODEL),
        ("checkpoints/tiny/2026.01.02", "has no recipe", MODEL),
        ("checkpoints/tiny", "", MODEL),
        ("chekpoints/tiny/2026.01.01", "'chekpoints' is none of raw, tokenizers, tokenized, checkpoints", MODEL),
        ("checkpoints/tyni/2026.01.01", "has no recipe", MODEL),
        ("config/checkpoints/tyni/2026.01.01.yaml", "has no recipe", MODEL),
        ("quickstrat", "not a target", "did you mean raw/quickstart/2026.06.28?"),
    ],
)
def test_a_typo_is_told_what_was_meant(snakemake, typed, said, meant):
    found = snakemake("-n", typed)
    assert found.code == 1
    first, *more = found.text.split("Error: ")[1].splitlines()
    assert said in first
    assert meant in "\n".join(more)
    assert "Traceback" not in found.text
    assert "Snakefile" not in found.text.split("Error: ")[1], "the line of a Snakefile is no help"


@pytest.mark.parametrize("mode", [[], ["--dag"], ["--summary"], ["--touch"], ["--delete-all-output"]])
def test_a_typo_is_told_in_every_mode(snakemake, mode):
    found = snakemake("checkpoints/tyni/2026.01.01", *mode)
    assert found.code == 1
    assert f"did you mean {MODEL}" in found.text
    assert found.out == ""


@pytest.mark.parametrize("option", ["-R", "--until", "--omit-from", "--prioritize"])
def test_a_typo_in_any_option_is_told(snakemake, option):
    found = snakemake("-n", MODEL, option, "tokenized/play/2026.01.10")
    assert found.code == 1
    assert "tokenized/play/2026.01.10 has no recipe" in found.text
    assert f"did you mean {TOKENS}" in found.text


def test_a_missing_recipe_of_a_dependency_names_who_needs_it(repository, snakemake):
    repository.path(TOKENS).unlink()
    found = snakemake("-n", MODEL)
    assert found.code == 1
    first = found.text.split("Error: ")[1].splitlines()[0]
    assert f"config/{MODEL}.yaml" in first
    assert TOKENS in first
    assert f"needed by {MODEL}" in found.text


def test_a_mistake_in_a_recipe_is_one_line_with_file_and_field(repository, snakemake):
    repository.edit(MODEL, "seed: 0", "sed: 0")
    found = snakemake("-n", MODEL)
    assert found.code == 1
    assert f"Error: config/{MODEL}.yaml:" in found.text
    assert "did you mean 'seed'?" in found.text
    assert "Traceback" not in found.text
