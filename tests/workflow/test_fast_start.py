"""Reading the Snakefile and planning import nothing heavy."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODEL = "checkpoints/tiny/2026.01.01"
HEAVY = """
jax jaxlib flax optax orbax datasets pyarrow numpy pandas scipy wandb tokenizers fastokens transformers torch
huggingface_hub fsspec zstandard orjson rich
"""


@pytest.fixture
def raising_stubs(repository):
    """Modules of the heavy names, first on the path, that raise when they are imported."""
    folder = repository.folder / "stubs"
    folder.mkdir()
    for name in HEAVY.split():
        (folder / f"{name}.py").write_text(f"raise ImportError('{name} was imported while planning')\n")
    return {"PYTHONPATH": str(folder)}


@pytest.mark.parametrize("mode", [["-n"], ["--dag"], []])
def test_planning_imports_nothing_heavy(repository, raising_stubs, mode):
    repository.finish_all()
    found = repository.snakemake(MODEL, *mode, **raising_stubs)
    assert found.code == 0, found.text
    assert "was imported while planning" not in found.text


def test_the_stubs_do_raise(repository, raising_stubs):
    found = repository.command(sys.executable, "-c", "import numpy", **raising_stubs)
    assert "numpy was imported while planning" in found.err


def test_the_adapter_adds_only_our_own_modules_to_what_snakemake_loads():
    program = """
import sys
import snakemake.cli, yaml
before = set(sys.modules)
import marin_build.adapter
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    added = set(found.stdout.split()) - set(sys.stdlib_module_names)
    assert added <= {"marin_build", "xxhash", "pydantic", "pydantic_core", "annotated_types", "typing_inspection"}
