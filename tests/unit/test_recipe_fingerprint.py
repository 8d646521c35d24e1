from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_build.recipe import fingerprint, load
from marin_build.recipe.fields import added_later
from marin_build.recipe.fingerprint import body_fingerprint, canonical_bytes, identity_body
from marin_build.recipe.schema import CheckpointRecipe, LlamaModel, TrainingData
from marin_build.recipe.target import parse_target

TINY = "checkpoints/tiny/2026.06.28"


@pytest.mark.parametrize(
    ("target", "old", "new"),
    [
        (TINY, "learning_rate: 3e-3", "learning_rate: 3e-4"),
        (TINY, "weight: 0.25", "weight: 0.5"),
        (TINY, "more/notes:", "notes:"),
        (TINY, "seed: 0", "seed: 1"),
        (TINY, "global_batch_size: 8", "global_batch_size: 16"),
        (TINY, "compute: bfloat16", "compute: float32"),
        (TINY, "attention_across_documents: false", "attention_across_documents: true"),
        (TINY, "mixture_block: 16", "mixture_block: 32"),
        (TINY, "max_grad_norm: 1", "max_grad_norm: null"),
        (TINY, "[norms, embeddings]", "[norms]"),
        ("tokenizers/bpe/2026.06.28", "vocabulary_size: 2048", "vocabulary_size: 2047"),
        ("raw/embedded/2026.06.28", "digest: 00", "digest: 10"),
        ("tokenized/bpe/notes/2026.06.28", "seed: 7", "seed: 8"),
    ],
)
def test_what_may_change_the_bytes_changes_the_fingerprint(recipe_tree, target, old, new):
    before = recipe_tree.fingerprint(TINY)
    recipe_tree.edit(target, old, new)
    assert recipe_tree.fingerprint(TINY) != before


@pytest.mark.parametrize(
    ("target", "old", "new"),
    [
        (TINY, "seed: 0", "seed: 0 # a comment"),
        (TINY, "learning_rate: 3e-3", "learning_rate: 0.0030"),
        (TINY, "weight: 3}", "weight: 3.0}"),
        (TINY, "max_grad_norm: 1", "max_grad_norm: 1.0"),
        (TINY, "[norms, embeddings]", "[embeddings, norms]"),
        (TINY, "z_loss: 1e-4\nprecision: {", 'z_loss: "x"\nprecision: {'.replace('"x"', "0.0001")),
        (TINY, "description: Tiny.", "description: Small.\n  tags: [a]"),
        (TINY, "every_steps: 50", "every_steps: 20"),
        (TINY, "      paloma/c4_en: tokenized/bpe/validation/", "      other: tokenized/bpe/train/"),
        (TINY, "data: -1, fsdp: 1", "data: 1, fsdp: -1"),
        (TINY, "execution:\n  default: ", "execution:\n  tpu: "),
        ("tokenized/bpe/validation/2026.06.28", "add_eos: true", "add_eos: false"),
        ("raw/hub/2026.06.28", "description: Validation text.", "tags: [x]"),
    ],
)
def test_comments_spelling_and_what_is_only_measured_or_run_count_nowhere(recipe_tree, target, old, new):
    before = recipe_tree.fingerprint(TINY)
    recipe_tree.edit(target, old, new)
    assert recipe_tree.fingerprint(TINY) == before


def test_a_recipe_without_measure_and_execution_is_the_same_artifact(recipe_tree):
    before = recipe_tree.fingerprint(TINY)
    recipe_tree.write(TINY, recipe_tree.text(TINY).partition("measure:")[0])
    assert recipe_tree.fingerprint(TINY) == before


def test_key_order_counts_nowhere_and_training_cannot_see_it(recipe_tree):
    before = recipe_tree.book.load(parse_target(TINY))
    fingerprint_before = recipe_tree.fingerprint(TINY)
    head, train, notes, rest = re.split(r"(?m)^(?=    train: |    more/|  sequence_length)", recipe_tree.text(TINY))
    first, steps, last = re.split(r"(?m)^(?=steps|measure)", head + notes + train + rest)
    recipe_tree.write(TINY, steps + first + last)
    after = recipe_tree.book.load(parse_target(TINY))
    assert recipe_tree.fingerprint(TINY) == fingerprint_before
    assert list(after.data.train) == list(before.data.train)


def test_the_name_is_no_part_of_the_fingerprint_but_the_kind_is(recipe_tree):
    recipe_tree.write("raw/copy/dev", recipe_tree.text("raw/hub/2026.06.28"))
    assert recipe_tree.fingerprint("raw/copy/dev") == recipe_tree.fingerprint("raw/hub/2026.06.28")
    assert body_fingerprint("raw", {"a": 1}, {}) != body_fingerprint("evals", {"a": 1}, {})


def test_a_broken_validation_set_leaves_the_fingerprint_alone(recipe_tree):
    before = recipe_tree.fingerprint(TINY)
    recipe_tree.write("tokenized/bpe/validation/2026.06.28", "not: a recipe")
    assert recipe_tree.fingerprint(TINY) == before


