"""What one command of `marin-build` works on: settings, recipes and store, and the targets that were typed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marin_build.errors import RequestError
from marin_build.foreign import shortened
from marin_build.settings import MAX_YAML_BYTES, Settings, read_yaml, resolve

if TYPE_CHECKING:
    from marin_build.artifact.store import Store
    from marin_build.recipe.load import RecipeBook
    from marin_build.recipe.target import Target

SETTINGS_FILE = Path("config/config.yaml")


class Workplace:
    """Settings, recipes and store, as one command sees them."""

    def __init__(self, options: argparse.Namespace) -> None:
        from marin_build.artifact.store import open_store
        from marin_build.recipe.load import RecipeBook

        self.settings: Settings = read_settings(options)
        self.book: RecipeBook = RecipeBook(self.settings.recipes, self.settings.encoder)
        self.store: Store = open_store(self.settings.prefix, self.settings.object_cache)

    def target(self, typed: str) -> Target:
        """The target that was meant, whether or not it has a recipe."""
        from marin_build.recipe.target import parse_target
        from marin_build.typed import as_target

        name = as_target(typed, self.settings)
        try:
            return parse_target(name)
        except RequestError as error:
            raise RequestError(f"{error}\n{self.book.suggest(name)}") from None

    def existing(self, typed: str) -> Target:
        """The target that was meant; it has a recipe."""
        target = self.target(typed)
        self.book.read(target)
        return target

    def finished_or_existing(self, typed: str) -> Target:
        """The target that was meant; it has a record or a recipe."""
        from marin_build.artifact.store import RECORD

        target = self.target(typed)
        return target if self.store.read(target, RECORD) is not None else self.existing(typed)

    def closure(self, typed: Sequence[str]) -> list[Target]:
        """The targets and everything that they need, dependencies first; all recipes when none is given."""
        from marin_build.recipe.dependencies import closure

        if not typed:
            return self.book.targets()
        return closure(self.book, [self.existing(text) for text in typed])


def read_settings(options: argparse.Namespace) -> Settings:
    """`config/config.yaml`, then the environment, then `--config` and the options of their own."""
    given: dict[str, Any] = {}
    if SETTINGS_FILE.is_file():
        with SETTINGS_FILE.open("rb") as file:
            content = file.read(MAX_YAML_BYTES + 1)
        try:
            given = read_yaml(content) or {}
        except ValueError as error:
            raise RequestError(f"{SETTINGS_FILE}: not readable as YAML\n{error}") from None
        if not isinstance(given, dict):
            raise RequestError(f"{SETTINGS_FILE}: needs `key: value` lines, seen {type(given).__name__}")
    return resolve(given, command_line=command_line_settings(options))


def command_line_settings(options: argparse.Namespace) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for item in options.config:
        key, equals, value = item.partition("=")
        if not equals:
            raise RequestError(f"--config {shortened(ascii(item), 100)}: write key=value")
        try:
            chosen[key] = read_yaml(value.encode("utf-8", "surrogateescape"))
        except ValueError as error:
            first = str(error).partition("\n")[0]
            raise RequestError(f"--config {shortened(ascii(item), 100)}: not readable as YAML: {first}") from None
    for key in ("prefix", "recipes"):
        if getattr(options, key) is not None:
            chosen[key] = getattr(options, key)
    return chosen
