"""What parses the Snakefile and looks at artifacts starts without heavy libraries: here they are stubs that raise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import marin_build

PACKAGE = Path(marin_build.__file__).parent
HEAVY = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax",
    "datasets",
    "pyarrow",
    "numpy",
    "pandas",
    "wandb",
    "tokenizers",
    "fastokens",
    "transformers",
    "huggingface_hub",
    "torch",
    "fsspec",
)


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of modules that raise when they are imported. Not ImportError: nobody may go on without them."""
    folder = tmp_path_factory.mktemp("stubs")
    for name in HEAVY:
        (folder / f"{name}.py").write_text(f"raise AssertionError('{name} is imported')\n")
    return folder


def run_with_stubs(code: str, stubs: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{stubs}{os.pathsep}{PACKAGE.parent}"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=stubs, env=environment, capture_output=True, text=True, timeout=120)


def modules_of(layer: str) -> list[str]:
    return [f"marin_build.{layer}.{file.stem}" for file in sorted((PACKAGE / layer).glob("[!_]*.py"))]


@pytest.mark.parametrize("layer", ["recipe", "artifact"])
def test_every_module_of_a_light_layer_starts_without_heavy_libraries(layer: str, stubs: Path) -> None:
    modules = modules_of(layer)
    assert len(modules) > 5
    done = run_with_stubs(f"import {', '.join(modules)}", stubs)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", ["errors", "settings", "adapter", "cli", "build", "mixture_report"])
def test_a_light_module_starts_without_heavy_libraries(module: str, stubs: Path) -> None:
    done = run_with_stubs(f"import marin_build.{module}", stubs)
    assert done.returncode == 0, done.stderr


def test_a_mixture_is_shown_without_heavy_libraries(stubs: Path) -> None:
    arguments = ["mixture", "checkpoints/dclm_1b_1x/2026.06.28", "--recipes", str(PACKAGE.parent / "config"), "--json"]
    done = run_with_stubs(f"from marin_build.cli import main; raise SystemExit(main({arguments}))", stubs)
    assert done.returncode == 0, done.stderr
    assert '"feasible": true' in done.stdout


@pytest.mark.parametrize("name", HEAVY)
def test_a_stub_stands_before_the_library(name: str, stubs: Path) -> None:
    done = run_with_stubs(f"import {name}", stubs)
    assert done.returncode != 0
    assert f"{name} is imported" in done.stderr


def test_a_module_that_needs_a_heavy_library_is_told_from_a_light_one(stubs: Path) -> None:
    done = run_with_stubs("import marin_build.data.loader", stubs)
    assert done.returncode != 0
    assert "numpy is imported" in done.stderr
