from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_build.errors import RequestError
from marin_build.recipe.target import is_target, parse_target


@pytest.mark.parametrize(
    "text",
    [
        "checkpoints/quickstart/2026.06.28",
        "tokenized/llama3/paloma/dolma-v1_5/2026.06.28.12",
        "raw/4chan/dev",
        "raw/_x/alice-dev",
        "checkpoints/llama3.1-8B/2024.02.29",
    ],
)
def test_a_target_is_typed_as_it_is_shown(text):
    assert str(parse_target(text)) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("checkpoints/x/2026.02.29", "not a real date"),
        ("checkpoints/x/2026.13.01", "not a real date"),
        ("checkpoints/x/0000.01.01", "not a real date"),
        ("checkpoints/x/2026.6.28", "neither YYYY.MM.DD"),
        ("checkpoints/x/2026.06.28.0", "neither YYYY.MM.DD"),
        ("checkpoints/x/2026.06.28.01", "neither YYYY.MM.DD"),
        ("checkpoints/x/2026.06.28\n", "neither YYYY.MM.DD"),
        ("checkpoints/x/２０２６.06.28", "neither YYYY.MM.DD"),
        ("checkpoints/x/-dev", "neither YYYY.MM.DD"),
        ("checkpoints/x/v1", "neither YYYY.MM.DD"),
        ("checkpoint/x/dev", "none of raw, tokenizers"),
        ("checkpoints/dev", "write kind/name/version"),
        ("checkpoints//dev", "the part ''"),
        ("checkpoints/../dev", "the part '..'"),
        ("checkpoints/.x/dev", "the part '.x'"),
        ("checkpoints/x y/dev", "the part 'x y'"),
        ("checkpoints/dev/dev", "the part 'dev'"),
        ("checkpoints/2026.06.28/2026.06.28", "the part '2026.06.28'"),
        ("/checkpoints/x/dev", "the kind ''"),
        ("checkpoints/" + "x" * 201 + "/dev", "longer than 200 bytes"),
        ("checkpoints/" + "x/" * 600 + "dev", "longer than 1024 bytes"),
        ("", "write kind/name/version"),
    ],
)
def test_what_is_no_target_is_refused_with_the_reason(text, reason):
    with pytest.raises(RequestError, match=reason):
        parse_target(text)


def test_dev_versions_are_mutable_and_dates_are_fixed():
    assert [parse_target(f"raw/x/{v}").is_dev for v in ("dev", "a-dev", "2026.06.28", "2026.06.28.1")] == [
        True,
        True,
        False,
        False,
    ]


@settings(deadline=None)
@given(st.one_of(st.text(), st.from_regex(r"raw/[a-z0-9./\-\x00\\~]*/(dev|[0-9.]{8,14})", fullmatch=True)))
def test_any_text_is_a_safe_target_or_a_request_error(text):
    if is_target(text):
        parts = text.split("/")
        assert str(parse_target(text)) == text
        assert text.isascii()
        assert text.isprintable()
        assert not any(part in ("", ".", "..") or part.startswith((".", "-", "~")) for part in parts)
