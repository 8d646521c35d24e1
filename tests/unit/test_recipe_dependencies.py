from __future__ import annotations

from itertools import pairwise

import pytest

from marin_build.errors import RecipeError
from marin_build.recipe.dependencies import closure, identity_dependencies, needs, unresolved, validation_sets
from marin_build.recipe.target import is_target, parse_target

TINY = parse_target("checkpoints/tiny/2026.06.28")


def texts_of(value):
    """Every text in a recipe's values."""
    if isinstance(value, dict):
        return [text for item in value.values() for text in texts_of(item)]
    if isinstance(value, list):
        return [text for item in value for text in texts_of(item)]
    return [value] if isinstance(value, str) else []


def test_dependencies_are_what_the_artifact_is_made_from(recipe_tree):
    recipe = recipe_tree.book.load(TINY)
    made_from = ("tokenizers/bpe/2026.06.28", "tokenized/bpe/notes/2026.06.28", "tokenized/bpe/train/2026.06.28")
    assert identity_dependencies(recipe) == made_from
    assert validation_sets(recipe) == ("tokenized/bpe/validation/2026.06.28",)
    assert needs(recipe) == (*made_from, "tokenized/bpe/validation/2026.06.28")


def test_every_target_that_any_recipe_names_is_needed(recipe_tree):
    book = recipe_tree.book
    for target in book.targets():
        recipe = book.load(target)
        named = {text for text in texts_of(recipe.model_dump()) if is_target(text)}
        assert set(needs(recipe)) == named


def test_a_set_that_is_trained_and_measured_on_is_needed_once(recipe_tree):
    recipe_tree.edit(str(TINY), "tokenized/bpe/validation/2026.06.28", "tokenized/bpe/train/2026.06.28")
    assert needs(recipe_tree.book.load(TINY)).count("tokenized/bpe/train/2026.06.28") == 1


def test_the_closure_lists_dependencies_first_and_each_once(recipe_tree):
    book = recipe_tree.book
    order = closure(book, [TINY, parse_target("checkpoints/tiny/2026.06.28.1"), TINY])
    assert len(order) == len(set(order)) == 10
    for index, target in enumerate(order):
        assert {parse_target(text) for text in book.needs(target)} <= set(order[:index])


def test_a_missing_dependency_names_who_needs_it_and_what_was_meant(recipe_tree):
    recipe_tree.edit("tokenized/bpe/train/2026.06.28", "raw/embedded/", "raw/embeded/")
    with pytest.raises(RecipeError) as caught:
        closure(recipe_tree.book, [TINY])
    lines = str(caught.value).replace(f"{recipe_tree.folder}/", "").split("\n")
    assert lines == [
        "tokenized/bpe/train/2026.06.28.yaml:4: source.target: 'raw/embeded/2026.06.28' has no recipe: "
        "raw/embeded/2026.06.28.yaml does not exist",
        "  needed by tokenized/bpe/train/2026.06.28",
        "  did you mean raw/embedded/2026.06.28?",
        "  marin-build new raw/embeded/2026.06.28 writes one to start from",
    ]


@pytest.mark.parametrize(
    ("target", "old"),
    [
        ("checkpoints/tiny/2026.06.28", "tokenizers/bpe/2026.06.28"),
        ("checkpoints/tiny/2026.06.28", "tokenized/bpe/validation/2026.06.28"),
        ("tokenized/bpe/train/2026.06.28", "raw/embedded/2026.06.28"),
    ],
)
def test_a_fixed_version_may_not_need_a_dev_one(recipe_tree, target, old):
    dev = old.replace("2026.06.28", "dev")
    recipe_tree.write(dev, recipe_tree.text(old))
    recipe_tree.edit(target, old, dev)
    with pytest.raises(RecipeError, match=f"a fixed version may not need a dev one, seen '{dev}'\n.*bump {dev}"):
        closure(recipe_tree.book, [TINY])


def test_a_dev_version_may_need_a_dev_one(recipe_tree):
    fixed, dev = "tokenized/bpe/train/2026.06.28", "tokenized/bpe/train/my-dev"
    recipe_tree.write(dev, recipe_tree.text(fixed))
    recipe_tree.write("checkpoints/tiny/dev", recipe_tree.text(str(TINY)).replace(fixed, dev))
    assert parse_target(dev) in closure(recipe_tree.book, [parse_target("checkpoints/tiny/dev")])


