"""What is wrong with a recipe, said for people: file and line, field, what it needs, what was seen, the nearest name.

The JSON Schema of the kind is the one description of what is allowed; pydantic says where it was not kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from marin_build.errors import RecipeError
from marin_build.recipe.document import Document, Path, dotted, shown
from marin_build.recipe.fields import Model

Schema = Mapping[str, Any]

MAX_SHOWN = 12
MAX_EXPLAINED = 200
"""Problems that are looked at: a list of a million wrong items is one mistake."""


@dataclass(frozen=True)
class Problem:
    """One line of the message, and what it is about."""

    line: int
    path: Path
    text: str
    details: str = ""
    suggests: Path | None = None
    """The missing field that a misspelt or misplaced key stands for."""


def explain(error: ValidationError, document: Document, schema: type[Model]) -> RecipeError:
    """Every problem of `error`, in the order of the file; the first one is the first line."""
    tree = _Tree(schema.model_json_schema(), document)
    found = [tree.problem(item) for item in error.errors(include_url=False)[:MAX_EXPLAINED]]
    covered = {problem.suggests for problem in found if problem.suggests}
    problems = [problem for problem in found if problem.path not in covered or problem.suggests]
    problems.sort(key=lambda problem: problem.line)
    lines = [f"{document.file}:{p.line}: {_field(p)}{p.text}{p.details}" for p in problems[:MAX_SHOWN]]
    more = len(problems) - MAX_SHOWN + max(0, error.error_count() - MAX_EXPLAINED)
    return RecipeError("\n".join(lines + ([f"  and {more} more"] if more > 0 else [])))


class _Tree:
    """A JSON Schema beside the document that should keep it."""

    def __init__(self, schema: Schema, document: Document) -> None:
        self._schema, self._document = schema, document

    def problem(self, error: Any) -> Problem:
        path, is_key = self._path(error["loc"])
        match error["type"]:
            case "extra_forbidden":
                return self._unknown(path)
            case "missing":
                return self._missing(path)
            case "union_tag_invalid" | "union_tag_not_found":
                return self._tag(path)
            case "value_error":
                return self._custom(path, str(error["ctx"]["error"]), error["input"])
        if is_key:
            needs = self._at(path[:-1]).get("propertyNames", {}).get("x-needs", "another name")
            return Problem(
                self._document.line(path), path[:-1], f"the name {shown(path[-1])} is not allowed; needs {needs}"
            )
        return self._value(path, error["input"])

    def _path(self, location: tuple[str | int, ...]) -> tuple[Path, bool]:
        """Pydantic's location as a path in the document: without the tags of unions; and whether a key is meant."""
        path: Path = ()
        tagged: Path | None = None
        for part in location:
            if part == "[key]":
                return path, True
            tag = self._at(path).get("discriminator", {}).get("propertyName")
            if tag and tagged != path and self._document.at((*path, tag)) == part:
                tagged = path
                continue
            path = (*path, part)
        return path, False

    def _value(self, path: Path, seen: Any) -> Problem:
        schema = self._at(path, choose=False)
        needs = self._describe(schema)
        return Problem(self._document.line(path), path, f"needs {needs}, seen {shown(seen)}{_hint(schema, seen)}")

    def _custom(self, path: Path, message: str, seen: Any) -> Problem:
        inner = _path_said_first(message)
        line = self._document.line((*path, *inner))
        simple = isinstance(seen, str | int | float) and repr(seen) not in message
        return Problem(line, path, f"{message}, seen {shown(seen)}" if simple else message)

    def _unknown(self, path: Path) -> Problem:
        key, names = str(path[-1]), self._names(path[:-1])
        here = f"{dotted(path[:-1])} has" if path[:-1] else "a recipe of this kind has"
        details = f"\n  {here}: {', '.join(names)}"
        line = self._document.line(path)
        missing = [name for name in names if name not in self._mapping(path[:-1])]
        if near := get_close_matches(key, missing, n=1) or get_close_matches(key, names, n=1):
            return Problem(line, path, f"unknown key; did you mean {near[0]!r}?", details, (*path[:-1], near[0]))
        required = [name for name in self._at(path[:-1]).get("required", []) if name in missing]
        if len(required) == 1 and not any(home[-1] == key for home in self._homes((), self._schema)):
            text = f"unknown key; did you mean {required[0]!r}, which is missing?"
            return Problem(line, path, text, details, (*path[:-1], required[0]))
        if len(homes := [home for home in self._homes((), self._schema) if home[-1] == key]) == 1:
            block = dotted(homes[0][:-1])
            place = f"in the block {block!r}" if block else "at the top level"
            return Problem(line, path, f"does not belong here, but {place}", details, homes[0])
        return Problem(line, path, "unknown key", details)

    def _missing(self, path: Path) -> Problem:
        block = dotted(path[:-1])
        where = f"from the block {block!r}" if block else "at the top level"
        line = self._document.line(path[:-1])
        return Problem(line, path, f"missing {where}; needs {self._describe(self._at(path, choose=False))}")

    def _tag(self, path: Path) -> Problem:
        schema = self._at(path, choose=False)
        if (choices := _choices(schema)) is None or not isinstance(block := self._document.at(path), dict):
            return self._value(path, self._document.at(path))
        name, tags = choices
        if name not in block:
            text = f"missing from the block {dotted(path)!r}; needs {_one_of(tags)}"
            return Problem(self._document.line(path), (*path, name), text)
        text = f"needs {_one_of(tags)}, seen {shown(block[name])}{_near(block[name], tags)}"
        return Problem(self._document.line((*path, name)), (*path, name), text)

    def _at(self, path: Path, choose: bool = True) -> Schema:
        """The schema of `path`; with `choose`, unions are followed down to the document's choice."""
        schema: Schema = self._schema
        for depth, part in enumerate(path):
            schema = self._chosen(schema, self._document.at(path[:depth]))
            properties = schema.get("properties", {})
            if isinstance(part, int):
                schema = schema.get("items", {})
            else:
                named = next(iter(schema.get("patternProperties", {}).values()), schema.get("additionalProperties"))
                schema = properties.get(part) or (named if isinstance(named, dict) else {})
        schema = self._followed(schema)
        return self._chosen(schema, self._document.at(path)) | _discriminator(schema) if choose else schema

    def _chosen(self, schema: Schema, value: Any) -> dict[str, Any]:
        schema = self._followed(schema)
        if "anyOf" in schema:
            some = [self._followed(item) for item in schema["anyOf"] if item.get("type") != "null"]
            return self._chosen(some[0], value)
        if choices := _choices(schema):
            tag = value.get(choices[0]) if isinstance(value, dict) else None
            reference = schema["discriminator"]["mapping"].get(tag) if isinstance(tag, str) else None
            return dict(self._followed({"$ref": reference})) if reference else dict(schema)
        return dict(schema)

    def _followed(self, schema: Schema) -> Schema:
        reference = schema.get("$ref")
        return self._schema["$defs"][reference.rpartition("/")[2]] if reference else schema

    def _names(self, path: Path) -> list[str]:
        return list(self._at(path).get("properties", {}))

    def _mapping(self, path: Path) -> dict[str, Any]:
        value = self._document.at(path)
        return value if isinstance(value, dict) else {}

    def _homes(self, path: Path, schema: Schema) -> Iterator[Path]:
        """Paths of all fields of this recipe, as its unions are chosen."""
        chosen = self._chosen(schema, self._document.at(path))
        for name, inner in chosen.get("properties", {}).items():
            yield (*path, name)
            yield from self._homes((*path, name), inner)

    def _describe(self, schema: Schema) -> str:
        schema = self._followed(schema)
        if "anyOf" in schema:
            return " or ".join(
                "null" if item.get("type") == "null" else self._describe(item) for item in schema["anyOf"]
            )
        if choices := _choices(schema):
            return f"a block whose {choices[0]!r} is {_one_of(choices[1])}"
        if "enum" in schema or "const" in schema:
            return _one_of(schema.get("enum", [schema.get("const")]))
        if needs := schema.get("x-needs"):
            return str(needs)
        match schema.get("type"):
            case "integer":
                return f"a whole number{_range(schema)}"
            case "number":
                return f"a number{_range(schema)}"
            case "boolean":
                return "true or false"
            case "array":
                some = " of at least one item" if schema.get("minItems") else ""
                return f"a list{some}, each {self._describe(schema['items'])}"
            case "object":
                names = list(schema.get("properties", {}))
                return f"a block with {', '.join(names)}" if names else "a block of names with values"
        return "text"


