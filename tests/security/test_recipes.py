"""A recipe from somewhere else: refused in one clear line, or plain values; it never runs, grows or reaches out."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from artifact_world import RAW, World
from hypothesis import given
from hypothesis import settings as tries
from hypothesis import strategies as st

from marin_build.errors import RecipeError, RequestError
from marin_build.recipe import edit
from marin_build.recipe.document import MAX_BYTES, parse_document
from marin_build.recipe.fingerprint import canonical_bytes, identity_body
from marin_build.recipe.load import RecipeBook, validate
from marin_build.recipe.schema import SCHEMAS, Recipe
from marin_build.recipe.target import parse_target

TARGET = parse_target(RAW)


def load(data: bytes, kind: str = "raw") -> Recipe:
    return validate(parse_document(data, "f.yaml"), kind)


def refused(data: bytes, kind: str = "raw") -> str:
    with pytest.raises(RecipeError) as error:
        load(data, kind)
    message = str(error.value)
    assert message.startswith("f.yaml")
    assert all(line.isprintable() for line in message.split("\n"))
    assert len(message) < 20_000
    return message


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system ['touch ran']",
        "!!python/object/new:subprocess.Popen [[touch, ran]]",
        "!!python/name:os.system",
        "!!python/module:ran",
        "!!binary aGk=",
        "!include /etc/passwd",
        "!<tag:yaml.org,2002:python/object:x> {}",
    ],
)
def test_a_tag_is_refused_and_nothing_runs(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert refused(f"source: {value}\n".encode()).startswith("f.yaml:1: tags (")
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", "f.yaml:1: anchors and aliases"),
        (b"a: *a\n", "f.yaml:1: anchors and aliases"),
        (b"<<: {a: 1}\n", "merging"),
        (b"a: 1\na: 2\n", "stands here twice, first on line 1"),
        (b'a: 1\n"\\x61": 2\n', "stands here twice, first on line 1"),
        (b"[" * 500_000, "maximum nesting depth"),
        (b"{a: " * 100_000, "is nested deeper than 24 levels"),
        (b"".join(b" " * i + b"a:\n" for i in range(1000)), "is nested deeper than 24 levels"),
        (b"a: " + b"9" * 500_000, "does not fit into 64 bits"),
        (b"a: 1e999", "too large for a number"),
        (b"a: .inf", "numbers are finite"),
        (b"a: x\x00y", "control character U+0000"),
        (b'a: "x\\0y"', "control character U+0000"),
        (b"a: \x1b[31mred", "control character U+001B"),
        (b'a: "\\e]0;title\\a"', "control character U+001B"),
        (b"a: \xff\xfe", "is not UTF-8"),
        (b"a: \xed\xa0\x80", "is not UTF-8"),
        (b'a: "\\ud800"', "invalid Unicode character"),
        (b"a: 1\n---\nb: 2\n", "a second document begins"),
        (b"%TAG ! tag:x,2000:\n---\na: !x 1", "tags ("),
        (b"? [a]\n: 1", "a key must be text"),
        (b"a: '" + b"x" * MAX_BYTES + b"'", f"is larger than {MAX_BYTES} bytes"),
        (b"k: 1\n" * 100_000, "stands here twice"),
        (b"source: {type: files, paths: [" + b"1," * 20_000 + b"], digest: unresolved}", "and 19988 more"),
    ],
    ids=lambda value: ascii(value[:24]),
)
def test_what_could_grow_hide_or_mean_two_things_is_refused(data: bytes, problem: str):
    assert problem in refused(data)


def test_line_ends_and_a_byte_order_mark_change_nothing():
    text = "# a\nsource:\n  type: embedded\n  corpus: quickstart\n  digest: unresolved\n"
    for data in (
        text.replace("\n", "\r\n").encode(),
        b"\xef\xbb\xbf" + text.encode(),
        text.replace("\n", "\r").encode(),
    ):
        assert load(data) == load(text.encode())


# ---- where the file is -----------------------------------------------------------------------------------------------


def test_a_link_out_of_the_folder_of_recipes_is_refused_without_a_word_of_what_is_there(world: World, tmp_path: Path):
    (tmp_path / "secret.yaml").write_text("xyzzy:x:0:0\n")
    path = world.folder / f"config/{RAW}.yaml"
    path.unlink()
    path.symlink_to(tmp_path / "secret.yaml")
    with pytest.raises(RecipeError, match=r"leads out of the folder of recipes, to .*secret\.yaml\n  copy") as error:
        world.book.load(TARGET)
    assert "xyzzy" not in str(error.value)
    path.unlink()
    path.symlink_to("other.yaml")
    path.with_name("other.yaml").write_text("source: {type: embedded, corpus: quickstart, digest: unresolved}\n")
    assert world.book.load(TARGET)


def test_a_linked_folder_is_neither_read_nor_written_through(world: World, tmp_path: Path):
    (tmp_path / "outside").mkdir()
    (world.folder / "config/raw/b").symlink_to(tmp_path / "outside")
    (tmp_path / "outside/dev.yaml").write_text((world.folder / f"config/{RAW}.yaml").read_text())
    for attack in (
        lambda book: book.load(parse_target("raw/b/dev")),
        lambda book: edit.new(book, parse_target("raw/b/x-dev")),
    ):
        with pytest.raises(RecipeError, match="leads out of the folder of recipes"):
            attack(world.book)
    assert os.listdir(tmp_path / "outside") == ["dev.yaml"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_a_pipe_a_folder_or_a_device_is_no_recipe_and_nothing_waits_for_it(world: World, make: Any):
    path = world.folder / f"config/{RAW}.yaml"
    path.unlink()
    make(path)
    with pytest.raises(RecipeError, match=r"is not a file|leads out of the folder"):
        world.book.load(TARGET)


def test_a_folder_of_recipes_may_be_a_link_itself(world: World, tmp_path: Path):
    (tmp_path / "elsewhere").symlink_to(world.folder / "config")
    assert RecipeBook(tmp_path / "elsewhere").load(TARGET)


# ---- what it names ---------------------------------------------------------------------------------------------------

FILES = "source: {{type: {type}, {more}, files: [{files}]}}\n"
HUB = "id: a/b, revision: abcdef0"


@pytest.mark.parametrize("glob", ["/etc/*", "../x", "a/../../x", "~/x", '"a\\nb"', "x" * 1001, '""'])
@pytest.mark.parametrize(("kind", "more"), [("huggingface", HUB), ("github", HUB.replace("id:", "repository:"))])
def test_a_glob_of_a_repository_stays_in_it(kind: str, more: str, glob: str):
    assert "a relative path or glob without '..'" in refused(FILES.format(type=kind, more=more, files=glob).encode())


@pytest.mark.parametrize("name", ["../x", "a/../b", "a/b/c", "-x/y", "a/b;rm", "a/$(x)", "a b", "--upload-pack=x"])
def test_a_repository_has_a_plain_name(name: str):
    for kind, key in (("huggingface", "id"), ("github", "repository")):
        refused(FILES.format(type=kind, more=f'{key}: "{name}", revision: abcdef0', files="x").encode())


@pytest.mark.parametrize("revision", ["main", "--upload-pack=x", "0123456;x", "../x", "012345", '"0123456\\n"'])
def test_a_revision_is_a_commit(revision: str):
    refused(FILES.format(type="github", more=f"repository: a/b, revision: {revision}", files="x").encode())


@pytest.mark.parametrize("corpus", ["../x", "/etc", "a/b", '"quickstart\\n"', ".", "Q"])
def test_a_corpus_is_one_of_ours(corpus: str):
    refused(f"source: {{type: embedded, corpus: {corpus}, digest: unresolved}}\n".encode())


@pytest.mark.parametrize("target", ["../raw/a/dev", "/raw/a/dev", "raw/../raw/a/dev", "raw//a/dev", '"raw/a/dev\\n"'])
def test_a_dependency_is_a_target(world: World, target: str):
    world.edit("tokenized/x/2026.06.28", RAW, target)
    with pytest.raises(RecipeError, match=r"source\.target: .* is not a target"):
        world.book.load(parse_target("tokenized/x/2026.06.28"))


# ---- credentials -----------------------------------------------------------------------------------------------------

SECRETS = [
    "https://user:hunter22@host/x",
    "https://hunter22@host/x",
    "https://host/x?token=hunter22",
    "https://host/x?a=1&X-Amz-Signature=hunter22",
    "https://a.blob.core.windows.net/c/x?sv=2020&sig=hunter22&se=1",
    "s3://key:hunter22@bucket/x",
    "hf_hunter22hunter22",
    "ghp_hunter22hunter22",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_a_recipe_with_credentials_is_refused_and_they_are_not_repeated(secret: str):
    for text in (
        f'source: {{type: files, paths: ["{secret}"], digest: unresolved}}\n',
        f'source: {{type: embedded, corpus: a, digest: unresolved}}\nmeasure: {{description: "see {secret}"}}\n',
        f'source: {{type: wrong, paths: ["{secret}"]}}\n',
        f'"{secret}": 1\n',
    ):
        message = refused(text.encode())
        assert "holds credentials, which records and logs would keep" in message
        assert "hunter22" not in message


@pytest.mark.parametrize(
    "url", ["https://host/x?token_count=5", "ssh://git@github.com/a/b", "a@b.c", "https://host/@x"]
)
def test_a_url_without_credentials_is_a_path_like_any_other(url: str):
    assert load(f'source: {{type: files, paths: ["{url}"], digest: unresolved}}\n'.encode())


# ---- anything at all -------------------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        *"a\n[]{},|>\"'#\t~\x1b\x00é\U000e0041",
        *(": ", "  ", "- ", "&a ", "*a", "!!str ", "? ", "---\n", "<<: ", "\\x1b"),
        *("source", "type", "files", "digest: unresolved", "1e400", "0x1"),
    ]
)


@tries(max_examples=80)
@given(
    st.lists(PIECES, max_size=30).map("".join).map(str.encode) | st.binary(max_size=100),
    st.sampled_from(sorted(SCHEMAS)),
)
def test_any_bytes_are_a_recipe_or_refused_by_name(data: bytes, kind: str):
    with contextlib.suppress(RequestError):
        load(data, kind)


@tries(max_examples=80)
@given(st.data())
def test_a_recipe_with_any_value_anywhere_is_read_or_refused_and_what_is_read_has_a_fingerprint(data: st.DataObject):
    value = data.draw(st.one_of(st.none(), st.integers(), st.floats(), st.text(), st.lists(st.text(), max_size=3)))
    path = data.draw(
        st.sampled_from([("source",), ("source", "type"), ("source", "paths"), ("source", "digest"), ("measure",)])
    )
    document = parse_document(b"source: {type: files, paths: [x], digest: unresolved}\nmeasure: {}\n", "f.yaml")
    inner: Any = document.value
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    with contextlib.suppress(RecipeError, ValueError):  # half a character, which no file can hold, has no fingerprint
        canonical_bytes(identity_body(validate(document, "raw")))
