"""Which files a source means, how they are pinned, and raw artifacts made of them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from marin_build.data import raw, sources
from marin_build.data.globs import Glob
from marin_build.data.sources import find
from marin_build.errors import DamageError, LeasedError, MarinError, RequestError, Stopped
from marin_build.recipe import schema
from marin_build.recipe.sources import ArtifactSource, EmbeddedSource, FilesSource

TARGET = "raw/bench/dev"


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A working directory with a small corpus."""
    for name, text in {"a/2.txt": "two", "a/1.txt": "one", "a/deep/3.txt": "three", "b/4.txt": "four"}.items():
        path = tmp_path / "place/corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


def names(*patterns: str) -> list[str]:
    return [name for name, _ in find(patterns)]


def files_recipe(*patterns: str, digest: str | None = None) -> schema.RawRecipe:
    digest = digest or sources.files_digest(find(patterns))
    return schema.RawRecipe(source=FilesSource(type="files", paths=list(patterns), digest=digest))


# ---- finding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["corpus/a/2.txt"], ["2.txt"]),
        (["corpus/a/*.txt"], ["1.txt", "2.txt"]),
        (["corpus/**/*.txt"], ["a/1.txt", "a/2.txt", "a/deep/3.txt", "b/4.txt"]),
        (["corpus/b/4.txt", "corpus/a/?.txt"], ["4.txt", "1.txt", "2.txt"]),
        (["corpus/[ab]/*.txt"], ["a/1.txt", "a/2.txt", "b/4.txt"]),
        (["corpus/a/2.txt", "corpus/a/*"], ["2.txt", "1.txt"]),
    ],
)
def test_files_come_in_the_order_of_the_patterns_and_sorted_within_one(place, patterns, expected):
    assert names(*patterns) == expected


def test_names_do_not_depend_on_where_the_files_lie(place, monkeypatch):
    relative = sources.files_digest(find(["corpus/**/*.txt"]))
    absolute = sources.files_digest(find([f"{place}/corpus/**/*.txt"]))
    (place / "corpus").rename(place.parent / "elsewhere")
    assert relative == absolute == sources.files_digest(find([f"{place.parent}/elsewhere/**/*.txt"]))


def test_a_name_with_glob_characters_is_found_as_it_is(place):
    (place / "corpus/part[1].txt").write_text("x")
    assert names("corpus/part[1].txt") == ["part[1].txt"]


def test_nothing_found_says_where_it_was_looked_for(place):
    with pytest.raises(RequestError, match=rf"no source file matches 'corpus/\*.gz'\n  working directory: {place}"):
        find(["corpus/*.gz"])
    with pytest.raises(RequestError, match=r"'corpus/a' is a folder; name its files, for example corpus/a/\*\*/\*"):
        find(["corpus/a"])
    os.mkfifo("corpus/pipe")
    with pytest.raises(RequestError, match="'corpus/pipe' is no plain file"):
        find(["corpus/pipe"])


def test_two_files_of_one_name_are_refused(place):
    (place / "corpus/b/1.txt").write_text("another")
    with pytest.raises(RequestError, match=r"corpus/a/1.txt and .*corpus/b/1.txt would both be named '1.txt'"):
        find(["corpus/a/*.txt", "corpus/b/*.txt"])


@pytest.mark.row(32)
def test_a_name_that_is_not_utf8_is_refused(place):
    try:
        Path(os.fsdecode(b"corpus/caf\xe9.txt")).write_text("x")
    except OSError:
        pytest.skip("this file system has UTF-8 names only")
    with pytest.raises(RequestError, match="the name is not UTF-8"):
        find(["corpus/*"])


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("*.jsonl", ["a.jsonl"], ["b/a.jsonl", "a.jsonl.gz", "ajsonl"]),
        ("**/*.jsonl", ["a.jsonl", "b/a.jsonl", "b/c/a.jsonl"], ["a.json"]),
        ("data/**", ["data/a", "data/b/c"], ["data", "other/a"]),
        ("a/**/z", ["a/z", "a/b/z", "a/b/c/z"], ["az", "a/bz"]),
        ("part-[0-9].txt", ["part-3.txt"], ["part-x.txt", "part-33.txt"]),
        ("part-[!0-9].txt", ["part-x.txt"], ["part-3.txt", "part-/.txt"]),
        ("part-[3.txt", ["part-[3.txt"], ["part-3.txt"]),
        ("[]x].txt", ["].txt", "x.txt"], ["y.txt"]),
        ("a+b(c).txt", ["a+b(c).txt"], ["aab(c).txt"]),
        ("?.txt", ["a.txt"], ["/.txt", "ab.txt"]),
    ],
)
def test_globs_over_the_files_of_an_artifact(pattern, yes, no):
    assert [name for name in yes + no if Glob(pattern).matches(name)] == yes


