"""Bad input, row by row: what stops a build, what is counted, and what is fine."""

from __future__ import annotations

import builtins
import gzip
import json
import os
import random
import time
from pathlib import Path

import pytest
import zstandard
from builders import texts_of, tokenized

from marin_build.data import documents
from marin_build.data.documents import lines, paragraphs, units
from marin_build.data.reading import CHUNK_BYTES, decompressed, read_chunks
from marin_build.errors import MarinError, RequestError
from marin_build.recipe.sources import JsonLines, PlainText

JSON_LINES = JsonLines(type="jsonl", text_key="text")
GOOD = [json.dumps({"text": f"good {number}"}).encode() for number in range(20)]
NOISE = [json.dumps({"text": random.Random(0).randbytes(40).hex()}).encode() for _ in range(5000)]


def joined(*records: bytes) -> bytes:
    return b"".join(record + b"\n" for record in records)


def around(record: bytes) -> bytes:
    """The record after ten good ones and before ten more."""
    return joined(*GOOD[:10], record, *GOOD[10:])


AT = len(joined(*GOOD[:10]))
"""Byte at which the record of `around` begins."""


# ---- documents that are bad ------------------------------------------------------------------------------------------

BAD = {
    "a malformed line": (b'{"text": "broken', AT, "malformed_json"),
    "an invalid UTF-8 byte": (b'{"text": "caf\xe9"}', AT + 13, "invalid_utf8"),
    "a lone surrogate": (b'{"text": "a\\ud800b"}', AT, "lone_surrogate"),
    "a missing key": (b'{"other": 1}', AT, "missing_key"),
    "a number instead of text": (b'{"text": 5}', AT, "not_text"),
    "a list instead of text": (b'{"text": ["a"]}', AT, "not_text"),
    "an array instead of an object": (b'[{"text": "a"}]', AT, "not_an_object"),
    "a bare string": (b'"text"', AT, "not_an_object"),
    "a document nested too deeply": (
        b'{"text": "a", "b": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        AT,
        "malformed_json",
    ),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.row(25)
def test_a_bad_document_stops_the_build_and_is_named(workbench, case):
    record, byte, reason = BAD[case]
    with pytest.raises(RequestError) as error:
        tokenized(workbench, around(record))
    first = str(error.value).splitlines()[0]
    assert f"corpus.jsonl, byte {byte:,}: {reason}: " in first
    assert first.startswith("tokenized/bench/dev: 1 unusable documents, max_bad_documents allows 0")
    assert not (workbench.folder / "tokenized/bench/dev/ledger.json").exists()


@pytest.mark.parametrize("case", BAD)
@pytest.mark.row(25)
def test_a_bad_document_within_the_limit_is_skipped_counted_and_listed(workbench, case):
    record, byte, reason = BAD[case]
    token_set = tokenized(workbench, around(record), max_bad_documents=1)
    assert texts_of(token_set) == [f"good {number}" for number in range(20)]
    assert token_set.ledger["skipped"] == {reason: 1}
    [listed] = token_set.ledger["rejections"]
    assert (listed["file"], listed["byte"], listed["reason"]) == ("corpus.jsonl", byte, reason)
    assert listed["detail"]


def test_a_last_line_that_is_cut_off_stops_the_build(workbench):
    with pytest.raises(RequestError, match="malformed_json"):
        tokenized(workbench, joined(*GOOD)[:-6])


def test_a_last_line_without_a_line_end_is_a_document(workbench):
    assert len(texts_of(tokenized(workbench, joined(*GOOD)[:-1]))) == 20


def test_a_pretty_printed_array_is_refused_with_what_is_needed(workbench):
    data = json.dumps([json.loads(record) for record in GOOD], indent=1).encode()
    with pytest.raises(RequestError, match="JSON lines need one object a line"):
        tokenized(workbench, data)


def test_more_bad_documents_than_allowed_are_all_shown_up_to_five(workbench):
    with pytest.raises(RequestError) as error:
        tokenized(workbench, joined(*[b"{"] * 8), max_bad_documents=6)
    assert "7 unusable documents, max_bad_documents allows 6" in str(error.value)
    assert str(error.value).count("malformed_json") == 5


# ---- documents that are counted --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("record", "reason"), [(b'{"text": null}', "null"), (b'{"text": ""}', "empty")])
def test_null_and_empty_are_counted_and_leave_no_lone_eos(workbench, record, reason):
    token_set = tokenized(workbench, around(record))
    assert len(texts_of(token_set)) == 20
    assert token_set.documents == 20
    assert token_set.ledger["skipped"] == {reason: 1}
    assert token_set.ledger["rejections"] == []


def test_a_source_without_any_text_is_an_error(workbench):
    with pytest.raises(RequestError, match="no document with text"):
        tokenized(workbench, joined(*[b'{"text": null}'] * 3))


# ---- documents that are fine -----------------------------------------------------------------------------------------

FINE = {
    "NUL": ('{"text": "a\\u0000b"}', "a\0b"),
    "U+2028": ('{"text": "a\u2028b"}', "a\u2028b"),
    "U+0085 and form feeds": ('{"text": "a\x85b\\fc"}', "a\x85b\fc"),
    "a surrogate pair": ('{"text": "\\ud83d\\ude00"}', "😀"),
    "NaN elsewhere": ('{"text": "x", "score": NaN}', "x"),
    "a duplicate key, of which the last wins": ('{"text": "first", "text": "second"}', "second"),
    "only spaces": ('{"text": "  "}', "  "),
    "space around": ('  {"text": "x"}\t', "x"),
}


@pytest.mark.parametrize("case", FINE)
def test_unusual_documents_are_read_as_they_are(workbench, case):
    record, text = FINE[case]
    assert texts_of(tokenized(workbench, around(record.encode())))[10] == text


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbf" + joined(*GOOD),
        joined(*GOOD).replace(b"\n", b"\r\n"),
        joined(*GOOD[:10]) + b"\n \n\n" + joined(*GOOD[10:]),
    ],
    ids=["BOM", "CRLF", "blank lines"],
)
def test_marks_and_line_ends_are_not_part_of_documents(workbench, data):
    token_set = tokenized(workbench, data)
    assert texts_of(token_set) == [f"good {number}" for number in range(20)]
    assert token_set.ledger["skipped"] == {}


