"""A record, an attempt or a lease from somewhere else: damaged in one line, whatever it holds, and never a way out."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from artifact_world import RAW, Parts, World
from forgery import ATTEMPT_BODY, LEASE_BODY, OWNER_BODY, RAW_BODY, entry, signed
from hypothesis import given
from hypothesis import settings as tries
from hypothesis import strategies as st

from marin_build.artifact.attempt import read_attempt
from marin_build.artifact.context import BuildContext, BuildResult
from marin_build.artifact.examine import State
from marin_build.artifact.lease import parse_lease
from marin_build.artifact.local_store import LocalStore
from marin_build.artifact.record import parse_record
from marin_build.artifact.store import ATTEMPT, RECORD
from marin_build.data.sources import find
from marin_build.errors import DamageError, MarinError, RequestError
from marin_build.recipe.target import parse_target

TARGET = parse_target(RAW)

OUTSIDE = ["/etc/passwd", "../x", "a/../../x", "a/..", "..", ".", "", "a//b", "a/", "./a", "//x", "a/./b"]
ODD = ["a\\b", "..\\x", "a\nb", "a\x00", "\x1b[2J", "a\x7f", "a\x9b", "x" * 5000, "\ud800", "C:\\x"]
RESERVED = [".artifact.json", ".attempt.json", ".lease.json", ".lock", ".rebuild/x", ".aside/x", "x.tmp", "a/b.tmp"]
HUGE, DEEP = 10**30, 100_000

WRONG: list[tuple[str, Any]] = [
    ("files", "x"),
    ("files", {"path": "x"}),
    ("files", [["x", 1]]),
    ("files", None),
    ("files", [entry(), entry()]),
    ("files", [{"path": "x"}]),
    ("files", [{**entry(), "outside_digest": "yes"}]),
    *[("files", [entry(path=path)]) for path in (None, 1, True, ["x"], *OUTSIDE, *ODD, *RESERVED)],
    *[("files", [entry(size=size)]) for size in (-1, 1.0, True, None, "3", HUGE)],
    *[("files", [entry(digest=digest)]) for digest in ("0" * 31, "0" * 33, "G" * 32, "0" * 32 + "\n", 0, None)],
    *[(key, value) for key in ("fingerprint", "digest") for value in ("", "0" * 31, "F" * 32, 1, None, ["0" * 32])],
    *[("recipe", value) for value in ([], "x", None)],
    *[("dependencies", value) for value in ({}, "x", None, [{}], ["raw/a/dev"])],
    *[
        ("dependencies", [{"name": name, "version": version, "fingerprint": "0" * 32, "digest": "0" * 32}])
        for name, version in [
            ("../../etc", "dev"),
            ("raw/../..", "dev"),
            ("/raw/a", "dev"),
            ("raw/a", "../dev"),
            ("raw", "a/dev"),
            ("raw/a", ""),
            ("raw/a\n", "dev"),
            (1, "dev"),
        ]
    ],
    *[("metrics", value) for value in ([], "x", {"loss": []}, {"loss": {}})],
    *[("provenance", value) for value in ([], {"command": "rm"}, {"packages": []}, {"code": 1}, {"attempts": [1]})],
    ("provenance", {"code": {"digest": "x", "modules": "x"}}),
    ("accepted", [{"reason": "x"}]),
    ("accepted", "x"),
    ("replaced", [1]),
    ("damage", [{"path": "x"}]),
    ("damage", [{"path": 1, "problem": "x"}]),
    ("measured", [{"name": "x"}]),
    ("schema", "1"),
    ("schema", 0),
    ("schema", True),
    ("schema", 1.0),
    ("schema", HUGE),
    ("name", None),
    ("name", "raw/b"),
    ("version", "2026.06.29"),
    ("kind", "checkpoints"),
    ("written_by", []),
]


def refused(data: bytes) -> str:
    with pytest.raises(DamageError) as error:
        parse_record(data, TARGET, "here")
    message = str(error.value)
    assert message.startswith(f"{RAW} is damaged: its record here ")
    assert "\n" not in message
    assert message.isprintable()
    assert len(message) < 800
    return message


def test_the_forger_writes_records_that_are_believed():
    assert parse_record(signed(RAW_BODY), TARGET, "here").files[0]["path"] == "x"
    later = {**RAW_BODY, "new_field": {"a": [1]}, "files": [{**entry(), "of_a_later_version": 1}]}
    assert parse_record(signed(later), TARGET, "here")


@pytest.mark.parametrize(("field", "value"), WRONG, ids=lambda value: ascii(value)[:60])
def test_a_field_that_no_record_can_have_is_damage_in_one_line(field: str, value: Any):
    refused(signed({**RAW_BODY, field: value}))


@pytest.mark.parametrize("field", [key for key in RAW_BODY if key not in ("metrics", "provenance")])
def test_a_missing_field_is_damage(field: str):
    refused(signed({key: value for key, value in RAW_BODY.items() if key != field}))


@pytest.mark.parametrize(
    "data",
    [
        b"[" * DEEP,
        b'{"a":' * DEEP,
        b"[" * DEEP + b"]" * DEEP,
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": ' + b"9" * 10_000 + b"}",
        b'{"a": 1} {"b": 2}',
        b'{"a": 1}x',
        b'{"a": "\\ud800"}',
        b'{"a": "\xff"}',
        b'\xef\xbb\xbf{"a": 1}',
        '{"a": 1}'.encode("utf-16"),
        b"\x00" * 100,
        b"\x80\x04\x95",
        b"",
    ],
    ids=lambda data: ascii(data[:20]),
)
def test_what_is_no_strict_json_is_damage(data: bytes):
    assert "is not JSON" in refused(data)


def test_a_key_that_stands_twice_is_damage_because_two_readers_would_see_two_records():
    data = signed(RAW_BODY)
    assert "the key 'name' twice" in refused(data[:-1] + b', "name": "raw/a"}')


def test_nesting_that_python_could_still_read_is_damage_before_anything_walks_through_it():
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"a": deep}
    assert "nested deeper" in refused(signed({**RAW_BODY, "recipe": deep}))


def test_a_record_of_another_target_is_damage_even_with_a_correct_checksum():
    assert "is that of raw/b/dev" in refused(signed({**RAW_BODY, "name": "raw/b", "version": "dev"}))


def test_an_unknown_schema_is_refused_without_quoting_what_it_says_at_length():
    with pytest.raises(RequestError) as error:
        parse_record(signed({**RAW_BODY, "schema": 7, "written_by": "\x1b" + "x" * 10_000}), TARGET, "here")
    assert len(str(error.value)) < 400


# ---- what the program does about them --------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"[" * DEEP, signed({**RAW_BODY, "files": [entry(path="../../outside")]})])
def test_looks_builds_and_verifications_meet_a_forged_record_without_a_traceback(world: World, data: bytes):
    (world.folder / "outside").write_bytes(b"abc")
    world.store.replace(TARGET, RECORD, data)
    assert world.status(RAW).state is State.damaged
    assert not world.verify(RAW).ok
    assert world.build(RAW).built
    assert (world.folder / "outside").read_bytes() == b"abc"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("folder", "/tmp"),
        ("folder", "../../elsewhere"),
        ("folder", "logs"),
        ("folder", None),
        ("id", "../../etc/x"),
        ("id", "a/b"),
        ("id", ""),
        ("id", "a\n"),
        ("token", "9"),
        ("token", -1),
        ("token", HUGE),
        ("recipe", []),
        ("dependencies", [{"name": "../..", "version": "dev", "fingerprint": "0" * 32, "digest": "0" * 32}]),
        ("failure", "x"),
        ("failure", {"run": 1, "exit_code": "2", "message": []}),
        ("earlier", [{"id": "/x"}]),
        ("repairs", "x"),
        ("schema", "1"),
        ("started", 5),
    ],
)
def test_a_forged_attempt_is_no_attempt(tmp_path: Path, field: str, value: Any):
    store = LocalStore(tmp_path)
    store.replace(TARGET, ATTEMPT, signed(ATTEMPT_BODY))
    assert read_attempt(store, TARGET)
    store.replace(TARGET, ATTEMPT, signed({**ATTEMPT_BODY, field: value}))
    assert read_attempt(store, TARGET) is None


def test_an_attempt_cannot_send_a_builder_elsewhere(world: World, tmp_path: Path):
    fingerprint = world.book.fingerprint(TARGET)
    body = {**ATTEMPT_BODY, "fingerprint": fingerprint, "folder": f"{tmp_path}/elsewhere"}
    (tmp_path / "elsewhere").mkdir()
    world.store.replace(TARGET, ATTEMPT, signed(body))
    assert world.build(RAW).built
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"token": "9"},
        {"token": -1},
        {"lease_seconds": 1e300},
        {"lease_seconds": 0},
        {"lease_seconds": "90"},
        {"nonce": 1},
        {"beat": None},
        {"wall_seconds": "now"},
        {"owner": []},
        {"owner": {**OWNER_BODY, "pid": "../../x"}},
        {"owner": {**OWNER_BODY, "pid": -1}},
        {"owner": {**OWNER_BODY, "host": 1}},
        {"more": 1},
    ],
    ids=ascii,
)
def test_a_forged_lease_is_an_unreadable_one_whose_silence_is_watched(change: dict[str, Any]):
    assert parse_lease(json.dumps(LEASE_BODY).encode())
    assert parse_lease(json.dumps({**LEASE_BODY, **change}).encode()) is None


@pytest.mark.parametrize("data", [b"[" * DEEP, b'{"token": NaN}', b"\xff", b"1", b"null", b""])
def test_what_is_no_lease_is_none(data: bytes):
    assert parse_lease(data) is None


# ---- anything at all -------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.sampled_from([*OUTSIDE, *ODD])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner), max_leaves=8
)


@tries(max_examples=70)
@given(st.sampled_from(sorted(RAW_BODY)), VALUES)
def test_any_value_of_any_field_of_a_record_is_read_or_damage(field: str, value: Any):
    with contextlib.suppress(DamageError, RequestError):
        record = parse_record(signed({**RAW_BODY, field: value}), TARGET, "here")
        assert parse_record(record.to_bytes(), TARGET, "here") == record
        paths = [Path(item["path"]) for item in record.files]
        assert not any(path.is_absolute() or ".." in path.parts for path in paths)


@tries(max_examples=50)
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_a_record_or_damage_and_never_a_lease_by_accident(data: bytes):
    refused(data)
    assert parse_lease(data) is None


@tries(max_examples=50)
@given(st.sampled_from(sorted(ATTEMPT_BODY)), VALUES)
def test_any_value_of_any_field_of_an_attempt_is_read_or_none(tmp_path_factory: Any, field: str, value: Any):
    store = LocalStore(tmp_path_factory.getbasetemp() / "attempts")
    path = store.folder(TARGET) / ATTEMPT
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(signed({**ATTEMPT_BODY, field: value}))
    try:
        attempt = read_attempt(store, TARGET)
    except RequestError:
        assert field == "schema"
    else:
        assert attempt is None or attempt.folder in (".", ".rebuild")


# ---- what is committed can be read -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a\\b", "a\nb", "a\x7f", "\x1b[31m", b"\xff"])
def test_a_builder_cannot_commit_a_name_that_a_record_would_be_refused_for(world: World, name: str | bytes):
    def build(context: BuildContext) -> BuildResult:
        (context.folder / os.fsdecode(name)).write_bytes(b"x")
        return Parts()(context)

    with pytest.raises(MarinError, match=r"record cannot name|is not UTF-8"):
        world.build(RAW, build)
    assert world.status(RAW).record is None


def test_a_source_file_whose_name_no_record_can_hold_is_refused_before_anything_is_read(tmp_path: Path):
    for name in ("a\\b.txt", "a\nb.txt", "\x1b[31m.txt"):
        (tmp_path / name).write_text("x")
        with pytest.raises(RequestError, match="the name is not UTF-8 or holds a backslash or a control") as error:
            find([f"{tmp_path}/*.txt"])
        assert str(error.value).isprintable()
        (tmp_path / name).unlink()
