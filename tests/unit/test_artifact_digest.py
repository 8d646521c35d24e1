from __future__ import annotations

import os
from pathlib import Path

import pytest
import xxhash

from marin_build.artifact import digest
from marin_build.artifact.digest import file_entries, file_entry, hash_file, list_files, root_digest
from marin_build.errors import MarinError


def test_a_file_hashes_as_its_bytes_do_whatever_the_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    data = os.urandom(100_003)
    (tmp_path / "x").write_bytes(data)
    for chunk in (1000, 4096, 1 << 20):
        monkeypatch.setattr(digest, "CHUNK_BYTES", chunk)
        assert hash_file(tmp_path / "x") == (len(data), xxhash.xxh3_128_hexdigest(data))


def test_an_entry_names_the_file_relative_to_the_folder(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"hello")
    expected = {"path": "a/x", "bytes": 5, "xxh3_128": "b5e9c1ad071b3e7fc779cfaa5e523818"}
    assert file_entry(tmp_path / "a" / "x", below=tmp_path) == expected
    assert file_entry(tmp_path / "a" / "x")["path"] == "x"
    assert file_entries(tmp_path, ["a/x"]) == [expected]


def test_many_files_keep_their_order(tmp_path: Path):
    names = [f"{number}" for number in range(50)]
    for name in names:
        (tmp_path / name).write_text(name)
    assert [entry["path"] for entry in file_entries(tmp_path, reversed(names))] == names[::-1]


def test_the_root_is_pinned_and_depends_on_path_size_and_hash_but_not_on_order():
    one = {"path": "a", "bytes": 1, "xxh3_128": "00"}
    two = {"path": "é", "bytes": 2, "xxh3_128": "11"}
    root = root_digest([one, two])
    assert root == "044aff7bd1451b6f7ce3d0db1c5ec035"
    assert root_digest([two, {**one, "note": "ignored"}]) == root
    for change in ({"path": "b"}, {"bytes": 3}, {"xxh3_128": "22"}):
        assert root_digest([{**one, **change}, two]) != root


def test_files_are_listed_sorted_without_unfinished_ones(tmp_path: Path):
    for name in ("b", "a/z", "a/y", "c.tmp", "a/.hidden", ".own"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    assert list_files(tmp_path, skip=frozenset({".own"})) == ["a/.hidden", "a/y", "a/z", "b"]


def test_a_link_is_refused_by_name(tmp_path: Path):
    (tmp_path / "x").symlink_to("/etc/hostname")
    with pytest.raises(MarinError, match=f"{tmp_path}/x: is a link"):
        list_files(tmp_path)


def test_a_name_that_is_not_text_is_refused(tmp_path: Path):
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))).write_text("")
    with pytest.raises(MarinError, match="not UTF-8"):
        list_files(tmp_path)


def test_a_file_that_cannot_be_read_is_named_with_the_offset(tmp_path: Path):
    with pytest.raises(MarinError, match=f"{tmp_path}/x: cannot be read at byte 0: No such file"):
        hash_file(tmp_path / "x")
    with pytest.raises(MarinError, match="cannot be read at byte 0: Is a directory"):
        hash_file(tmp_path)