def test_a_byte_order_mark_moves_no_byte_of_a_message(workbench):
    data = b"\xef\xbb\xbf" + b'{"text": "caf\xe9"}\n'
    with pytest.raises(RequestError, match="byte 16: invalid_utf8"):
        tokenized(workbench, data)


def test_a_document_of_30_mb_takes_linear_time(workbench):
    def seconds(count: int) -> float:
        text = json.dumps({"text": "word " * count}).encode()
        start = time.process_time()
        (unit,) = units(iter([text[at : at + 65536] for at in range(0, len(text), 65536)]), JSON_LINES)
        assert len(documents.read_document(unit, 0, JSON_LINES)) == 5 * count
        return time.process_time() - start

    seconds(600_000)
    small, large = (min(seconds(count) for _ in range(3)) for count in (600_000, 6_000_000))
    assert large < 40 * small + 0.1  # ten times the text; a quadratic reader needs a hundred times the time
    token_set = tokenized(workbench, joined(json.dumps({"text": "word " * 6_000_000}).encode()))
    assert token_set.tokens == 30_000_001
    assert token_set.documents == 1


# ---- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("corpus.jsonl", b""),
        ("corpus.jsonl.gz", gzip.compress(b"", mtime=0)),
        ("corpus.jsonl.zst", zstandard.compress(b"")),
    ],
)
def test_an_empty_file_is_an_error_that_names_it(workbench, name, data):
    raw = workbench.raw({"good.jsonl": joined(*GOOD), name: data})
    with pytest.raises(RequestError, match=rf"source file .*{name} is empty"):
        workbench.tokenize(raw, workbench.bytes_tokenizer())


@pytest.mark.parametrize("suffix", ["gz", "zst", "zstd"])
def test_compressed_files_give_the_documents_of_the_plain_one(workbench, suffix):
    compress = gzip.compress if suffix == "gz" else zstandard.compress
    token_set = tokenized(workbench, compress(joined(*GOOD)), f"corpus.jsonl.{suffix}")
    assert texts_of(token_set) == [f"good {number}" for number in range(20)]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_several_members_or_frames_are_one_file(workbench, suffix):
    compress = gzip.compress if suffix == "gz" else zstandard.compress
    token_set = tokenized(
        workbench, compress(joined(*GOOD[:10])) + compress(joined(*GOOD[10:])), f"corpus.jsonl.{suffix}"
    )
    assert len(texts_of(token_set)) == 20


