"""Known fingerprints, pinned: an artifact that was made keeps its name for ever, whatever becomes of the code.

A new golden recipe adds a line to fingerprints.txt; no line there ever changes.
"""

from __future__ import annotations

from pathlib import Path

from marin_build.recipe.load import RecipeBook

FOLDER = Path(__file__).parent


def test_known_recipes_keep_their_fingerprints():
    book = RecipeBook(FOLDER / "recipes")
    found = "".join(f"{book.fingerprint(target)}  {target}\n" for target in book.targets())
    assert found == (FOLDER / "fingerprints.txt").read_text(encoding="utf-8")
