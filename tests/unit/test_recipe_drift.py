from __future__ import annotations

import pytest

from marin_build.recipe.drift import compare
from marin_build.recipe.target import parse_target

TINY = "checkpoints/tiny/2026.06.28"


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ({"a": {"b": 0.003}}, {"a": {"b": 0.001}}, ["a.b: 0.003 → 0.001"]),
        ({"a": 1}, {"a": 1}, []),
        ({"a": 1}, {"a": 1.0}, ["a: 1 → 1.0"]),
        ({"a": True}, {"a": 1}, ["a: true → 1"]),
        ({"a": None}, {"a": {"x": 1, "y": [None]}}, ["a: null → {x: 1, y: [null]}"]),
        ({"a": {}}, {"a": {"b": {"c": 1}}}, ["a.b: (not there) → {c: 1}"]),
        ({"a": {"b": "x"}}, {"a": {}}, ["a.b: x → (not there)"]),
        ({"a": [1, 2]}, {"a": [1, 3]}, ["a[1]: 2 → 3"]),
        ({"a": [1, 2]}, {"a": [1]}, ["a: [1, 2] → [1]"]),
        ({"a": "x"}, {"a": "x y"}, ["a: x → 'x y'"]),
        ({"a": "1"}, {"a": "\x1b[2J"}, ["a: 1 → '\\x1b[2J'"]),
        ({"b": 1, "a": 1}, {"a": 2, "b": 2}, ["a: 1 → 2", "b: 1 → 2"]),
    ],
)
def test_each_field_that_differs_is_one_readable_line(old, new, lines):
    assert [str(change) for change in compare(old, new)] == lines


def test_absence_and_null_are_told_apart():
    (change,) = compare({}, {"a": None})
    assert (change.added, change.removed, change.new) == (True, False, None)
    (change,) = compare({"a": None}, {})
    assert (change.added, change.removed, change.old) == (False, True, None)


def test_the_difference_of_two_recipes_is_their_edit(recipe_tree):
    before = recipe_tree.book.identity(parse_target(TINY))
    recipe_tree.edit(TINY, "learning_rate: 3e-3", "learning_rate: 1e-3")
    recipe_tree.edit(
        TINY, "rope_scaling:\n    type: llama3\n    factor: 8\n", "rope_scaling:\n    type: llama3\n    factor: 9\n"
    )
    recipe_tree.edit(TINY, "    more/notes: {target: tokenized/bpe/notes/2026.06.28, weight: 0.25}\n", "")
    recipe_tree.edit(TINY, "every_steps: 50", "every_steps: 10")
    changes = compare(before, recipe_tree.book.identity(parse_target(TINY)))
    assert [str(change) for change in changes] == [
        "data.train.more/notes: {target: tokenized/bpe/notes/2026.06.28, weight: 0.25} → (not there)",
        "model.rope_scaling.factor: 8.0 → 9.0",
        "optimizer.learning_rate: 0.003 → 0.001",
    ]
