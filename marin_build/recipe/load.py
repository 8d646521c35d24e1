"""The folder of recipes: where each one is, what it says, and its fingerprint.

Only recipes that are asked for are read, so thousands of others cost nothing; the tree is walked for suggestions and
lists alone. What was read is kept: make a new book to see an edited recipe.
"""

from __future__ import annotations

import os
import stat
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from marin_build.errors import RecipeError
from marin_build.foreign import hide, holds_credentials
from marin_build.recipe import fingerprint as identity
from marin_build.recipe.dependencies import closure, identity_dependencies, needs
from marin_build.recipe.derived import base_of, derive, encoder_checks
from marin_build.recipe.document import MAX_BYTES, Document, dotted, parse_document, shown
from marin_build.recipe.problems import explain
from marin_build.recipe.schema import SCHEMAS, Recipe
from marin_build.recipe.target import WRITTEN, Target, is_target, parse_target, version_order

ENDING = ".yaml"
MAX_LISTED = 12


class RecipeBook:
    """The recipes below one folder."""

    def __init__(self, folder: str | Path, encoder: str = "auto") -> None:
        """`encoder` is the setting: it decides which encoders are compared before token sets are made."""
        self.folder, self.encoder = Path(folder), encoder
        self._recipes: dict[Target, Recipe] = {}
        self._fingerprints: dict[Target, str] = {}

    def path(self, target: Target) -> Path:
        """The file that says what `target` is."""
        target = base_of(target) if target.is_derived else target
        return self.folder / f"{target}{ENDING}"

    def shown(self, target: Target) -> str:
        """The recipe's path for messages: relative to the working directory where it lies below it."""
        path = self.path(target)
        try:
            return str(path.relative_to(Path.cwd())) if path.is_absolute() else str(path)
        except (ValueError, OSError):
            return str(path)

    def exists(self, target: Target) -> bool:
        try:
            return self.path(target).is_file()
        except RecipeError:
            return False

    def read(self, target: Target) -> bytes:
        """The bytes of the recipe's file.

        Raises:
            RecipeError: there is none, with what was meant perhaps, or it cannot be read.
        """
        path = self.path(target)
        self.refuse_outside(target)
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise RecipeError(f"{self.shown(target)}: is not a file")
            with open(path, "rb") as file:
                return file.read(MAX_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            raise self._no_recipe(target) from None
        except OSError as error:
            raise RecipeError(f"{self.shown(target)}: cannot be read: {error.strerror}") from None

    def refuse_outside(self, target: Target) -> None:
        """Raise RecipeError where a link leads from the recipe's path out of the folder of recipes."""
        real, folder = (os.path.realpath(path) for path in (self.path(target), self.folder))
        if os.path.commonpath([real, folder]) != folder:
            raise RecipeError(
                f"{self.shown(target)}: leads out of the folder of recipes, to {real}\n"
                "  copy the file in place of the link; recipes of another folder: --config recipes=FOLDER"
            )

    def document(self, target: Target) -> Document:
        """The recipe's file as plain values with line numbers, before its schema is applied."""
        return parse_document(self.read(target), self.shown(target))

    def load(self, target: Target) -> Recipe:
        """The recipe of `target`.

        Raises:
            RecipeError: file, line, field, value seen, values allowed, nearest known name.
        """
        if target not in self._recipes:
            self._recipes[target] = (
                derive(self, target) if target.is_derived else validate(self.document(target), target.kind)
            )
        return self._recipes[target]

    def needs(self, target: Target) -> tuple[str, ...]:
        """Every target that must be finished before this one is built."""
        recipe = self.load(target)
        checks = encoder_checks(self, recipe) if self.encoder == "auto" else ()
        return tuple(dict.fromkeys([*needs(recipe), *checks]))

    def identity(self, target: Target) -> dict[str, Any]:
        """The canonical identity body of `target`: what the fingerprint is computed from, without its dependencies."""
        return identity.identity_body(self.load(target))

    def fingerprint(self, target: Target) -> str:
        """32 hex digits that name what the recipe and everything upstream of it say.

        Raises:
            RecipeError: the recipe, or one that it is made from, is missing or wrong.
        """
        if target not in self._fingerprints:
            for member in closure(self, [target], identity_dependencies):
                if member not in self._fingerprints:
                    recipe = self.load(member)
                    upstream = {text: self._fingerprints[parse_target(text)] for text in identity_dependencies(recipe)}
                    self._fingerprints[member] = identity.fingerprint(recipe, upstream)
        return self._fingerprints[target]

    def where(self, target: Target, text: str) -> str:
        """`file:line: field` of the first place in the recipe of `target` that says `text`."""
        document = self.document(target)
        for path, line in document.lines.items():
            if document.at(path) == text:
                return f"{document.file}:{line}: {dotted(path)}"
        return document.file

    def targets(self) -> list[Target]:
        """All targets that have a recipe, by name, the newest version of each last. Walks the whole tree."""
        found = []
        for kind in WRITTEN:
            for folder, _, files in os.walk(self.folder / kind):
                name = Path(folder).relative_to(self.folder).as_posix()
                texts = (f"{name}/{file.removesuffix(ENDING)}" for file in files if file.endswith(ENDING))
                found += [parse_target(text) for text in texts if is_target(text)]
        return sorted(found, key=lambda target: (target.name, version_order(target.version), target.version))

    def suggest(self, text: str) -> str:
        """Lines of help for `text`, which names no recipe: what may have been meant, and where recipes are."""
        known = self.targets()
        if not known:
            return f"  no recipe is below {self.folder}/; run from the repository root, or set --config recipes=FOLDER"
        versions: dict[str, list[str]] = {}
        for target in known:
            versions.setdefault(target.name, []).append(target.version)
        typed = text.strip("/")
        name, _, version = ("", "", typed) if typed in versions else typed.rpartition("/")
        name = name or typed
        if name in versions:
            there = versions[name]
            return f"  did you mean {name}/{_nearest(version, there)}?\n  versions: {_listed(there)}"
        if names := _near_names(name, typed, list(versions)):
            return "\n".join(f"  did you mean {near}/{_nearest(version, versions[near])}?" for near in names)
        return f"  recipes are in {self.folder}/; `marin-build status` lists them"

    def _no_recipe(self, target: Target) -> RecipeError:
        path = self.path(target)
        if path.is_symlink():
            return RecipeError(f"{self.shown(target)}: is a link to {os.readlink(path)}, which does not exist")
        other = next((p for p in (self.folder / f"{target}.yml", self.folder / f"{target}.YAML") if p.exists()), None)
        rename = f"  there is {other}, but recipes end in {ENDING}\n" if other else ""
        return RecipeError(
            f"{target} has no recipe: {self.shown(target)} does not exist\n{rename}{self.suggest(str(target))}"
        )


def validate(document: Document, kind: str) -> Recipe:
    """Check a document against the schema of its kind.

    Raises:
        RecipeError: every problem found, with its line.
    """
    _refuse_credentials(document)
    schema = SCHEMAS[kind]
    try:
        recipe: Any = schema.model_validate(document.value)
    except ValidationError as error:
        raise explain(error, document, schema) from None
    return recipe  # type: ignore[no-any-return]


def _refuse_credentials(document: Document) -> None:
    """A recipe is copied into records, logs and reports, so it is no place for what opens doors."""
    for path, line in document.lines.items():
        value = document.at(path)
        if any(isinstance(text, str) and holds_credentials(text) for text in (value, path[-1])):
            place = f"{document.file}:{line}: {hide(dotted(path))}"
            raise RecipeError(
                f"{place}: holds credentials, which records and logs would keep, seen {shown(hide(str(value)))}\n"
                "  take them out; what reads the data finds them in HF_TOKEN, ~/.netrc or a credentials file"
            )


def _nearest(version: str, versions: list[str]) -> str:
    """The version that was meant, or else the newest."""
    return (get_close_matches(version, versions, n=1) or versions[-1:])[0]


def _listed(versions: list[str]) -> str:
    more = len(versions) - MAX_LISTED
    return f"{f'{more} older, ' if more > 0 else ''}{', '.join(versions[-MAX_LISTED:])}"


def _near_names(name: str, typed: str, names: list[str]) -> list[str]:
    """Up to three: the same name below another kind or group first, then the nearest spelling."""
    ends = [known for known in names if known.endswith((f"/{name}", f"/{typed}"))]
    return (ends or get_close_matches(name, names, n=3, cutoff=0.75))[:3]