def test_artifact_files_that_no_glob_matches_are_named(workbench):
    dependency = workbench.raw({"a.jsonl": b"{}", "logs/1.log": b"", "b/c.jsonl": b"{}"})
    with pytest.raises(RequestError, match=r"no file of raw/bench/dev matches '\*.txt'\n  it has: a.jsonl, b/c.jsonl"):
        sources.artifact_files(dependency, ["*.txt"])


def test_artifact_files_leave_out_logs_and_come_in_order(workbench):
    dependency = workbench.raw({"b.jsonl": b"1", "a.jsonl": b"2", "logs/1.log": b"3"})
    found = sources.artifact_files(dependency, ["b*", "**/*"])
    assert [file.name for file in found] == ["b.jsonl", "a.jsonl"]


def test_an_artifact_file_that_is_missing_or_shortened_is_damage(workbench):
    dependency = workbench.raw({"a.jsonl": b"12345"})
    (dependency.folder / "a.jsonl").write_bytes(b"123")
    with pytest.raises(DamageError, match=r"raw/bench/dev is damaged: a.jsonl has 3 bytes instead of 5"):
        sources.artifact_files(dependency, ["*"])
    (dependency.folder / "a.jsonl").unlink()
    with pytest.raises(DamageError, match=r"a.jsonl is missing"):
        sources.artifact_files(dependency, ["*"])


# ---- raw artifacts ---------------------------------------------------------------------------------------------------


def test_raw_stores_files_as_they_are_and_its_digest_is_the_pinned_one(workbench, place):
    recipe = files_recipe("corpus/**/*.txt")
    context = workbench.context(TARGET, recipe)
    result = raw.build(context)
    assert result.metrics == {"files": 4, "bytes": 15}
    assert (context.folder / "a/deep/3.txt").read_text() == "three"
    assert workbench.finished(TARGET, context.folder).record["digest"] == recipe.source.digest


def test_the_quickstart_corpus_is_stored_whole(workbench):
    digest = sources.files_digest(sources.embedded("quickstart"))
    context = workbench.context(
        TARGET, schema.RawRecipe(source=EmbeddedSource(type="embedded", corpus="quickstart", digest=digest))
    )
    raw.build(context)
    assert workbench.finished(TARGET, context.folder).record["digest"] == digest
    assert {"train.jsonl", "validation.jsonl", "SOURCE.md"} <= {path.name for path in context.folder.iterdir()}


def test_an_unknown_corpus_names_those_that_there_are(workbench):
    recipe = schema.RawRecipe(source=EmbeddedSource(type="embedded", corpus="nosuch", digest="0" * 32))
    with pytest.raises(RequestError, match=r"no embedded corpus 'nosuch'; there are: .*quickstart"):
        raw.build(workbench.context(TARGET, recipe))


def test_other_bytes_than_pinned_are_refused_with_both_digests_and_the_command(workbench, place):
    recipe = files_recipe("corpus/a/*.txt")
    seen = sources.files_digest(find(["corpus/b/*.txt", "corpus/a/*.txt"]))
    with pytest.raises(RequestError) as error:
        raw.build(
            workbench.context(TARGET, files_recipe("corpus/b/*.txt", "corpus/a/*.txt", digest=recipe.source.digest))
        )
    first, *details = str(error.value).splitlines()
    assert first.startswith("raw/bench/dev: the source files are not the pinned ones")
    assert f"expected {recipe.source.digest}, seen {seen}" in first
    assert "marin-build pin raw/bench/dev" in details[-1]
    assert list((workbench.folder / TARGET).iterdir()) == []


