"""Source files in stores: found by URL and glob, pinned by digest, read where they lie, and never half."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import flaky_store
import fsspec
import pytest
from builders import texts_of
from corpora import written
from object_servers import missing_packages
from store_kinds import servers

from marin_build.artifact import fsspec_bucket
from marin_build.data import pin_notes, places, raw, sources
from marin_build.data.reading import read_chunks
from marin_build.data.shards import TokenizedSet
from marin_build.data.sources import files_digest, find, source_files
from marin_build.errors import MarinError, RequestError
from marin_build.recipe import schema
from marin_build.recipe.sources import Arrow, FilesSource, JsonArray, JsonLines, Parquet

__all__ = ["servers"]

TEXTS = [f"good {number} " + "x" * (number % 50) for number in range(500)]
FORMATS = {
    "c.jsonl": JsonLines(type="jsonl", text_key="text"),
    "c.jsonl.gz": JsonLines(type="jsonl", text_key="text"),
    "c.parquet": Parquet(type="parquet", text_key="text"),
    "c.arrow": Arrow(type="arrow", text_key="text"),
    "c.json": JsonArray(type="json_array", text_key="text"),
}


def content(name: str, texts: list[str] = TEXTS) -> bytes:
    return written(name, texts, rows=100)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fsspec_bucket, "FIRST_PAUSE_SECONDS", 0.001)
    places._files.cache_clear()
    yield
    places._files.cache_clear()
    flaky_store.TROUBLE.be_good()


@pytest.fixture(params=["memory", "flaky"])
def store(request, tmp_path):
    """A store with a corpus; a flaky one fails in a tenth of its calls and cuts a tenth of its answers short."""
    fs = fsspec.filesystem(request.param)
    place = f"{request.param}://bucket/{tmp_path.name}"
    for name in ("a/2.jsonl", "a/1.jsonl", "a/deep/3.jsonl", "b/4.jsonl", "b/.hidden/5.jsonl"):
        fs.pipe_file(f"bucket/{tmp_path.name}/{name}", content("c.jsonl", [f"text of {name}"]))
    for name in FORMATS:
        fs.pipe_file(f"bucket/{tmp_path.name}/formats/{name}", content(name))
    if request.param == "flaky":
        flaky_store.TROUBLE.start(7, errors=0.1, short_reads=0.1)
    return place


def source(*paths: str) -> FilesSource:
    return FilesSource(type="files", paths=list(paths), digest=files_digest(find(paths)))


def token_set(workbench, source: FilesSource, **fields) -> TokenizedSet:
    folder, _ = workbench.tokenize(workbench.raw({"none": b""}), workbench.bytes_tokenizer(), source=source, **fields)
    return TokenizedSet.open(folder)


# ---- finding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["a/2.jsonl"], ["2.jsonl"]),
        (["a/*.jsonl"], ["1.jsonl", "2.jsonl"]),
        (["**/[1-4].jsonl"], ["a/1.jsonl", "a/2.jsonl", "a/deep/3.jsonl", "b/4.jsonl"]),
        (["b/4.jsonl", "a/?.jsonl"], ["4.jsonl", "1.jsonl", "2.jsonl"]),
        (["b/**"], ["4.jsonl"]),
        (["a/2.jsonl", "a/*.jsonl"], ["2.jsonl", "1.jsonl"]),
    ],
)
def test_files_of_a_store_come_in_the_order_of_the_patterns_and_sorted_within_one(store, patterns, expected):
    assert [name for name, _ in find([f"{store}/{pattern}" for pattern in patterns])] == expected


def test_the_digest_of_files_does_not_depend_on_where_they_lie(store, tmp_path):
    for name in ("1.jsonl", "2.jsonl"):
        (tmp_path / name).write_bytes(content("c.jsonl", [f"text of a/{name}"]))
    assert files_digest(find([f"{store}/a/*.jsonl"])) == files_digest(find([f"{tmp_path}/*.jsonl"]))
    assert files_digest(find([f"file://{tmp_path}/*.jsonl"])) == files_digest(find([f"{tmp_path}/*.jsonl"]))


def test_what_is_not_there_is_named(store):
    for pattern in (f"{store}/c/*.jsonl", f"{store}/a/3.jsonl"):
        with pytest.raises(RequestError, match=r"^no source file matches '.*jsonl'$"):
            find([pattern])


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://*/x", "names no bucket without a glob"),
        ("nothing://bucket/x", "prefix nothing://…: Protocol not known: nothing"),
        ("s3://name:password@bucket/x", "may hold no password"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused(url, message):
    with pytest.raises(RequestError, match=message):
        find([url])


# ---- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_tokenized_where_it_lies(workbench, store, name):
    found = token_set(workbench, source(f"{store}/formats/{name}"), format=FORMATS[name], shard_bytes=4000)
    assert texts_of(found) == TEXTS
    assert len(found.shards) > 3
    assert found.ledger["shards"][0]["source"]["file"] == name


def test_a_raw_artifact_is_copied_from_a_store(workbench, store):
    recipe = schema.RawRecipe(source=source(f"{store}/**/[1-4].jsonl"))
    context = workbench.context("raw/bench/dev", recipe)
    result = raw.build(context)
    assert result.metrics["files"] == 4
    assert (context.folder / "a/deep/3.jsonl").read_bytes() == content("c.jsonl", ["text of a/deep/3.jsonl"])


def test_another_object_under_the_name_is_noticed(workbench, store):
    pinned = source(f"{store}/a/*.jsonl")
    path = store.partition("://")[2]
    flaky_store.TROUBLE.be_good()
    fsspec.filesystem(store.partition("://")[0]).pipe_file(f"{path}/a/1.jsonl", content("c.jsonl", ["other"]))
    with pytest.raises(RequestError, match="the source files are not the pinned ones") as error:
        token_set(workbench, pinned)
    assert f"the first: {store}/a/1.jsonl" in str(error.value)


@pytest.mark.parametrize("name", ["c.jsonl", "c.parquet"])
def test_an_object_that_changes_after_it_was_hashed_is_not_committed(workbench, store, name, monkeypatch):
    pinned, path = source(f"{store}/formats/{name}"), store.partition("://")[2]
    fs = fsspec.filesystem(store.partition("://")[0])
    usual = places.StoredFile.open
    opened = []

    def changing(file):
        opened.append(file)
        if len(opened) == 2:
            flaky_store.TROUBLE.be_good()
            fs.pipe_file(f"{path}/formats/{name}", content(name, [text.upper() for text in TEXTS]))
        return usual(file)

    monkeypatch.setattr(places.StoredFile, "open", changing)
    with pytest.raises(RequestError, match=rf"{store}/formats/{name} changed while it was read"):
        token_set(workbench, pinned, format=FORMATS[name])


@pytest.mark.parametrize("where", ["store", "disk"])
def test_files_that_were_proven_are_not_hashed_again_and_still_compared(workbench, store, tmp_path, monkeypatch, where):
    monkeypatch.setattr(pin_notes, "MIN_BYTES", 1)
    for name in ("1.jsonl", "2.jsonl"):
        (tmp_path / name).write_bytes(content("c.jsonl", [f"text of a/{name}"]))
    pinned = source(f"{store}/a/*.jsonl" if where == "store" else f"{tmp_path}/*.jsonl")
    context = workbench.context("raw/bench/dev", schema.RawRecipe(source=pinned), object_cache=str(tmp_path / "cache"))
    first = source_files(context, pinned)
    hashed = []
    usual = sources.hash_source
    monkeypatch.setattr(sources, "hash_source", lambda place, seen: hashed.append(place) or usual(place, seen))
    assert source_files(context, pinned) == first
    assert hashed == []
    flaky_store.TROUBLE.be_good()
    other = content("c.jsonl", ["other of a/1.jsonl"])[: first[0].bytes]
    if where == "store":
        fsspec.filesystem(store.partition("://")[0]).pipe_file(f"{store.partition('://')[2]}/a/1.jsonl", other + b" ")
    else:
        (tmp_path / "1.jsonl").write_bytes(other)
    with pytest.raises(RequestError, match=r"are not the pinned ones"):
        source_files(context, pinned)
    assert len(hashed) == 2


def test_an_object_that_is_gone_is_named(store):
    [(_, file)] = find([f"{store}/a/1.jsonl"])
    flaky_store.TROUBLE.be_good()
    fsspec.filesystem(store.partition("://")[0]).rm_file(f"{store.partition('://')[2]}/a/1.jsonl")
    with pytest.raises(RequestError, match=rf"source file {store}/a/1.jsonl cannot be read at byte 0: No such file"):
        list(read_chunks(file, 0, None, lambda _: None))


def test_a_store_that_is_down_is_one_line_and_no_fault_of_the_request(store):
    [(_, file)] = find([f"{store}/a/1.jsonl"])
    if store.startswith("memory"):
        pytest.skip("memory is never down")
    flaky_store.TROUBLE.down = True
    with pytest.raises(MarinError, match="the store failed 7 times") as error:
        list(read_chunks(file, 0, None, lambda _: None))
    assert not isinstance(error.value, RequestError)


def test_ranges_of_a_large_object_are_read_by_several_processes_as_the_same_bytes(workbench, servers, monkeypatch):
    if missing := missing_packages():
        pytest.skip(f"needs {missing}")
    from marin_build.data import tokenize

    place = f"{servers['s3']}/{workbench.folder.parent.name}"
    fs = fsspec.filesystem("s3", use_listings_cache=False)
    for name in ("c.jsonl", "c.parquet"):
        fs.pipe_file(f"{place}/{name}", content(name))
    monkeypatch.setattr(tokenize, "BYTES_WORTH_A_PROCESS", 1)
    for name in ("c.jsonl", "c.parquet"):
        fields = {"format": FORMATS[name], "shard_bytes": 4000}
        several = token_set(workbench, source(f"{place}/*{name[1:]}"), folder=f"{name}-2", processes=2, **fields)
        assert texts_of(several) == TEXTS
        one = token_set(workbench, source(f"{place}/{name}"), folder=f"{name}-1", processes=1, **fields)
        assert several.ledger["digest"] == one.ledger["digest"]


# ---- web servers -----------------------------------------------------------------------------------------------------


@pytest.fixture
def web(tmp_path):
    """The address of a folder, on a server that ignores Range as many do."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", tmp_path
    server.shutdown()


def test_a_small_file_of_a_web_server_is_read_and_what_cannot_be_is_refused(web, workbench):
    address, folder = web
    Path(folder / "c.jsonl").write_bytes(content("c.jsonl"))
    assert texts_of(token_set(workbench, source(f"{address}/c.jsonl"))) == TEXTS
    with pytest.raises(RequestError, match="a web server has no list of its files"):
        find([f"{address}/*.jsonl"])
    with pytest.raises(RequestError, match="no source file matches"):
        find([f"{address}/d.jsonl"])
    Path(folder / "large.jsonl").write_bytes(bytes(places.STORED_BUFFER_BYTES + 1))
    with pytest.raises(RequestError, match="the server gives no parts of a file"):
        source(f"{address}/large.jsonl")
