"""Fixtures that every ring of tests may use."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from builders import Workbench
from hypothesis import settings

from marin_build.recipe.load import RecipeBook
from marin_build.recipe.target import parse_target

settings.register_profile("patient", deadline=None)  # a busy machine is no failure
settings.load_profile("patient")

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
