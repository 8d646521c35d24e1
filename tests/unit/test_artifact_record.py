from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from marin_build.artifact.local_store import LocalStore
from marin_build.artifact.record import Record, parse_record, read_record, write_record
from marin_build.artifact.store import RECORD
from marin_build.errors import DamageError, RequestError
from marin_build.recipe.target import Target

TARGET = Target("raw/a", "2026.06.28")
RECORD_OF_TARGET = Record(
    name="raw/a",
    version="2026.06.28",
    kind="raw",
    fingerprint="f" * 32,
    digest="d" * 32,
    recipe={"learning_rate": 1e-4, "text": "é", "none": None},
    dependencies=({"name": "raw/b", "version": "dev", "fingerprint": "a" * 32, "digest": "b" * 32},),
    files=(
        {"path": "x", "bytes": 3, "xxh3_128": "0" * 32},
        {"path": "y", "bytes": 0, "xxh3_128": "1" * 32, "outside_digest": True},
    ),
    metrics={"loss": 0.1},
)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def test_a_record_is_read_as_it_was_written(store: LocalStore):
    assert read_record(store, TARGET) is None
    write_record(store, RECORD_OF_TARGET)
    assert read_record(store, TARGET) == RECORD_OF_TARGET


def test_the_file_holds_what_others_rely_on(store: LocalStore):
    write_record(store, RECORD_OF_TARGET)
    body = json.loads((store.folder(TARGET) / ".artifact.json").read_text())
    assert {"schema", "name", "version", "kind", "fingerprint", "digest", "recipe", "dependencies", "files"} < set(body)
    assert {"metrics", "provenance", "checksum"} < set(body)
    assert json.loads(json.dumps(RECORD_OF_TARGET.to_dict())) == body


def test_only_content_counts_as_content():
    assert [entry["path"] for entry in RECORD_OF_TARGET.content] == ["x"]


def test_a_record_may_be_indented_anew_but_not_changed(store: LocalStore):
    body = json.loads(RECORD_OF_TARGET.to_bytes())
    again = parse_record(json.dumps(body, sort_keys=True).encode(), TARGET, "here")
    assert again == RECORD_OF_TARGET
    body["digest"] = "e" * 32
    with pytest.raises(DamageError, match=r"raw/a/2026\.06\.28 is damaged: its record here fails its checksum"):
        parse_record(json.dumps(body).encode(), TARGET, "here")


@pytest.mark.row(8)
def test_every_flipped_bit_of_a_record_is_noticed_or_harmless():
    data = RECORD_OF_TARGET.to_bytes()
    for position in range(len(data)):
        for bit in (0, 2, 5):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            try:
                read = parse_record(bytes(flipped), TARGET, "here")
            except (DamageError, RequestError):
                continue
            assert read == RECORD_OF_TARGET, position


def test_every_truncation_of_a_record_is_noticed():
    data = RECORD_OF_TARGET.to_bytes()
    for length in range(len(data) - 2):
        with pytest.raises(DamageError):
            parse_record(data[:length], TARGET, "here")


def test_a_record_of_another_target_is_refused(store: LocalStore):
    write_record(store, RECORD_OF_TARGET)
    other = Target("raw/a", "2026.06.29")
    store.replace(other, RECORD, store.read(TARGET, RECORD) or b"")
    with pytest.raises(DamageError, match=r"is that of raw/a/2026\.06\.28"):
        read_record(store, other)


@pytest.mark.row(33)
def test_a_record_of_a_newer_schema_is_refused_with_the_version_that_wrote_it():
    newer = dataclasses.replace(RECORD_OF_TARGET, schema=99, written_by="7.1")
    with pytest.raises(RequestError, match=r"schema 99, this version \(.*\) reads up to 1\n  use marin_build 7.1"):
        parse_record(newer.to_bytes(), TARGET, "here")


@pytest.mark.row(33)
def test_a_record_that_misses_fields_that_came_later_is_read():
    from marin_build.artifact.digest import body_checksum

    body = RECORD_OF_TARGET.to_dict()
    for name in ("checksum", "replaced", "damage", "measured"):
        del body[name]
    old = json.dumps({**body, "checksum": body_checksum(body)}).encode()
    assert parse_record(old, TARGET, "here") == RECORD_OF_TARGET


@pytest.mark.row(33)
def test_a_record_with_a_field_that_nobody_knows_yet_is_read():
    from marin_build.artifact.digest import body_checksum

    body = {**RECORD_OF_TARGET.to_dict(), "of_the_future": {"a": [1]}}
    del body["checksum"]
    newer = json.dumps({**body, "checksum": body_checksum(body)}).encode()
    assert parse_record(newer, TARGET, "here") == RECORD_OF_TARGET
    flipped = newer.replace(b"of_the_future", b"of_the_futurf")
    with pytest.raises(DamageError, match="fails its checksum"):
        parse_record(flipped, TARGET, "here")


def test_a_record_without_a_needed_field_says_which():
    from marin_build.artifact.digest import body_checksum

    body = RECORD_OF_TARGET.to_dict()
    for name in ("checksum", "digest"):
        del body[name]
    with pytest.raises(DamageError, match="has no digest"):
        parse_record(json.dumps({**body, "checksum": body_checksum(body)}).encode(), TARGET, "here")


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"\xff\xfe", b"{"])
def test_what_is_no_record_is_damage(data: bytes):
    with pytest.raises(DamageError, match="its record here"):
        parse_record(data, TARGET, "here")


@pytest.mark.parametrize("path", ["/etc/passwd", "../other", "a/../../b"])
def test_a_record_cannot_name_files_outside_of_its_folder(path: str):
    outside = dataclasses.replace(RECORD_OF_TARGET, files=({"path": path, "bytes": 0, "xxh3_128": "0" * 32},))
    with pytest.raises(DamageError, match="names a file outside"):
        parse_record(outside.to_bytes(), TARGET, "here")
