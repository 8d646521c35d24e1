"""The profiles that lie in the root, straight after installation."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

MODEL = "checkpoints/tiny/2026.01.01"
BYTES = "tokenizers/bytes/2026.01.01"

BLOCKED = """
import importlib.machinery, pkgutil

every, find = pkgutil.iter_modules, importlib.machinery.PathFinder.find_spec
hidden = "snakemake_executor_plugin_"
pkgutil.iter_modules = lambda *a, **k: (module for module in every(*a, **k) if not module.name.startswith(hidden))
importlib.machinery.PathFinder.find_spec = lambda name, *a: None if name.startswith(hidden) else find(name, *a)
"""


@pytest.fixture
def without_plugins(tmp_path):
    """An environment in which no executor plugin is installed."""
    folder = tmp_path / "without_plugins"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BLOCKED)
    return {"PYTHONPATH": str(folder)}


def with_sbatch(folder: Path) -> dict[str, str]:
    program = folder / "bin/sbatch"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{Path(sys.executable).parent}:/usr/bin:/bin"}


@pytest.mark.parametrize("profile", ["local", "gpu", "tpu"])
def test_a_dry_run_works_with_each_profile(snakemake, profile):
    found = snakemake("--profile", profile, "-n", MODEL)
    assert found.code == 0, found.text
    assert found.table[MODEL] == "missing"
    assert f"--config platform={profile}" in snakemake("--profile", profile, "-n", "-p", BYTES).out


def test_the_tpu_profile_asks_for_a_slice_to_train_on_only(snakemake):
    out = snakemake("--profile", "tpu", "-n", MODEL).out
    assert out.count("accelerator=v4-128") == 1
    assert out.count("accelerator=cpu") == 4


def test_a_real_run_on_tpus_says_that_it_is_not_built_yet(repository, snakemake):
    found = snakemake("--profile", "tpu", MODEL)
    assert found.code == 1
    assert "Error: launching TPU slices is not built yet" in found.text
    assert "Traceback" not in found.text
    assert not repository.artifact(BYTES).exists()


@pytest.mark.parametrize(("profile", "extra"), [("tpu", "tpu"), ("slurm", "slurm")])
def test_a_missing_plugin_names_the_extra_to_install(repository, without_plugins, profile, extra):
    found = repository.snakemake("--profile", profile, "-n", MODEL, **without_plugins)
    assert found.code == 1
    assert f"pip install 'marin_build[{extra}]'" in found.err
    assert "invalid choice" not in found.text
    assert "Traceback" not in found.text


def test_gpus_are_those_of_slurm_where_sbatch_is(repository, without_plugins, tmp_path):
    found = repository.snakemake("--profile", "gpu", "-n", MODEL, **without_plugins, **with_sbatch(tmp_path))
    assert found.code == 1
    assert "pip install 'marin_build[slurm]'" in found.err


def test_gpus_are_those_of_this_machine_where_no_sbatch_is(repository, without_plugins):
    found = repository.snakemake("--profile", "gpu", "-n", MODEL, **without_plugins, PATH="/usr/bin:/bin")
    assert found.code == 0, found.text


@pytest.mark.skipif(find_spec("snakemake_executor_plugin_slurm") is None, reason="needs the slurm extra")
def test_slurm_is_asked_for_gpus_to_train_on_only(repository, tmp_path):
    found = repository.snakemake("--profile", "gpu", "-n", MODEL, **with_sbatch(tmp_path))
    assert found.code == 0, found.text
    assert found.out.count("gres=gpu:8") == 1
    cpu = repository.snakemake("--profile", "slurm", "-n", MODEL)
    assert cpu.code == 0, cpu.text
    assert "gres" not in cpu.out


def test_an_override_keeps_the_profile(snakemake):
    found = snakemake("--profile", "gpu", "-n", "-p", BYTES, "--config", "wait=true")
    assert "platform=gpu" in found.out
    assert "wait=true" in found.out