def _path_said_first(message: str) -> Path:
    """The path that a message begins with: `data.stages[0].from_step: …`."""
    parts = re.findall(r"[^.\[\]]+", message.partition(" ")[0].removesuffix(":"))
    return tuple(int(part) if part.isdecimal() else part for part in parts)


def _discriminator(schema: Schema) -> dict[str, Any]:
    return {"discriminator": schema["discriminator"]} if "discriminator" in schema else {}


def _field(problem: Problem) -> str:
    return f"{dotted(problem.path)}: " if problem.path else ""


def _choices(schema: Schema) -> tuple[str, list[str]] | None:
    found = schema.get("discriminator")
    return (found["propertyName"], list(found["mapping"])) if found and "oneOf" in schema else None


def _one_of(values: list[Any]) -> str:
    spelled = [value if isinstance(value, str) else json.dumps(value) for value in values]
    return spelled[0] if len(spelled) == 1 else f"one of {', '.join(spelled)}"


def _range(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None and "exclusiveMaximum" in schema:
        return f" of at least {low} and below {schema['exclusiveMaximum']}"
    if "exclusiveMinimum" in schema:
        return f" above {schema['exclusiveMinimum']}"
    return f" of at least {low}" if low is not None else f" of at most {high}" if high is not None else ""


def _near(seen: Any, names: list[str]) -> str:
    near = get_close_matches(seen, names, n=1) if isinstance(seen, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def _hint(schema: Schema, seen: Any) -> str:
    """A remark for values that are right in another notation."""
    allowed = {item.get("type") for item in [schema, *schema.get("anyOf", [])]}
    if "null" in allowed and isinstance(seen, str) and seen.lower() in ("none", "nil", "off", "no"):
        return "; write null"
    if allowed & {"integer", "number"} and isinstance(seen, str):
        plain = seen.replace("_", "").strip()
        return f"; write {plain} without quotes or '_'" if len(plain) < 30 and _is_number(plain) else ""
    if "integer" in allowed and isinstance(seen, float) and seen.is_integer():
        return f"; write {int(seen)}"
    if "boolean" in allowed and isinstance(seen, str):
        return {"yes": "; write true", "on": "; write true", "no": "; write false", "off": "; write false"}.get(
            seen.lower(), ""
        )
    if "string" in allowed and isinstance(seen, int | float) and "enum" not in schema:
        return "; put quotes around text that looks like a number"
    return _near(seen, schema.get("enum", []))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