@pytest.mark.parametrize("name", [".artifact.json", ".hidden/x", "logs/1.txt", "half.tmp"])
def test_names_that_belong_to_the_artifact_itself_are_refused(workbench, place, name):
    path = place / "corpus" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("x")
    pattern = "corpus/logs*/*" if "logs" in name else str(path)
    if name.startswith(".hidden"):
        pattern = "corpus/.hidden*/*"
    with pytest.raises(RequestError, match=r"would be stored as '.*', which is not possible"):
        raw.build(workbench.context(TARGET, files_recipe(pattern)))


def test_a_raw_build_resumes_with_intact_copies_only(workbench, place):
    recipe = files_recipe("corpus/**/*.txt")
    context = workbench.context(TARGET, recipe)
    raw.build(context)
    kept = (context.folder / "b/4.txt").stat().st_ino
    (context.folder / "a/1.txt").write_text("onE")  # same size
    (context.folder / "a/2.txt").write_text("tw")
    (context.folder / "a/deep/3.txt").unlink()
    (context.folder / "a/deep/3.txt.tmp").write_text("a leftover of a killed attempt")
    raw.build(context)
    assert workbench.finished(TARGET, context.folder).record["digest"] == recipe.source.digest
    assert (context.folder / "b/4.txt").stat().st_ino == kept
    assert not (context.folder / "a/deep/3.txt.tmp").exists()


@pytest.mark.row(24)
def test_a_source_that_changes_while_it_is_copied_is_not_committed(workbench, place, monkeypatch):
    recipe = files_recipe("corpus/a/1.txt")
    usual = raw.source_files

    def change_after_hashing(context, source):
        found = usual(context, source)
        (place / "corpus/a/1.txt").write_text("oNe")
        return found

    monkeypatch.setattr(raw, "source_files", change_after_hashing)
    with pytest.raises(RequestError, match=r"corpus/a/1.txt changed while it was read: expected \w{32}, seen \w{32}"):
        raw.build(workbench.context(TARGET, recipe))
    assert not (workbench.folder / TARGET / "1.txt").exists()


def test_a_signal_stops_hashing_and_copying(workbench, place, monkeypatch):
    context = workbench.context(TARGET, files_recipe("corpus/**/*.txt"))
    with pytest.raises(Stopped, match="stopped by a signal while source files were hashed"):
        raw.build(replace(context, stop_requested=lambda: True))
    calls = iter([False] * 4 + [True] * 9)
    with pytest.raises(Stopped, match=r"while a/1.txt was copied"):
        raw.build(replace(context, stop_requested=lambda: next(calls)))


def test_a_lost_lease_commits_nothing(workbench, place):
    def lost() -> None:
        raise LeasedError("another builder has taken over")

    context = replace(workbench.context(TARGET, files_recipe("corpus/a/1.txt")), check_lease=lost)
    with pytest.raises(LeasedError):
        raw.build(context)
    assert not (context.folder / "1.txt").exists()


@pytest.mark.row(5)
def test_a_full_disk_says_how_many_bytes_are_needed(workbench, place, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MarinError, match=r"the disk is full: .*4.txt: 4 bytes needed") as error:
        raw.build(workbench.context(TARGET, files_recipe("corpus/b/4.txt")))
    assert error.value.exit_code == 1


def test_tokens_can_be_made_of_files_without_a_raw_artifact(workbench, place):
    (place / "corpus/lines.jsonl").write_text('{"text": "one"}\n')
    digest = sources.files_digest(find(["corpus/*.jsonl"]))
    source = FilesSource(type="files", paths=["corpus/*.jsonl"], digest=digest)
    _, result = workbench.tokenize(workbench.raw({"unused": b""}), workbench.bytes_tokenizer(), source=source)
    assert result.metrics["tokens"] == 4
    unpinned = source.model_copy(update={"digest": "0" * 32})
    with pytest.raises(RequestError, match="not the pinned ones"):
        workbench.tokenize(workbench.raw({"unused": b""}), workbench.bytes_tokenizer(), source=unpinned)


def test_artifact_sources_know_their_artifact(workbench):
    context = workbench.context(
        TARGET, schema.RawRecipe(source=EmbeddedSource(type="embedded", corpus="x", digest="0" * 32))
    )
    dependency = workbench.raw({"a.txt": b"x"})
    context = replace(context, dependencies={str(dependency.target): dependency})
    [file] = sources.source_files(context, ArtifactSource(type="artifact", target=TARGET, files=["*"]))
    assert (file.name, file.bytes, file.artifact) == ("a.txt", 1, TARGET)
