"""Pictures and summaries: what pipes into other programs."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

RAW = "raw/play/2026.01.01"
BYTES = "tokenizers/bytes/2026.01.01"
TOKENS = "tokenized/play/2026.01.01"
HELD_OUT = "tokenized/held_out/2026.01.01"
MODEL = "checkpoints/tiny/2026.01.01"
CLOSURE = (RAW, BYTES, TOKENS, HELD_OUT, MODEL)


def test_the_dag_shows_artifacts_as_typed_and_finished_ones_dashed(repository, snakemake):
    repository.finish(RAW, BYTES, TOKENS)
    found = snakemake(MODEL, "--dag")
    assert found.out.startswith("digraph")
    nodes = dict(re.findall(r'label = "\w+\\ntarget: ([^"\\]+)", color = "[^"]+", style="([^"]+)"', found.out))
    assert set(nodes) == set(CLOSURE)
    assert {target for target, style in nodes.items() if "dashed" in style} == {RAW, BYTES, TOKENS}


def test_the_dag_pipes_into_dot(snakemake):
    if not shutil.which("dot"):
        pytest.skip("graphviz is not installed")
    found = snakemake(MODEL, "--dag")
    drawn = subprocess.run(["dot", "-Tsvg"], input=found.out, capture_output=True, text=True)
    assert drawn.returncode == 0
    assert "</svg>" in drawn.stdout
    assert MODEL in drawn.stdout


def test_a_mermaid_picture_shows_artifacts_too(snakemake):
    found = snakemake(MODEL, "--dag", "mermaid-js")
    assert found.out.startswith("---\ntitle: DAG\n---\nflowchart TB")
    assert all(target in found.out for target in CLOSURE)


def test_the_rulegraph_shows_the_four_stages(snakemake):
    found = snakemake(MODEL, "--rulegraph")
    assert set(re.findall(r'label = "(\w+)"', found.out)) == {"raw", "tokenizer", "tokenize", "train"}


def test_a_dry_run_says_on_stderr_what_runs_and_why(snakemake):
    found = snakemake("-n", MODEL)
    assert "5 of 5 artifacts would be built:" in found.err
    assert "artifacts would be built" not in found.out


def test_the_dag_of_the_default_target_needs_no_target(snakemake):
    assert "checkpoints/quickstart/2026.06.28" in snakemake("--dag").out


def test_a_summary_has_one_line_an_artifact(repository, snakemake):
    repository.finish(RAW, BYTES, TOKENS)
    rows = [line.split("\t") for line in snakemake(MODEL, "--summary").out.splitlines()[1:]]
    status = {row[0]: row[-1] for row in rows}
    assert set(status) == {f".marin/records/{target}.json" for target in CLOSURE}
    assert status[f".marin/records/{TOKENS}.json"] == "no update"
    assert status[f".marin/records/{MODEL}.json"] == "update pending"


def test_looking_writes_nothing_but_mirrors(repository, snakemake):
    repository.finish(RAW, BYTES)
    before = sorted(repository.folder.glob("artifacts/**/*"))
    for mode in (["-n"], ["-n", "-f"], ["--dag"], ["--summary"], ["--touch"], ["--list-changes", "code"]):
        snakemake(TOKENS, *mode)
    assert sorted(repository.folder.glob("artifacts/**/*")) == before
    assert not (repository.folder / ".marin/forced").exists()


def test_touch_and_delete_all_output_change_nothing_that_is_finished(repository, snakemake):
    repository.finish_all()
    assert snakemake(MODEL, "--touch").code == 0
    assert snakemake(MODEL, "--delete-all-output").code == 0
    assert repository.record(MODEL) is not None
    assert snakemake(MODEL).is_idle
