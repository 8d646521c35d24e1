"""From another repository: its own recipes and rules, and the package installed as anyone would, not editable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BYTES = "tokenizers/bytes/2026.01.01"
TOKENS = "tokenized/play/2026.01.01"

SNAKEFILE = f"""
configfile: "settings.yaml"


module marin_build:
    snakefile:
        "{ROOT}/Snakefile"
    config:
        config["marin_build"]


use rule * from marin_build as marin_*


rule sizes:
    input:
        ".marin/records/{TOKENS}.json",
    output:
        "sizes.txt",
    shell:
        "du artifacts/{TOKENS} > {{output}}"


onerror:
    shell("touch told")


default_target = "sizes"
"""

SETTINGS = """
mine: {anything: 1}
marin_build: {recipes: experiments, prefix: artifacts}
"""


@pytest.fixture
def elsewhere(repository):
    """A repository that holds recipes and a Snakefile of its own, and nothing of this one."""
    for name in ("Snakefile", "rules", "profiles", "tpu", "gpu", "local", "slurm"):
        path = repository.folder / name
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    (repository.folder / "config").rename(repository.folder / "experiments")
    (repository.folder / "Snakefile").write_text(SNAKEFILE)
    (repository.folder / "settings.yaml").write_text(SETTINGS)
    return repository


def test_typed_targets_work_through_a_module(elsewhere, snakemake):
    found = snakemake("-n", TOKENS)
    assert found.code == 0, found.text
    assert list(found.table)[-1] == TOKENS
    assert "rule marin_tokenize:" in found.out
    assert TOKENS in snakemake("-n", f"experiments/{TOKENS}.yaml").table
    assert f"did you mean {TOKENS}" in snakemake("-n", "tokenized/play/2026.01.02").text
    assert snakemake("-n", "-R", "marin_tokenize", "--", TOKENS).table[TOKENS] == "forced"


def test_a_rule_of_the_other_repository_reads_an_artifact(elsewhere):
    found = elsewhere.snakemake("sizes", "--cores", "2")
    assert found.code == 0, found.text
    assert TOKENS in (elsewhere.folder / "sizes.txt").read_text()
    assert elsewhere.snakemake("sizes", "--cores", "2").is_idle


def test_hooks_of_the_other_repository_still_run(elsewhere):
    elsewhere_recipe = elsewhere.folder / "experiments" / f"{TOKENS}.yaml"
    elsewhere_recipe.write_text(elsewhere_recipe.read_text().replace("text_key: text", "text_key: no_such_key"))
    found = elsewhere.snakemake(TOKENS, "--cores", "2")
    assert found.code == 1
    assert f"{TOKENS} was not finished; the last lines of" in found.text
    assert (elsewhere.folder / "told").exists()


def test_a_plain_installation_builds_the_same(elsewhere, tmp_path):
    source, installed = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "marin_build", source / "marin_build", ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    made = subprocess.run([*pip, "--target", installed, source], capture_output=True, text=True, env=dict(os.environ))
    assert made.returncode == 0, made.stderr
    environment = {"PYTHONPATH": str(installed)}
    where = elsewhere.command(sys.executable, "-c", "import marin_build; print(marin_build.__file__)", **environment)
    assert where.out.startswith(str(installed))
    found = elsewhere.snakemake(TOKENS, "--cores", "2", **environment)
    assert found.code == 0, found.text
    record = elsewhere.record(TOKENS)
    assert record is not None
    assert elsewhere.snakemake(TOKENS, "--cores", "2").is_idle, "this tree and the installation agree"
