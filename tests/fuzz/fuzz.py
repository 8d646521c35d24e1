"""Coverage-guided fuzzing of the doors through which foreign bytes come: `python tests/fuzz/fuzz.py DOOR [options]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

with atheris.instrument_imports(include=["marin_build"]):
    from forgery import ATTEMPT_BODY, RAW_BODY, signed

    from marin_build.artifact.bodies import attempt_body, check
    from marin_build.artifact.digest import body_checksum
    from marin_build.artifact.lease import parse_lease
    from marin_build.artifact.record import parse_record
    from marin_build.artifact.strict_json import parse_object
    from marin_build.errors import MarinError
    from marin_build.foreign import printable
    from marin_build.recipe.document import parse_document
    from marin_build.recipe.fingerprint import canonical_bytes, identity_body
    from marin_build.recipe.load import validate
    from marin_build.recipe.schema import SCHEMAS
    from marin_build.recipe.target import parse_target
    from marin_build.settings import Settings, read_yaml, resolve
    from marin_build.typed import as_target

TARGET = parse_target("raw/a/2026.06.28")
KINDS = sorted(SCHEMAS)


def recipe(data: bytes) -> None:
    kind = KINDS[data[0] % len(KINDS)] if data else KINDS[0]
    canonical_bytes(identity_body(validate(parse_document(data[1:], "f.yaml"), kind)))


def _fields(data: bytes, body: dict[str, object]) -> dict[str, object]:
    """A body with one of its fields replaced by what `data` says in JSON."""
    names = sorted(body)
    return {**body, names[data[0] % len(names)]: json.loads(data[1:])} if data else body


def record(data: bytes) -> None:
    try:
        content = signed(_fields(data, RAW_BODY))
    except (ValueError, RecursionError):
        content = data
    found = parse_record(content, TARGET, "here")
    assert parse_record(found.to_bytes(), TARGET, "here") == found
    assert not any(entry["path"].startswith("/") or ".." in entry["path"].split("/") for entry in found.files)


def attempt(data: bytes) -> None:
    try:
        content = signed(_fields(data, ATTEMPT_BODY))
    except (ValueError, RecursionError):
        content = data
    try:
        body = parse_object(content, half_characters=True)
        body_checksum(body)
        check(attempt_body, body)
    except ValueError:
        return
    assert body["folder"] in (".", ".rebuild") or str(body["folder"]).startswith("builds/")
    assert "/" not in str(body["id"])


def lease(data: bytes) -> None:
    parse_lease(data)


def target(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    found = parse_target(as_target(text, Settings()))
    assert ".." not in str(found).split("/")
    assert str(found).isascii()
    assert str(found).isprintable()


def settings(data: bytes) -> None:
    try:
        given = read_yaml(data)
    except ValueError:
        return
    resolve({str(key): value for key, value in given.items()} if isinstance(given, dict) else {"prefix": given}, {})


def glob(data: bytes) -> None:
    from marin_build.data.globs import Glob

    pattern, _, name = data.decode("utf-8", "replace").partition("\n")
    Glob(pattern[:1000]).matches(name)


def tokenizer(data: bytes) -> None:
    from marin_build.data.vocabulary import check_vocabulary
    from marin_build.recipe.schema import SpecialTokens

    check_vocabulary(data, 257, SpecialTokens(bos=None, eos=None, pad=None), "here")


def document(data: bytes) -> None:
    from marin_build.data.documents import read_document
    from marin_build.recipe.sources import JsonLines

    found = read_document(data, 0, JsonLines(type="jsonl", text_key="text"))
    assert found is None or isinstance(found, str) or found.detail.isascii() or printable(found.detail)


def shown(data: bytes) -> None:
    text = printable(data.decode("utf-8", "surrogateescape"))
    assert all(line.replace("\t", "").isprintable() for line in text.split("\n"))


DOORS: dict[str, Callable[[bytes], None]] = {
    **{function.__name__: function for function in (recipe, record, attempt, lease, target, settings, glob)},
    **{"tokenizer": tokenizer, "document": document, "printable": shown},
}


def main() -> None:
    door = DOORS[sys.argv.pop(1)]

    def one(data: bytes) -> None:
        try:
            door(data)
        except MarinError as error:
            assert len(str(error)) < 100_000  # noqa: PT017

    atheris.Setup(sys.argv, one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
