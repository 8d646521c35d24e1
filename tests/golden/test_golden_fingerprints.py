"""Known fingerprints, pinned: an artifact that was made keeps its name for ever, whatever becomes of the code.

A new golden recipe adds a line to fingerprints.txt, a new shipped one to shipped.txt. No line of the first changes;
one of the second only with a line under "Fingerprints" of the changelog, for all who built that artifact meet drift.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from marin_build.recipe.load import RecipeBook

FOLDER = Path(__file__).parent
SHIPPED = FOLDER.parents[1] / "config"


@pytest.mark.parametrize(("recipes", "pinned"), [(FOLDER / "recipes", "fingerprints.txt"), (SHIPPED, "shipped.txt")])
def test_known_recipes_keep_their_fingerprints(recipes, pinned):
    book = RecipeBook(recipes)
    found = "".join(f"{book.fingerprint(target)}  {target}\n" for target in book.targets())
    assert found == (FOLDER / pinned).read_text(encoding="utf-8")