def test_a_cycle_is_named_in_full(recipe_tree):
    a, b, c = (f"raw/{name}/2026.06.28" for name in ("embedded", "files", "hub"))
    edges = {a: (b,), b: (c,), c: (b,)}
    book = recipe_tree.book
    by_recipe = {id(book.load(parse_target(text))): named for text, named in edges.items()}
    with pytest.raises(RecipeError, match=f"^recipes need each other in a cycle: {b} → {c} → {b}\n"):
        closure(book, [parse_target(a)], lambda recipe: by_recipe[id(recipe)])


def test_a_long_chain_is_no_problem(recipe_tree):
    book = recipe_tree.book
    text = recipe_tree.text("raw/hub/2026.06.28")
    targets = [f"raw/chain{number}/2026.06.28" for number in range(1200)]
    for target in targets:
        recipe_tree.write(target, text)
    following = {id(book.load(parse_target(a))): (b,) for a, b in pairwise(targets)}
    assert len(closure(book, [parse_target(targets[0])], lambda recipe: following.get(id(recipe), ()))) == 1200


def test_unresolved_sources_are_listed_by_field(recipe_tree):
    book = recipe_tree.book
    assert unresolved(book.load(parse_target("raw/files/2026.06.28"))) == ["source.digest"]
    assert unresolved(book.load(parse_target("tokenizers/hub/2026.06.28"))) == ["tokenizer.source.revision"]
    assert unresolved(book.load(TINY)) == []


@pytest.mark.parametrize("edges", [needs, identity_dependencies])
def test_a_run_has_one_tokenizer(recipe_tree, edges):
    recipe_tree.edit("tokenized/bpe/train/2026.06.28", "tokenizers/bpe/", "tokenizers/bytes/")
    with pytest.raises(
        RecipeError,
        match=r":4: data\.train\.train\.target: 'tokenized/bpe/train/2026.06.28' is tokenized with tokenizers/bytes/",
    ):
        closure(recipe_tree.book, [TINY], edges)


def test_what_a_run_is_measured_on_has_its_tokenizer_too(recipe_tree):
    recipe_tree.edit("tokenized/bpe/validation/2026.06.28", "tokenizers/bpe/", "tokenizers/bytes/")
    closure(recipe_tree.book, [TINY], identity_dependencies)
    with pytest.raises(RecipeError, match=r":48: measure\.validation\.sets\.paloma/c4_en: "):
        closure(recipe_tree.book, [TINY])


def test_the_vocabulary_holds_every_id_of_the_tokenizer(recipe_tree):
    recipe_tree.edit(str(TINY), "vocab_size: 2048", "vocab_size: 2047")
    with pytest.raises(RecipeError, match=r":11: model\.vocab_size: needs at least 2048, the ids of .*, seen 2047$"):
        closure(recipe_tree.book, [TINY])
    recipe_tree.edit(str(TINY), "vocab_size: 2047", "vocab_size: 2176")
    assert closure(recipe_tree.book, [TINY])


VALIDATION = "tokenized/bpe/validation/2026.06.28"


def make_chat(recipe_tree):
    recipe_tree.edit(
        VALIDATION, "{type: jsonl, text_key: text}", "{type: chat, messages_key: m, roles: [user, assistant]}"
    )
    recipe_tree.edit(VALIDATION, "add_bos: true\nadd_eos: true", "add_bos: false\nadd_eos: false")


def test_conversations_do_not_see_each_other(recipe_tree):
    make_chat(recipe_tree)
    closure(recipe_tree.book, [TINY])
    recipe_tree.edit(str(TINY), "attention_across_documents: false", "attention_across_documents: true")
    closure(recipe_tree.book, [TINY], identity_dependencies)
    with pytest.raises(
        RecipeError,
        match=r":8: data\.attention_across_documents: needs false, seen true: tokenized/bpe/validation/.* is chat",
    ):
        closure(recipe_tree.book, [TINY])


def test_baselines_of_whole_texts_score_no_conversations(recipe_tree):
    make_chat(recipe_tree)
    recipe_tree.edit(str(TINY), "measure:\n", "measure:\n  baselines: [byte_bigram]\n")
    with pytest.raises(RecipeError, match=r"measure\.baselines: needs \[\], seen \['byte_bigram'\]: they score all of"):
        closure(recipe_tree.book, [TINY])


def test_a_template_writes_the_special_tokens_of_conversations(recipe_tree):
    make_chat(recipe_tree)
    recipe_tree.edit(VALIDATION, "add_eos: false", "add_eos: true")
    with pytest.raises(
        RecipeError, match=r"format\.type chat needs add_bos: false and add_eos: false; the chat template"
    ):
        closure(recipe_tree.book, [TINY])