class LaterModel(LlamaModel):
    qk_norm: bool = added_later(False)
    soft_cap: float | None = added_later(None)


class LaterCheckpoint(CheckpointRecipe):
    model: LaterModel
    ema: dict[str, float] | None = added_later(None)


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("seed: 0", "seed: 0", True),
        ("seed: 0", "seed: 0\nema: null", True),
        ("head_dim: 8", "head_dim: 8\n  qk_norm: false\n  soft_cap: null", True),
        ("head_dim: 8", "head_dim: 8\n  qk_norm: true", False),
        ("head_dim: 8", "head_dim: 8\n  soft_cap: 30", False),
        ("seed: 0", "seed: 0\nema: {decay: 0.99}", False),
    ],
)
def test_a_field_added_later_leaves_old_fingerprints_alone_while_it_is_neutral(
    recipe_tree, monkeypatch, old, new, same
):
    before = recipe_tree.fingerprint(TINY)
    monkeypatch.setitem(load.SCHEMAS, "checkpoints", LaterCheckpoint)
    recipe_tree.edit(TINY, old, new)
    assert (recipe_tree.fingerprint(TINY) == before) is same


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("weight: 3}", "weight: 3, max_epochs: null}", True),
        ("weight: 3}", "weight: 3, max_epochs: 2}", False),
        ("  mixture_block: 16", "  mixture_block: 16\n  stages: []", True),
        (
            "  mixture_block: 16",
            "  mixture_block: 16\n  stages: [{from_step: 4, weights: {train: 1, more/notes: 2}}]",
            False,
        ),
    ],
)
def test_stages_and_limits_move_the_fingerprint_of_those_who_have_them_alone(recipe_tree, old, new, same):
    before = recipe_tree.fingerprint(TINY)
    recipe_tree.edit(TINY, old, new)
    assert (recipe_tree.fingerprint(TINY) == before) is same


def test_a_field_with_a_default_that_is_not_declared_as_later_does_move_fingerprints(recipe_tree, monkeypatch):
    class Careless(CheckpointRecipe):
        ema: float | None = None

    before = recipe_tree.fingerprint(TINY)
    monkeypatch.setitem(load.SCHEMAS, "checkpoints", Careless)
    assert recipe_tree.fingerprint(TINY) != before


def test_the_identity_body_survives_json(recipe_tree):
    book = recipe_tree.book
    for target in book.targets():
        body = book.identity(target)
        assert canonical_bytes(json.loads(json.dumps(body))) == canonical_bytes(body)
        assert "measure" not in body
        assert "execution" not in body


def test_the_fingerprint_is_that_of_the_stored_body_and_dependencies(recipe_tree):
    book, target = recipe_tree.book, parse_target(TINY)
    upstream = {text: book.fingerprint(parse_target(text)) for text in load.identity_dependencies(book.load(target))}
    assert body_fingerprint("checkpoints", book.identity(target), upstream) == book.fingerprint(target)
    assert fingerprint.fingerprint(book.load(target), upstream) == book.fingerprint(target)


def test_identity_bodies_hold_every_field_of_their_schema(recipe_tree):
    recipe = recipe_tree.book.load(parse_target(TINY))
    assert set(identity_body(recipe)) == set(CheckpointRecipe.model_fields) - {"measure", "execution"}
    assert set(identity_body(recipe)["data"]) == set(TrainingData.model_fields) - {"stages"}  # added later


# ---- canonical bytes -------------------------------------------------------------------------------------------------


def test_canonical_bytes_are_json_with_sorted_keys_and_shortest_floats():
    value = {"b": [1, 1.0, -0.0, 1e-5, True, None], "a": {"é": "größer"}}
    assert canonical_bytes(value) == '{"a":{"é":"größer"},"b":[1,1.0,0.0,1e-05,true,null]}'.encode()


class Loud(str):
    pass


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        "\ud800",
        {"\udfff": 1},
        {1: 2},
        {None: 2},
        {True: 2},
        {"a": {2}},
        b"bytes",
        object(),
        Loud("x"),
        {"a": [1, {"b": math.nan}]},
    ],
)
def test_a_value_without_canonical_bytes_raises(value):
    with pytest.raises(ValueError, match="no canonical bytes"):
        canonical_bytes(value)


def test_a_value_that_holds_itself_raises():
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueError, match="nested deeper"):
        canonical_bytes(value)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(plain)
def test_canonical_bytes_read_back_as_the_same_value(value):
    assert json.loads(canonical_bytes(value)) == value
    assert canonical_bytes(json.loads(canonical_bytes(value))) == canonical_bytes(value)


@settings(deadline=None)
@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.integers()))
def test_insertion_order_counts_nowhere(value):
    assert canonical_bytes(dict(reversed(value.items()))) == canonical_bytes(value)
