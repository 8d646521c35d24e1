from __future__ import annotations

import pytest

from marin_build.errors import RecipeError
from marin_build.recipe.document import parse_document


def value(text: str):
    return parse_document(f"x: {text}\n".encode(), "a.yaml").value["x"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-4", 1e-4),
        ("1.5E+3", 1500.0),
        (".5", 0.5),
        ("3", 3),
        ("-0", 0),
        ("+7", 7),
        ("9223372036854775807", (1 << 63) - 1),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("on", "on"),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("2026.06.28", "2026.06.28"),
        ("2026-06-28", "2026-06-28"),
        ("0x10", "0x10"),
        ("'1'", "1"),
        ('"null"', "null"),
        ("65cd6fc", "65cd6fc"),
        ("[1, a, {b: 2.0}]", [1, "a", {"b": 2.0}]),
        ("|\n  a\n  b\n", "a\nb\n"),
    ],
)
def test_scalars_follow_yaml_1_2(text, expected):
    found = value(text)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("a: 1\na: 2\n", 2, "the key 'a' stands here twice, first on line 1"),
        ("a: {b: 1, b: 1}\n", 1, "the key 'b' stands here twice"),
        ("a: &x 1\n", 1, "anchors and aliases"),
        ("&x a: 1\n", 1, "anchors and aliases"),
        ("a: 1\nb: *x\n", 2, "anchors and aliases"),
        ("a: !!int 3\n", 1, "tags"),
        ("a: !!python/object:os.system [x]\n", 1, "tags"),
        ("a: !own x\n", 1, "tags"),
        ("!!map {a: 1}\n", 1, "tags"),
        ("a: 1\n<<: {b: 1}\n", 2, "merging"),
        ("1: a\n", 1, "the key 1 is not text"),
        ("null: a\n", 1, "the key null is not text"),
        ("? [a]\n: b\n", 1, "a key must be text"),
        ("a: 010\n", 1, "begins with a zero"),
        ("a: .inf\n", 1, "numbers are finite"),
        ("a: -.INF\n", 1, "numbers are finite"),
        ("a: .NaN\n", 1, "numbers are finite"),
        ("a: 1e999\n", 1, "too large"),
        ("a: 9223372036854775808\n", 1, "64 bits"),
        ("a: " + "9" * 100_000 + "\n", 1, "64 bits"),
        ("a: 1\n---\na: 1\n", 2, "a second document"),
        ("- a\n", 1, "a recipe is a block"),
        ("just text\n", 1, "a recipe is a block"),
        ("a: b: c\n", 1, "not YAML: mapping values"),
        ("a: 1\n\tb: 2\n", 2, "tabs cannot indent"),
        ("a: [1, 2\nb: 3\n", 2, "close the list with ']'"),
        ("a: 'open\n", 2, "not YAML"),
        ("a: @x\n", 1, "not YAML"),
        ("a: 1\nb: x\x00y\n", 2, "control character U+0000"),
        ("a: \x1b[31m\n", 1, "control character U+001B"),
        ('a: "\\0"\n', 1, "control character U+0000"),
        ('a: "\\ud800"\n', 1, "not YAML"),
        ("a: " + "[" * 40 + "]" * 40 + "\n", 1, "deeper than 24"),
        ("a: " + "[" * 400_000 + "\n", 1, "nesting"),
    ],
)
def test_what_could_mean_two_things_is_refused_with_its_line(text, line, reason):
    with pytest.raises(RecipeError) as caught:
        parse_document(text.encode(), "a.yaml")
    assert str(caught.value).startswith(f"a.yaml:{line}: ")
    assert reason in str(caught.value)


def test_bytes_that_are_not_utf8_are_named_with_their_offset():
    with pytest.raises(RecipeError, match=r"a\.yaml:2: is not UTF-8: byte 0xff at offset 8"):
        parse_document(b"a: 1\nb: \xff\n", "a.yaml")


def test_a_byte_order_mark_is_no_part_of_the_first_key():
    assert parse_document(b"\xef\xbb\xbfa: 1\n", "a.yaml").value == {"a": 1}


@pytest.mark.parametrize("text", [b"", b"# only a comment\n", b"---\n"])
def test_an_empty_recipe_is_refused(text):
    with pytest.raises(RecipeError, match=r"^a\.yaml"):
        parse_document(text, "a.yaml")


def test_a_huge_file_is_refused_before_it_is_parsed():
    with pytest.raises(RecipeError, match="larger than"):
        parse_document(b"#" * (1 << 20) + b"\n", "a.yaml")


def test_every_path_knows_its_line():
    document = parse_document(b"# c\na:\n  b: [1,\n    2]\n", "a.yaml")
    assert document.lines == {("a",): 2, ("a", "b"): 3, ("a", "b", 0): 3, ("a", "b", 1): 4}
    assert document.line(("a", "missing")) == 2
    assert document.at(("a", "b", 1)) == 2
    assert document.at(("a", "b", 9, "c")) is None
