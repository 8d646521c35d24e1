"""Recipes are edited as text: a new page, a copy under a new version, one value replaced. Comments stay.

Nothing is ever overwritten: a page that exists is an identity, and one value is changed only when it is asked for.
"""

from __future__ import annotations

import json
import os
import re
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marin_build.errors import RequestError
from marin_build.recipe.derived import refuse_derived
from marin_build.recipe.document import Path as FieldPath
from marin_build.recipe.document import dotted, parse_document
from marin_build.recipe.header import plain
from marin_build.recipe.load import validate
from marin_build.recipe.pages import page
from marin_build.recipe.target import Target, check_version

if TYPE_CHECKING:
    from marin_build.recipe.load import RecipeBook


def new(book: RecipeBook, target: Target, model: str | None = None) -> Path:
    """Write a complete recipe with plausible values to start from, and return its path.

    Raises:
        RequestError: the recipe exists, `model` is no preset, or the file cannot be written.
    """
    refuse_derived(target, "new")
    _refuse_existing(book, target)
    text = page(book, target, model)
    validate(parse_document(text.encode(), book.shown(target)), target.kind)
    return _create(book, target, text)


def bump(book: RecipeBook, target: Target, version: str | None = None, today: date | None = None) -> Path:
    """Copy the recipe of `target` to `version` (default: today's date, with `.N` when taken), and return its path.

    Where the comments at its head name the old target, they name the new one.

    Raises:
        RequestError: there is no such recipe, `version` is none, or it exists.
    """
    refuse_derived(target, "bump")
    validate(book.document(target), target.kind)
    old = book.read(target).decode("utf-8")
    if version:
        check_version(version, f"{target.name}/{version}")
    copy = Target(target.name, version) if version else _free(book, target, today or date.today())
    _refuse_existing(book, copy)
    return _create(book, copy, _renamed(old, target, copy))


def replace_value(book: RecipeBook, target: Target, path: FieldPath, value: str) -> None:
    """Replace the text at `path` in the recipe of `target`, and nothing else in the file.

    Raises:
        RequestError: the recipe would not load any more, or the file cannot be written.
    """
    text = book.read(target).decode("utf-8")
    start, end = _span(text, path)
    _edit(book, target, f"{text[:start]}{plain(value)}{text[end:]}", path, value)


def spell_out(book: RecipeBook, target: Target, path: FieldPath, values: list[str]) -> None:
    """Replace the item at `path`, in a list, by several, each on a line, and nothing else in the file.

    Raises:
        RequestError: the recipe would not load any more, or the file cannot be written.
    """
    text = book.read(target).decode("utf-8")
    start, end = _span(text, path)
    before = text[text.rfind("\n", 0, start) + 1 : start]
    is_block = not before.strip(" -")
    between = f"\n{before}" if is_block else f",\n{' ' * (len(before) - len(before.lstrip(' ')) + 4)}"
    written = between.join(json.dumps(value, ensure_ascii=False) for value in values)
    _edit(book, target, f"{text[:start]}{written}{text[end:]}", path, values[0])


def _edit(book: RecipeBook, target: Target, text: str, path: FieldPath, expected: str) -> None:
    document = parse_document(text.encode(), book.shown(target))
    assert document.at(path) == expected, dotted(path)
    validate(document, target.kind)
    _replace(book.path(target).resolve(), text, book.shown(target))


def _free(book: RecipeBook, target: Target, day: date) -> Target:
    """The first free version of that day."""
    version, number = day.strftime("%Y.%m.%d"), 0
    while book.exists(free := Target(target.name, f"{version}.{number}" if number else version)):
        number += 1
    return free


def _renamed(text: str, old: Target, new: Target) -> str:
    """`text` with the old target replaced in the comments before the first key."""
    head = re.match(r"(?:[ \t]*(?:#[^\n]*)?\n)*", text)
    end = head.end() if head else 0
    name = rf"(?<![\w.-]){re.escape(str(old))}(?!\.?[0-9]|[\w/-])"
    return re.sub(name, str(new), text[:end]) + text[end:]


def _span(text: str, path: FieldPath) -> tuple[int, int]:
    """Where the scalar at `path` begins and ends in `text`."""
    import yaml

    mark = len(text) - len(text.removeprefix("\ufeff"))
    node: Any = yaml.compose(text[mark:], yaml.CSafeLoader)
    for part in path:
        if isinstance(part, int):
            node = node.value[part]
        else:
            node = next(value for key, value in node.value if key.value == part)
    return mark + node.start_mark.index, mark + node.end_mark.index


def _refuse_existing(book: RecipeBook, target: Target) -> None:
    if os.path.lexists(book.path(target)):
        raise RequestError(
            f"{book.shown(target)} exists and is not overwritten\n  marin-build bump {target} makes a new version of it"
        )


def _create(book: RecipeBook, target: Target, text: str) -> Path:
    path = book.path(target)
    book.refuse_outside(target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8", newline="") as file:
            file.write(text)
    except OSError as error:
        raise RequestError(f"{book.shown(target)}: cannot be written: {error.strerror}") from None
    return path


def _replace(path: Path, text: str, shown: str) -> None:
    """Give a file new text, in one step: the old one stays until the new one is whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8", newline="") as file:
            file.write(text)
        os.chmod(temporary, path.stat().st_mode)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RequestError(f"{shown}: cannot be written: {error.strerror}") from None
