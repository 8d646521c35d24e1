"""`config/schema/<kind>.json`: the schemas for editors, which then complete keys, show their meaning and mark mistakes.

    python -m marin_build.recipe.json_schema [config/schema]

They are generated; a test keeps them in step.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from marin_build.recipe import schema, sources
from marin_build.recipe.schema import SCHEMAS


def json_schema(kind: str) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of one kind of recipe."""
    generated = SCHEMAS[kind].model_json_schema()
    documented = _documented(generated, _field_docstrings())
    title = f"marin_build recipe: {kind}"
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **documented, "title": title}


def write(folder: Path) -> list[Path]:
    """Write one file a kind, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind in SCHEMAS:
        paths.append(folder / f"{kind}.json")
        paths[-1].write_text(text(kind), encoding="utf-8")
    return paths


def text(kind: str) -> str:
    """What `config/schema/<kind>.json` holds."""
    return json.dumps(json_schema(kind), indent=2, ensure_ascii=False) + "\n"


def _documented(node: Any, docstrings: Mapping[str, Mapping[str, str]]) -> Any:
    """The schema without the generated titles, with the fields' docstrings, and closed against other names."""
    if isinstance(node, list):
        return [_documented(item, docstrings) for item in node]
    if not isinstance(node, dict):
        return node
    own = docstrings.get(node.get("title", "") if node.get("type") == "object" else "", {})
    out = {key: _documented(value, docstrings) for key, value in node.items() if not _is_title(key, value)}
    for name, field in out.get("properties", {}).items():
        if name in own:
            field["description"] = " ".join([own[name], field.get("description", "")]).strip()
    if needs := out.pop("x-needs", None):
        out["description"] = f"Needs {needs}."
    if "patternProperties" in out:
        out["additionalProperties"] = False
    return out


def _is_title(key: str, value: Any) -> bool:
    return key == "title" and isinstance(value, str)


def _field_docstrings() -> dict[str, dict[str, str]]:
    """The string under each field, by class and field; read from the source, since Python does not keep it."""
    found: dict[str, dict[str, str]] = {}
    for module in (schema, sources):
        tree = ast.parse(inspect.getsource(module))
        found |= {node.name: _under_fields(node.body) for node in tree.body if isinstance(node, ast.ClassDef)}
    return found


def _under_fields(body: Sequence[ast.stmt]) -> dict[str, str]:
    found = {}
    for field, below in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            constant = below.value
            if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                found[field.target.id] = " ".join(constant.value.split())
    return found


if __name__ == "__main__":
    for written in write(Path(sys.argv[1] if len(sys.argv) > 1 else "config/schema")):
        print(written)
