"""Fixtures that every ring of tests may use."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from artifact_world import World
from builders import Workbench
from fault_matrix import pytest_addoption, pytest_configure, pytest_itemcollected
from hypothesis import settings

from marin_build.artifact import provenance
from marin_build.recipe.load import RecipeBook
from marin_build.recipe.target import parse_target

__all__ = ["pytest_addoption", "pytest_configure", "pytest_itemcollected"]

settings.register_profile("patient", deadline=None)  # a busy machine is no failure
settings.load_profile("patient")

MEMORY = Path("/dev/shm")
GOLDEN_RECIPES = Path(__file__).parent / "golden" / "recipes"


@dataclass(frozen=True)
class RecipeTree:
    """A folder of recipes that a test may edit."""

    folder: Path

    @property
    def book(self) -> RecipeBook:
        """A new book, so that edits are seen."""
        return RecipeBook(self.folder)

    def text(self, target: str) -> str:
        return self.book.path(parse_target(target)).read_text(encoding="utf-8")

    def write(self, target: str, text: str) -> None:
        path = self.book.path(parse_target(target))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def edit(self, target: str, old: str, new: str) -> None:
        """Replace the first `old` in a recipe."""
        text = self.text(target)
        assert old in text
        self.write(target, text.replace(old, new, 1))

    def fingerprint(self, target: str) -> str:
        return self.book.fingerprint(parse_target(target))


@pytest.fixture
def recipe_tree(tmp_path: Path) -> RecipeTree:
    """A copy of the golden recipes: every kind, every type of source, tokenizer and format, one tiny checkpoint."""
    return RecipeTree(Path(shutil.copytree(GOLDEN_RECIPES, tmp_path / "config")))


@pytest.fixture
def workbench(tmp_path: Path) -> Workbench:
    return Workbench(tmp_path / "bench")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Recipes of every kind in `config`, no artifact yet; the working directory is the world's folder."""
    monkeypatch.chdir(tmp_path)
    return World.make(tmp_path)


@pytest.fixture
def memory_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A world in memory, without a look at git and at the code: for tests that build hundreds of times."""
    monkeypatch.setattr(provenance, "circumstances", lambda recipes, command: {})
    monkeypatch.setattr(provenance, "code_hashes", dict)
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        monkeypatch.chdir(folder)
        yield World.make(Path(folder))
        monkeypatch.undo()


@pytest.fixture
def memory_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands take a prefix memory://…: all of them run in the process of the test, which it lasts for."""
    monkeypatch.setattr("marin_build.settings._check_prefix", lambda value: None)