def test_zeros_after_a_gzip_member_are_padding(workbench):
    token_set = tokenized(workbench, gzip.compress(joined(*GOOD)) + bytes(1000), "corpus.jsonl.gz")
    assert len(texts_of(token_set)) == 20


CUT = {
    "a gz cut at 90%": ("gz", lambda whole: whole[: len(whole) * 9 // 10], "gzip stream does not end"),
    "a gz cut in its checksum": ("gz", lambda whole: whole[:-2], "gzip stream does not end"),
    "a gz with a wrong CRC": ("gz", lambda whole: whole[:-8] + b"\0\0\0\0" + whole[-4:], "incorrect data check"),
    "a gz with a wrong length": ("gz", lambda whole: whole[:-4] + b"\1\0\0\0", "incorrect length check"),
    "a gz with text after it": ("gz", lambda whole: whole + b"text", "incorrect header check"),
    "a gz that is plain": ("gz", lambda whole: gzip.decompress(whole), "incorrect header check"),
    "a zst cut in half": ("zst", lambda whole: whole[: len(whole) // 2], "zstd stream does not end"),
    "a zst without its last byte": ("zst", lambda whole: whole[:-1], "zstd stream does not end"),
    "a zst of which a second frame is cut": ("zst", lambda whole: whole + whole[:50], "zstd stream does not end"),
    "a zst with a flipped byte": ("zst", lambda whole: whole[:-20] + b"\xff" * 8 + whole[-12:], "is damaged"),
    "a zst that is plain": ("zst", lambda whole: zstandard.decompress(whole), "is damaged"),
}


@pytest.mark.parametrize("case", CUT)
@pytest.mark.parametrize("max_bad_documents", [0, 10**9])
@pytest.mark.row(25)
def test_a_damaged_stream_always_stops_the_build(workbench, case, max_bad_documents):
    suffix, spoil, message = CUT[case]
    level = zstandard.ZstdCompressor(write_checksum=True)
    whole = gzip.compress(joined(*NOISE)) if suffix == "gz" else level.compress(joined(*NOISE))
    with pytest.raises(RequestError, match=rf"corpus.jsonl.{suffix}") as error:
        tokenized(workbench, spoil(whole), f"corpus.jsonl.{suffix}", max_bad_documents=max_bad_documents)
    assert message in str(error.value)


def test_compressed_bytes_under_a_plain_name_say_so(workbench):
    with pytest.raises(RequestError, match=r"looks compressed by gzip: give it the ending .gz"):
        tokenized(workbench, gzip.compress(joined(*NOISE)))
    with pytest.raises(RequestError, match=r"looks compressed by zstd: give it the ending .zst"):
        tokenized(workbench, zstandard.compress(joined(*NOISE)))
    with pytest.raises(RequestError, match="looks like UTF-16"):
        tokenized(workbench, joined(*GOOD).decode().encode("utf-16"))


@pytest.mark.parametrize("name", ["corpus.npy", "corpus.jsonl.bz2", "corpus.XZ"])
@pytest.mark.row(25)
def test_other_formats_are_refused_by_their_ending(workbench, name):
    with pytest.raises(RequestError, match=r"neither plain text, .gz nor .zst"):
        tokenized(workbench, b"data", name)


@pytest.mark.row(25)
def test_a_file_without_permission_is_named(workbench, monkeypatch):
    raw = workbench.raw({"corpus.jsonl": joined(*GOOD)})
    refuse_to_open(monkeypatch, raw.folder / "corpus.jsonl", PermissionError(13, "Permission denied"))
    with pytest.raises(RequestError, match=r"source file .*corpus.jsonl cannot be read at byte 0: Permission denied"):
        workbench.tokenize(raw, workbench.bytes_tokenizer())


@pytest.mark.row(25)
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user without permission")
def test_a_user_without_permission_is_told_which_file(tmp_path):
    """For real: a child of this process that is nobody."""
    from artifact_world import in_child

    path = tmp_path / "secret.jsonl"
    path.write_bytes(b"{}\n")
    path.chmod(0o600)
    folder = os.open(tmp_path, os.O_RDONLY)  # the folders above belong to root

    def read() -> None:
        os.fchdir(folder)
        os.setresuid(65534, 65534, 65534)
        list(read_chunks(Path("secret.jsonl"), 0, None, lambda _: None))

    tmp_path.chmod(0o755)
    assert in_child(read) == RequestError.exit_code


def test_a_disk_that_fails_is_no_fault_of_the_request():
    if not os.access("/proc/self/mem", os.R_OK):
        pytest.skip("needs a file that fails to be read")
    with pytest.raises(MarinError, match="cannot be read at byte 0: Input/output error") as error:
        list(read_chunks(Path("/proc/self/mem"), 0, None, lambda _: None))
    assert not isinstance(error.value, RequestError)


def refuse_to_open(monkeypatch, path: Path, error: OSError) -> None:
    usual = builtins.open

    def refusing(name, *arguments, **options):
        if Path(name) == path:
            raise error
        return usual(name, *arguments, **options)

    monkeypatch.setattr(builtins, "open", refusing)


# ---- text files ------------------------------------------------------------------------------------------------------

PROSE = "Á first\r\nparagraph.\n  \n\nA second one,\nof two lines\n\n\nand a last"


@pytest.mark.parametrize(
    ("document", "texts"),
    [
        ("file", [PROSE]),
        ("line", ["Á first", "paragraph.", "  ", "A second one,", "of two lines", "and a last"]),
        ("paragraph", ["Á first\r\nparagraph.", "A second one,\nof two lines", "and a last"]),
    ],
)
def test_text_is_one_document_a_file_a_line_or_a_paragraph(workbench, document, texts):
    text = PlainText(type="text", document=document)
    token_set = tokenized(workbench, b"\xef\xbb\xbf" + PROSE.encode(), "prose.txt", format=text)
    assert texts_of(token_set) == texts


def test_an_empty_line_is_an_empty_document(workbench):
    token_set = tokenized(workbench, b"a\n\r\n\nb\n", "prose.txt", format=PlainText(type="text", document="line"))
    assert texts_of(token_set) == ["a", "b"]
    assert token_set.ledger["skipped"] == {"empty": 2}


@pytest.mark.parametrize("document", ["file", "line", "paragraph"])
@pytest.mark.row(25)
def test_text_that_is_not_utf8_names_its_byte(workbench, document):
    with pytest.raises(RequestError, match=r"prose.txt, byte 5: invalid_utf8: .*0xff"):
        tokenized(workbench, b"good\n\xff\n", "prose.txt", format=PlainText(type="text", document=document))


def test_blank_lines_before_the_first_paragraph_belong_to_it():
    assert list(paragraphs(lines([b"\n\n a\nb\n\n \nc\n\n"]))) == [b"\n\n a\nb\n\n \n", b"c\n\n"]


def test_units_tile_the_stream_however_it_is_chunked():
    stream = random.Random(1)
    for _ in range(300):
        data = bytes(stream.choice(b"ab \n\n\r") for _ in range(stream.randrange(40)))
        size = stream.randrange(1, 8)
        chunks = [data[at : at + size] for at in range(0, len(data), size)]
        assert list(lines(chunks)) == data.splitlines(keepends=True) if b"\r" not in data else True
        for format in (JSON_LINES, *(PlainText(type="text", document=d) for d in ("file", "line", "paragraph"))):
            assert b"".join(units(chunks, format)) == data
            assert list(units(chunks, format)) == list(units([data], format))


def test_decompression_gives_bounded_pieces_of_a_file_of_zeros(tmp_path):
    """A megabyte of zstd can hold gigabytes: they must not be in memory at once."""
    path = tmp_path / "zeros.zst"
    path.write_bytes(zstandard.compress(bytes(64 << 20)))
    pieces = [len(piece) for piece in decompressed(path, read_chunks(path, 0, None, lambda _: None))]
    assert sum(pieces) == 64 << 20
    path = tmp_path / "zeros.gz"
    path.write_bytes(gzip.compress(bytes(64 << 20)))
    pieces = [len(piece) for piece in decompressed(path, read_chunks(path, 0, None, lambda _: None))]
    assert sum(pieces) == 64 << 20
    assert max(pieces) <= CHUNK_BYTES
