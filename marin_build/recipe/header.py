"""The lines that open every page: what it is, from where, at what cost, with what result, and the command."""

from __future__ import annotations

import json
from textwrap import fill

from marin_build.errors import RecipeError
from marin_build.recipe.document import parse_document
from marin_build.recipe.target import Target

WIDTH = 120


def header(
    target: Target, what: str, source: str, cost: str = "Unknown yet.", expected: str = "Unknown yet.", note: str = ""
) -> str:
    """The comment block at the top of a recipe, with the blank line after it."""
    rows = {"What": what, "Source": source, "Cost": cost, "Expected": expected, "Build": f"snakemake {target}"}
    lines = [f"# {target}", "#", *(_row(label, text) for label, text in rows.items())]
    lines += ["#", fill(note, WIDTH, initial_indent="# ", subsequent_indent="# ")] if note else []
    return "\n".join([*lines, "", ""])


def plain(text: str) -> str:
    """`text` as a YAML scalar: bare where that means the same, else in quotes."""
    try:
        same = parse_document(f"{text}: {text}\n".encode(), "").value == {text: text}
    except RecipeError:
        same = False
    return text if same and not set(text) & set("{}[],#") else json.dumps(text, ensure_ascii=False)


def _row(label: str, text: str) -> str:
    return fill(text, WIDTH, initial_indent=f"# {label:<9} ", subsequent_indent=f"#{' ' * 11}", break_on_hyphens=False)
