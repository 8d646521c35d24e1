from __future__ import annotations

import copy
from pathlib import Path

import jsonschema
import pytest

from marin_build.errors import RecipeError
from marin_build.recipe.document import Document
from marin_build.recipe.json_schema import json_schema, text, write
from marin_build.recipe.load import validate
from marin_build.recipe.schema import SCHEMAS
from marin_build.recipe.target import parse_target

CONFIG = Path(__file__).parents[2] / "config"


@pytest.mark.parametrize("kind", SCHEMAS)
def test_the_committed_schemas_are_in_step(kind):
    path = CONFIG / "schema" / f"{kind}.json"
    assert path.read_text(encoding="utf-8") == text(kind), "run: python -m marin_build.recipe.json_schema"


def test_writing_makes_one_file_a_kind(tmp_path):
    assert [path.name for path in write(tmp_path / "schema")] == [f"{kind}.json" for kind in SCHEMAS]


@pytest.mark.parametrize("kind", SCHEMAS)
def test_the_schemas_are_valid_and_accept_the_recipes_that_load(recipe_tree, kind):
    jsonschema.Draft202012Validator.check_schema(json_schema(kind))
    validator = jsonschema.Draft202012Validator(json_schema(kind))
    targets = [target for target in recipe_tree.book.targets() if target.kind == kind]
    assert targets
    for target in targets:
        validator.validate(recipe_tree.book.document(target).value)


def broken(value, path=()):
    """Copies of a recipe's values with one thing broken: each key misspelt, each key removed, each value replaced."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        here = (*path, key)
        if isinstance(value[key], dict | list):
            yield from broken(value[key], here)
        yield here, "replace"
        if isinstance(value, dict):
            yield here, "misspell"


def test_editors_refuse_what_loading_refuses(recipe_tree):
    target = parse_target("checkpoints/tiny/2026.06.28")
    document = recipe_tree.book.document(target)
    validator = jsonschema.Draft202012Validator(json_schema("checkpoints"))
    seen = 0
    for path, how in broken(document.value):
        value = copy.deepcopy(document.value)
        block = value
        for part in path[:-1]:
            block = block[part]
        if how == "misspell":
            block[f"{path[-1]} !"] = block.pop(path[-1])
        else:
            block[path[-1]] = [object]
        refused_by_loading = not loads(Document("a.yaml", value, document.lines))
        assert refused_by_loading == (not validator.is_valid(value)), (path, how)
        seen += refused_by_loading
    assert seen > 80


def loads(document: Document) -> bool:
    try:
        validate(document, "checkpoints")
    except RecipeError:
        return False
    return True


def test_fields_carry_their_explanations():
    fields = json_schema("checkpoints")["$defs"]["TrainingData"]["properties"]
    assert fields["mixture_block"]["description"].startswith("Sequences a block")
    assert fields["tokenizer"]["description"] == "Needs a target tokenizers/name/version."
