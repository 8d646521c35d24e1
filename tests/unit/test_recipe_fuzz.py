"""Whatever stands in a recipe: it loads, or it is a RecipeError with the file's name. Nothing else ever comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from marin_build.errors import RecipeError
from marin_build.recipe.document import parse_document
from marin_build.recipe.fingerprint import canonical_bytes, identity_body
from marin_build.recipe.load import validate
from marin_build.recipe.schema import SCHEMAS

GOLDEN = Path(__file__).parents[1] / "golden" / "recipes"
GOLDEN_FILES = sorted(path.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("*.yaml"))

SOME_KINDS = st.sampled_from(sorted(SCHEMAS))
WORDS = st.sampled_from(
    [
        *("type", "method", "source", "files", "paths", "digest", "revision", "unresolved", "embedded", "huggingface"),
        *(
            "artifact",
            "format",
            "jsonl",
            "text",
            "target",
            "tokenizer",
            "special_tokens",
            "bos",
            "train",
            "data",
            "model",
        ),
        *("optimizer", "schedule", "steps", "weight", "measure", "execution", "default", "mesh", "raw/x/2026.06.28"),
        *("null", "true", "no", "1", "-1", "0.5", "1e400", ".nan", ".inf", "0x10", "1_000", "12:30", "<<", "*a", "&a"),
        *("!!str", "?", "-", "|", ">", ":", "#", ",", "[", "]", "{", "}", "'", '"', "%", "@", "`", "\\", "---", "..."),
        *("\t", "\r", "\x00", "\x1b", "\u2028", "\ufeff"),
    ]
)
PAGES = st.lists(st.tuples(st.integers(0, 4), WORDS, st.sampled_from([" ", ": ", ":\n", "\n", ""])), max_size=30).map(
    lambda lines: "".join("  " * indent + word + end for indent, word, end in lines)
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=5), inner, max_size=5),
    max_leaves=25,
)
NINE_LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{c}: &{c} [{', '.join([f'*{b}'] * 9)}]\n" for b, c in (("a", "b"), ("b", "c"))
)


def load(content: bytes, kind: str) -> None:
    message = ""
    try:
        recipe = validate(parse_document(content, "a.yaml"), kind)
        canonical_bytes(identity_body(recipe))
    except RecipeError as error:
        message = str(error)
    if message:
        assert message.startswith("a.yaml")
        assert message.replace("\n", "").isprintable()
        assert len(message) < 20_000


@settings(deadline=None)
@given(st.binary(max_size=200), SOME_KINDS)
@example(b"\xff\xfea\x00:\x00", "raw")
@example(b"\x00" * 100, "raw")
def test_any_bytes(content, kind):
    load(content, kind)


@settings(deadline=None)
@given(st.text(max_size=200) | PAGES, SOME_KINDS)
@example(NINE_LAUGHS, "raw")
@example("source: {type: [a]}", "raw")
@example("source: {type: {a: b}}", "raw")
@example("source: {type: }", "raw")
@example("tokenizer: [[]]", "tokenizers")
@example("? ? ? ? a", "raw")
def test_any_text(text, kind):
    load(text.encode("utf-8", "replace"), kind)


@settings(deadline=None)
@given(st.dictionaries(WORDS, VALUES, max_size=8), SOME_KINDS)
def test_any_values(value, kind):
    load(json.dumps(value).encode(), kind)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_recipe_with_any_value_somewhere(data):
    text = (GOLDEN / data.draw(st.sampled_from(GOLDEN_FILES))).read_text(encoding="utf-8")
    lines = text.split("\n")
    index = data.draw(st.integers(0, len(lines) - 1))
    key, colon, _ = lines[index].partition(":")
    lines[index] = f"{key}{colon} {data.draw(VALUES.map(json.dumps) | WORDS)}"
    for kind in SCHEMAS:
        load("\n".join(lines).encode(), kind)


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "? ", "a:\n ", "{? "])
@pytest.mark.parametrize("depth", [30, 1_000, 100_000])
def test_deep_nesting_is_refused(opening, depth):
    with pytest.raises(RecipeError):
        parse_document(f"a: {opening * depth}".encode(), "a.yaml")
