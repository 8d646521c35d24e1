"""Any bytes as input, and any harm to what an attempt left: an error for people or the right bytes, nothing else."""

from __future__ import annotations

import gzip
import json
import os
import random
from pathlib import Path

import pytest
import zstandard
from builders import Workbench
from hypothesis import given, settings
from hypothesis import strategies as st

from marin_build.data import sources
from marin_build.data.documents import Rejection, read_document, units
from marin_build.data.reading import decompressed, read_chunks
from marin_build.errors import MarinError, RequestError
from marin_build.recipe.sources import JsonLines, PlainText

FORMATS = [
    JsonLines(type="jsonl", text_key="text"),
    *(PlainText(type="text", document=d) for d in ("file", "line", "paragraph")),
]
PIECES = [
    b'{"text": "',
    b'"}',
    b"\n",
    b"\r",
    b"\xef\xbb\xbf",
    b"\xff",
    b"\\ud800",
    b"\\ud83d\\ude00",
    b"null",
    b"[",
    b"NaN",
]


@given(st.lists(st.sampled_from(PIECES) | st.binary(max_size=5), max_size=30), st.sampled_from(FORMATS))
@settings(max_examples=500)
def test_any_bytes_give_texts_or_rejections_at_a_byte_of_theirs(pieces, format):
    data, at = b"".join(pieces), 0
    for unit in units([data], format):
        document = read_document(unit, at, format)
        if isinstance(document, Rejection):
            assert at <= document.byte <= at + len(unit)
            json.dumps([document.reason, document.detail], ensure_ascii=False).encode()
        elif document is not None:
            assert document
            document.encode()
        at += len(unit)
    assert at == len(data)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_any_harm_to_a_compressed_file_is_an_error_or_harmless(tmp_path, suffix):
    """With the checksums of both formats, what is read in the end is what was written, or the build stops."""
    dice, path = random.Random(0), tmp_path / f"a{suffix}"
    text = dice.randbytes(3000).hex().encode()
    compress = gzip.compress if suffix == ".gz" else zstandard.ZstdCompressor(write_checksum=True).compress
    whole, errors = compress(text), []
    for _ in range(300):
        data = bytearray(whole)
        if dice.random() < 0.5:
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        else:
            data = data[: dice.randrange(len(data))]
        path.write_bytes(data)
        try:
            assert b"".join(decompressed(path, read_chunks(path, 0, None, lambda _: None))) in (text, b"")
        except MarinError as error:
            errors.append(str(error))
    assert len(errors) > 250
    assert all(str(path) in error for error in errors)


def harm(folder: Path, dice: random.Random) -> None:
    """Do something to one or two files of a folder."""
    one, other = dice.sample(sorted(path for path in folder.iterdir() if path.is_file()), 2)
    match dice.randrange(6):
        case 0:
            os.truncate(one, dice.randrange(one.stat().st_size))
        case 1:
            data = bytearray(one.read_bytes())
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
            one.write_bytes(data)
        case 2:
            one.unlink()
        case 3:
            one.write_bytes(other.read_bytes())
        case 4:
            one.with_name(one.name + ".tmp").write_bytes(b"half")
        case 5:
            one.write_bytes(dice.randbytes(50))


@pytest.mark.parametrize("seed", range(25))
def test_one_rerun_heals_any_harm_to_a_token_set(harmed, seed):
    bench, raw, tokens, whole = harmed
    folder, dice = bench.folder / "out", random.Random(seed)
    for _ in range(dice.randrange(1, 5)):
        harm(folder, dice)
    bench.tokenize(raw, tokens, folder="out", shard_bytes=400)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole, f"seed {seed}"


@pytest.fixture(scope="module")
def harmed(tmp_path_factory):
    """A bench, a finished token set in `out`, and its contents."""
    bench = Workbench(tmp_path_factory.mktemp("harmed"))
    data = "".join(json.dumps({"text": f"{number} " * 20}) + "\n" for number in range(40)).encode()
    raw = bench.raw({"a.jsonl": data, "b.jsonl.gz": gzip.compress(data), "c.jsonl.zst": zstandard.compress(data)})
    tokens = bench.bytes_tokenizer()
    folder, _ = bench.tokenize(raw, tokens, folder="out", shard_bytes=400)
    return bench, raw, tokens, {path.name: path.read_bytes() for path in folder.iterdir()}


@given(st.lists(st.text(max_size=30), min_size=1, max_size=30), st.integers(1, 400))
@settings(max_examples=15)
def test_plain_and_compressed_files_give_the_same_tokens_at_any_cut(bench_of_all, texts, shard_bytes):
    bench, tokens = bench_of_all
    texts = [text for text in texts if text.encode("utf-8", "ignore").decode() == text] or ["x"]
    data = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in [*texts, "x"]).encode()
    made = []
    for name, compressed in {
        "a.jsonl": data,
        "a.jsonl.gz": gzip.compress(data),
        "a.jsonl.zst": zstandard.compress(data),
    }.items():
        raw = bench.raw({name: compressed}, target=f"raw/{name.replace('.', '_')}/dev")
        _, result = bench.tokenize(raw, tokens, folder=f"out-{name}", shard_bytes=shard_bytes)
        made.append(result.metrics)
    assert made[0] == made[1] == made[2]
    assert made[0]["text_bytes"] == sum(len(text.encode()) for text in [*texts, "x"])


@pytest.fixture(scope="module")
def bench_of_all(tmp_path_factory):
    bench = Workbench(tmp_path_factory.mktemp("all"))
    return bench, bench.bytes_tokenizer()


@given(st.text(alphabet="ab*?[]!/.-", max_size=12), st.text(alphabet="ab/.-[]!", min_size=1, max_size=8))
@settings(max_examples=500)
def test_any_glob_is_a_pattern_of_its_own(pattern, name):
    """Never an error of the expression, and a pattern without wildcards means itself."""
    try:
        glob = sources.Glob(pattern)
    except RequestError:
        return  # a set such as [b-a]
    if not set("*?[") & set(pattern):
        assert glob.matches(name) == (pattern == name)
    if glob.matches(name) and "**" not in pattern:
        assert pattern.count("/") == name.count("/")
