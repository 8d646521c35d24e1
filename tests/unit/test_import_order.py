"""Imports go one way, recipe ← artifact ← data ← model ← training, and what is on top is imported by none of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import marin_build

PACKAGE = Path(marin_build.__file__).parent
LAYERS = ("recipe", "artifact", "data", "model", "training")
"""Each may import itself and those to its left."""
FOR_ALL = {"__init__": (), "__version__": (), "errors": (), "foreign": (), "settings": ("errors", "foreign")}
"""Modules and names that all may import, and what these may import themselves."""


def imported(source: str, module: str) -> Iterator[tuple[int, str]]:
    """Line and first part below `marin_build` of everything of ours that a module imports, inside functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
        else:
            continue
        for name in names:
            ours, _, rest = name.partition(".")
            if ours == "marin_build" and rest:
                yield node.lineno, rest.partition(".")[0]


def allowed(part: str) -> set[str] | None:
    """What a layer or module may import of ours; None: anything, for it is on top."""
    if part in LAYERS:
        return {*LAYERS[: LAYERS.index(part) + 1], *FOR_ALL}
    return set(FOR_ALL[part]) if part in FOR_ALL else None


def violations(source: str, path: str) -> list[str]:
    """Imports of a file, given by its path below the package, that go the wrong way."""
    part = path.removesuffix(".py").partition("/")[0]
    module = f"marin_build.{path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}"
    may = allowed(part)
    return [
        f"marin_build/{path}:{line} imports {name}; {part} may import {', '.join(sorted(may)) or 'nothing of ours'}"
        for line, name in imported(source, f"{module}.__init__" if path.endswith("__init__.py") else module)
        if may is not None and name not in may
    ]


def test_imports_go_one_way() -> None:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 20
    wrong = [
        problem
        for file in files
        for problem in violations(file.read_text(encoding="utf-8"), file.relative_to(PACKAGE).as_posix())
    ]
    assert wrong == []


def test_every_package_has_its_place_in_the_order() -> None:
    packages = {file.parent.name for file in PACKAGE.glob("*/__init__.py")}
    assert packages == set(LAYERS), "say in LAYERS where the new package stands"


@pytest.mark.parametrize(
    ("path", "source", "found"),
    [
        ("recipe/load.py", "from marin_build.artifact.record import Record", "artifact"),
        ("recipe/load.py", "import marin_build.data.shards", "data"),
        ("artifact/store.py", "def late():\n    from marin_build.training import loop", "training"),
        ("data/loader.py", "from marin_build import cli", "cli"),
        ("data/loader.py", "from ..model import layers", "model"),
        ("data/__init__.py", "from ..training import loop", "training"),
        ("model/layers.py", "import importlib\nimportlib.import_module('marin_build.training.step')", "training"),
        ("training/build.py", "from marin_build.build import build", "build"),
        ("settings.py", "from marin_build.recipe import target", "recipe"),
        ("errors.py", "import marin_build.settings", "settings"),
        ("__init__.py", "from marin_build.recipe.target import Target", "recipe"),
    ],
)
def test_an_import_that_goes_the_wrong_way_is_found(path: str, source: str, found: str) -> None:
    (problem,) = violations(source, path)
    assert f"imports {found};" in problem


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("recipe/load.py", "from marin_build.recipe.target import Target\nfrom . import schema\nimport json"),
        ("training/step.py", "from marin_build.data import loader\nfrom ..model import layers\nimport marin_build"),
        ("artifact/store.py", "from marin_build.errors import MarinError\nfrom marin_build import __version__"),
        ("cli.py", "from marin_build.training import build\nimport marin_build.adapter"),
        ("recipe/load.py", "'from marin_build.training import step'  # a text, no import"),
    ],
)
def test_an_import_that_goes_the_right_way_is_left_alone(path: str, source: str) -> None:
    assert violations(source, path) == []
