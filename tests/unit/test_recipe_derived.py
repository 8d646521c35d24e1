"""Derived targets: their recipe follows from that of another."""

from __future__ import annotations

from pathlib import Path

import pytest

from marin_build.errors import RecipeError
from marin_build.recipe import edit
from marin_build.recipe.derived import base_of, part_target
from marin_build.recipe.load import RecipeBook
from marin_build.recipe.target import parse_target

TRAIN = parse_target("tokenized/quickstart/train/2026.06.28")


@pytest.fixture
def book() -> RecipeBook:
    return RecipeBook(Path(__file__).parents[2] / "config")


def test_a_part_is_made_from_what_its_set_is_made_from(book: RecipeBook):
    part = part_target(TRAIN, 1, 4)
    assert str(part) == "parts/quickstart/train/00001-of-00004/2026.06.28"
    assert base_of(part) == TRAIN
    recipe = book.load(part)
    assert (recipe.of, recipe.part, recipe.parts) == (str(TRAIN), 1, 4)
    assert recipe.set.source == book.load(TRAIN).source
    assert book.exists(part)


def test_each_part_has_a_fingerprint_of_its_own_and_what_is_said_of_the_set_counts_nowhere(
    book: RecipeBook, tmp_path: Path
):
    fingerprints = {book.fingerprint(part_target(TRAIN, part, parts)) for parts in (2, 3) for part in range(parts)}
    assert len(fingerprints) == 5
    page = book.path(TRAIN).read_text()
    for target in ("raw/quickstart/2026.06.28", "tokenizers/quickstart/2026.06.28"):
        copy = tmp_path / f"{target}.yaml"
        copy.parent.mkdir(parents=True)
        copy.write_bytes(book.read(parse_target(target)))
    copy = tmp_path / f"{TRAIN}.yaml"
    copy.parent.mkdir(parents=True)
    copy.write_text(page.replace("Seven plays", "Some plays") + "execution:\n  slurm: {parts: 8}\n")
    assert RecipeBook(tmp_path).fingerprint(part_target(TRAIN, 1, 3)) in fingerprints


@pytest.mark.parametrize("share", ["00004-of-00004", "4-of-8", "train", "00000-of-00000"])
def test_a_share_that_cannot_be_is_refused_with_one_that_can(book: RecipeBook, share: str):
    target = parse_target(f"parts/quickstart/train/{share}/2026.06.28")
    with pytest.raises(RecipeError, match=r"is no share of the work.*\n.*00000-of-00008"):
        book.load(target)
    assert not book.exists(target)


def test_a_part_of_a_set_without_a_recipe_is_told_like_the_set(book: RecipeBook):
    with pytest.raises(RecipeError, match=r"config/tokenized/quickstart/trian/2026\.06\.28\.yaml does not exist"):
        book.load(parse_target("parts/quickstart/trian/00000-of-00002/2026.06.28"))


def test_nobody_writes_the_recipe_of_a_derived_target(book: RecipeBook):
    with pytest.raises(
        RecipeError, match="follows from that of another\n  marin-build bump tokenized/quickstart/train"
    ):
        edit.bump(book, part_target(TRAIN, 0, 2))
