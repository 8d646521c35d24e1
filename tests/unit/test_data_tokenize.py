"""Token sets: the same bytes however the work is cut, interrupted or damaged, and nothing but the pinned input."""

from __future__ import annotations

import gzip
import json
import logging
import os
import random
import re
import signal
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import zstandard

from marin_build.artifact.context import Dependency
from marin_build.data import crew, progress, tokenize, workshop
from marin_build.data.ledger import Policy, shard_file, stamp
from marin_build.data.shards import TokenizedSet
from marin_build.data.sources import SourceFile
from marin_build.data.vocabulary import LoadedTokenizer
from marin_build.errors import DamageError, LeasedError, MarinError, RequestError, Stopped
from marin_build.recipe import schema
from marin_build.recipe.sources import (
    JsonLines,
    PlainText,
)

DICE = random.Random(0)
RECORDS = [json.dumps({"text": DICE.randbytes(DICE.randrange(150)).hex(), "id": n}).encode() for n in range(600)]
CORPUS = b"".join(record + b"\n" for record in RECORDS)
TEXTS = [text for text in (json.loads(record)["text"] for record in RECORDS) if text]


@pytest.fixture
def tokens(workbench):
    return workbench.bytes_tokenizer()


@pytest.fixture
def several(monkeypatch):
    """Let small texts be worth several processes."""
    monkeypatch.setattr(tokenize, "BYTES_WORTH_A_PROCESS", 1)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def texts_of(folder: Path) -> list[str]:
    texts = []
    for shard in TokenizedSet.open(folder).shards:
        edges = shard.offsets.tolist()
        texts += [bytes(shard.ids[a : b - 1].astype(np.uint8)).decode() for a, b in pairwise(edges)]
    return texts


def shards_made(result) -> tuple[int, int]:
    return result.details["shards_made"], result.details["shards_kept"]


# ---- the same bytes --------------------------------------------------------------------------------------------------


def test_any_number_of_processes_gives_the_same_bytes(workbench, tokens, several):
    raw = workbench.raw(
        {"a.jsonl": CORPUS, "b/c.jsonl.gz": gzip.compress(CORPUS), "d.jsonl.zst": zstandard.compress(CORPUS)}
    )
    made = {}
    for processes in (1, 3):
        folder, result = workbench.tokenize(raw, tokens, processes=processes, folder=f"p{processes}", shard_bytes=9000)
        assert result.details["processes"] == processes
        made[processes] = contents(folder)
    assert made[1] == made[3]
    assert len(made[1]) > 60


@pytest.mark.parametrize("shard_bytes", [1, 100, 5000, 10**6])
def test_every_document_is_there_once_and_in_order_wherever_the_cuts_are(workbench, tokens, shard_bytes):
    folder, _ = workbench.tokenize(
        workbench.raw({"a.jsonl": CORPUS[:20_000]}), tokens, shard_bytes=shard_bytes, max_bad_documents=1
    )
    assert texts_of(folder) == TEXTS[: len(texts_of(folder))]
    assert len(texts_of(folder)) > 80
    whole = TokenizedSet.open(folder)
    spans = [(shard["source"]["start"], shard["source"]["end"]) for shard in whole.ledger["shards"]]
    assert spans[0][0] == 0
    assert spans[-1][1] == 20_000
    assert all(a[1] == b[0] for a, b in pairwise(spans))


@pytest.mark.parametrize("document", ["line", "paragraph", "file"])
def test_text_is_cut_between_documents_only(workbench, tokens, document):
    text = b"\n\n".join(b"line of %d\nand another" % number for number in range(300))
    raw = workbench.raw({"a.txt": text})
    sets = {}
    for shard_bytes in (50, 700, 10**6):
        folder, _ = workbench.tokenize(
            raw,
            tokens,
            shard_bytes=shard_bytes,
            format=PlainText(type="text", document=document),
            folder=str(shard_bytes),
        )
        sets[shard_bytes] = texts_of(folder)
        assert (len(list(folder.glob("*.arrow"))) > 1) == (shard_bytes < 10**6 and document != "file")
    assert sets[50] == sets[700] == sets[10**6]


def test_compressed_files_are_cut_as_the_plain_one(workbench, tokens):
    """So a large compressed file needs no more memory than a plain one."""
    sets = []
    for name, data in {"a.jsonl": CORPUS, "a.jsonl.gz": gzip.compress(CORPUS)}.items():
        raw = workbench.raw({name: data})
        folder, _ = workbench.tokenize(raw, tokens, shard_bytes=10_000, files=(name,), folder=f"out-{name}")
        opened = TokenizedSet.open(folder)
        sets.append([(shard.ids.tolist(), shard.offsets.tolist()) for shard in opened.shards])
    assert sets[0] == sets[1]
    assert len(sets[0]) > 5


def test_the_content_digest_does_not_depend_on_the_cuts_and_the_artifact_does(workbench, tokens):
    raw = workbench.raw({"a.jsonl": CORPUS})
    ledgers = []
    for shard_bytes in (3000, 40_000):
        folder, _ = workbench.tokenize(raw, tokens, shard_bytes=shard_bytes, folder=str(shard_bytes))
        ledgers.append(TokenizedSet.open(folder).ledger)
    assert ledgers[0]["content_digest"] == ledgers[1]["content_digest"]
    assert ledgers[0]["digest"] != ledgers[1]["digest"]
    other, _ = workbench.tokenize(raw, tokens, add_eos=False, folder="other")
    assert TokenizedSet.open(other).ledger["content_digest"] != ledgers[0]["content_digest"]


def test_special_ids_are_put_around_documents(workbench, tokens):
    raw = workbench.raw({"a.jsonl": b'{"text": "<|eos|>"}\n{"text": "b"}\n'})
    for bos, eos in ((False, False), (True, False), (False, True), (True, True)):
        folder, _ = workbench.tokenize(raw, tokens, add_bos=bos, add_eos=eos, folder=f"{bos}{eos}")
        before, after = [256] * bos, [257] * eos
        expected = [*before, *b"<|eos|>", *after, *before, *b"b", *after]
        assert TokenizedSet.open(folder).shards[0].ids.tolist() == expected


def test_the_ledger_says_what_was_made_of_what(workbench, tokens):
    raw = workbench.raw({"a.jsonl": b'{"text": "ab"}\n{"text": null}\n{"text": "c"}\n'})
    folder, result = workbench.tokenize(raw, tokens)
    book = TokenizedSet.open(folder).ledger
    assert book["totals"] == {"documents": 2, "tokens": 5, "text_bytes": 3, "bytes": book["shards"][0]["bytes"]}
    assert book["tokenizer"] == {
        "target": "tokenizers/bytes/dev",
        "xxh3_128": next(e["xxh3_128"] for e in tokens.record["files"] if e["path"] == "tokenizer.json"),
        "vocabulary_size": 258,
        "bos_id": 256,
        "eos_id": 257,
        "pad_id": None,
    }
    assert book["max_id"] == 257
    assert book["source"] == {"files": 1, "bytes": 44, "files_available": 1}
    assert result.metrics == {
        "tokens": 5, "documents": 2, "shards": 1, "text_bytes": 3, "bytes_per_token": 0.6, "skipped/null": 1
    }  # fmt: skip
    assert result.details["encoder"]["name"] == "bytes"
    text = b"".join(contents(folder).values()).decode(errors="replace")
    assert os.uname().nodename not in text
    assert str(workbench.folder) not in text


POLICY = Policy("0" * 32, 258, 256, None, JsonLines(type="jsonl", text_key="text"), 1000)
FILE = SourceFile("a/b.jsonl", Path("/somewhere/a/b.jsonl"), 10, "1" * 32)


def test_a_stamp_covers_what_decides_the_bytes_of_a_shard():
    known = stamp(POLICY, FILE, 3)
    assert known == "ba1da6c0a4e18f5eee3b08056262c557"  # pinned: a change makes everybody's unfinished work worthless
    for changed in (
        {"tokenizer_digest": "2" * 32},
        {"vocabulary_size": 259},
        {"bos_id": None},
        {"eos_id": 257},
        {"format": JsonLines(type="jsonl", text_key="content")},
        {"format": PlainText(type="text", document="line")},
        {"shard_bytes": 1001},
    ):
        assert stamp(replace(POLICY, **changed), FILE, 3) != known
    for changed in ({"name": "b.jsonl"}, {"bytes": 11}, {"digest": "2" * 32}):
        assert stamp(POLICY, replace(FILE, **changed), 3) != known
    assert stamp(POLICY, FILE, 4) != known
    for changed in ({"path": Path("/elsewhere")}, {"artifact": "raw/a/dev"}):
        assert stamp(POLICY, replace(FILE, **changed), 3) == known


def test_file_names_of_shards_are_readable_and_never_collide():
    assert shard_file("train.jsonl.gz", 7) == "train.jsonl.gz-00007.arrow"
    names = [
        "a/b.jsonl",
        "a_b.jsonl",
        "a b.jsonl",
        "ä.jsonl",
        "ö.jsonl",
        "." + "x" * 300,
        "x" * 300,
        "x" * 301,
        "-",
        "…",
    ]
    made = [shard_file(name, 0) for name in names]
    assert len({*made}) == len(made)
    assert all(re.fullmatch(r"[A-Za-z0-9._-]{1,130}", name) and name[0] not in "." for name in made)


@pytest.mark.row(32)
def test_files_with_unusual_names_are_tokenized(workbench, tokens):
    names = ["a/b.jsonl", "a_b.jsonl", "ü b.jsonl", "x" * 200 + ".jsonl"]
    raw = workbench.raw({name: b'{"text": "%d"}\n' % number for number, name in enumerate(names)})
    folder, _ = workbench.tokenize(raw, tokens)
    assert sorted(texts_of(folder)) == ["0", "1", "2", "3"]


# ---- resuming --------------------------------------------------------------------------------------------------------


def truncate(folder: Path, name: str) -> None:
    os.truncate(folder / name, (folder / name).stat().st_size // 2)


def flip(folder: Path, name: str) -> None:
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)


def delete(folder: Path, name: str) -> None:
    (folder / name).unlink()


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.row(7)
@pytest.mark.row(9)
def test_damaged_shards_are_made_again_and_no_others(workbench, tokens, several, suffix, processes):
    name = f"a.jsonl{suffix}"
    raw = workbench.raw({name: gzip.compress(CORPUS) if suffix else CORPUS})
    options = {"shard_bytes": 9000, "processes": processes}
    folder, result = workbench.tokenize(raw, tokens, **options)
    whole, (count, _) = contents(folder), shards_made(result)
    harm = [(truncate, 1, "arrow"), (flip, 3, "arrow"), (delete, 4, "json"), (delete, 5, "arrow"), (flip, 7, "json")]
    for spoil, number, ending in harm:
        spoil(folder, f"{name}-{number:05d}.{ending}")
    (folder / f"{name}-00009.arrow.tmp").write_bytes(b"a leftover of a killed attempt")
    kept = (folder / f"{name}-00000.arrow").stat().st_ino
    _, result = workbench.tokenize(raw, tokens, **options)
    assert contents(folder) == whole
    assert shards_made(result) == (5, count - 5)
    assert (folder / f"{name}-00000.arrow").stat().st_ino == kept


def test_two_swapped_shards_are_found(workbench, tokens):
    raw = workbench.raw({"a.jsonl": CORPUS})
    folder, _ = workbench.tokenize(raw, tokens, shard_bytes=9000)
    whole = contents(folder)
    for ending in ("arrow", "json"):
        one, other = folder / f"a.jsonl-00001.{ending}", folder / f"a.jsonl-00002.{ending}"
        one.rename(folder / "aside")
        other.rename(one)
        (folder / "aside").rename(other)
    _, result = workbench.tokenize(raw, tokens, shard_bytes=9000)
    assert contents(folder) == whole
    assert shards_made(result)[0] == 2


def test_a_finished_set_is_kept_without_reading_its_source(workbench, tokens, monkeypatch):
    raw = workbench.raw({"a.jsonl": CORPUS, "b.jsonl.gz": gzip.compress(CORPUS)})
    folder, result = workbench.tokenize(raw, tokens, shard_bytes=9000)
    whole, (count, _) = contents(folder), shards_made(result)
    monkeypatch.setattr(workshop, "read_chunks", lambda *_: pytest.fail("the source was read"))
    _, result = workbench.tokenize(raw, tokens, shard_bytes=9000)
    assert shards_made(result) == (0, count)
    assert contents(folder) == whole


def test_nothing_is_kept_of_another_policy_or_of_other_input(workbench, tokens):
    raw = workbench.raw({"a.jsonl": CORPUS})
    workbench.tokenize(raw, tokens, shard_bytes=9000)
    _, result = workbench.tokenize(raw, tokens, shard_bytes=9000, add_eos=False)
    assert shards_made(result)[1] == 0
    changed = workbench.raw({"a.jsonl": CORPUS.replace(b"0", b"1")})
    _, result = workbench.tokenize(changed, tokens, shard_bytes=9000, add_eos=False)
    assert shards_made(result)[1] == 0


def test_a_stopped_build_keeps_its_shards_and_the_next_one_goes_on(workbench, tokens):
    raw = workbench.raw({"a.jsonl": CORPUS, "b.jsonl.gz": gzip.compress(CORPUS)})
    whole = contents(workbench.tokenize(raw, tokens, shard_bytes=9000, folder="undisturbed")[0])
    made = kept = 0
    for attempt in range(40):
        calls = iter(range(10**6))
        limit = 4 + attempt
        stopping = {"stop_requested": lambda calls=calls, limit=limit: next(calls) > limit}
        try:
            folder, result = workbench.tokenize(raw, tokens, shard_bytes=9000, given=stopping)
            break
        except Stopped:
            assert not (workbench.folder / workbench.TOKENS / "ledger.json").exists()
            kept = len(list((workbench.folder / workbench.TOKENS).glob("*.json")))
            assert kept >= made
            made = kept
    assert attempt > 2
    assert kept > 0
    assert shards_made(result)[1] > 0
    assert contents(folder) == whole


def test_each_shard_is_brought_to_the_store_with_its_sidecar_when_both_are_whole(workbench, tokens):
    raw = workbench.raw({"a.jsonl": CORPUS})
    brought = []

    def bring(names, dropped=(), shared=False):
        assert all((workbench.folder / workbench.TOKENS / name).is_file() for name in names)
        brought.extend(names)

    folder, _ = workbench.tokenize(raw, tokens, shard_bytes=9000, given={"keep": bring})
    shards = sorted(path.name for path in folder.glob("*.arrow"))
    assert len(shards) > 2
    assert sorted(brought) == sorted([*shards, *(name.replace(".arrow", ".json") for name in shards)])


def test_kept_shards_of_other_bytes_are_found_when_the_file_is_read_along(workbench, tokens):
    """Input that was wrong while an attempt ran, and right again for the next: the stamp alone cannot tell."""
    good, bad = (zstandard.compress(data) for data in (CORPUS, CORPUS.replace(b"a", b"b", 50)))
    raw = workbench.raw({"a.jsonl.zst": good})
    whole = contents(workbench.tokenize(raw, tokens, shard_bytes=9000, folder="undisturbed")[0])
    (raw.folder / "a.jsonl.zst").write_bytes(bad)
    with pytest.raises(DamageError, match=r"raw/bench/dev is damaged: a.jsonl.zst is not what its record says"):
        workbench.tokenize(Dependency(raw.target, raw.folder, patched(raw, bad)), tokens, shard_bytes=9000)
    left = list((workbench.folder / workbench.TOKENS).glob("*.arrow"))
    assert left  # shards of the wrong bytes, with the stamps of the right ones
    (raw.folder / "a.jsonl.zst").write_bytes(good)
    folder, _ = workbench.tokenize(raw, tokens, shard_bytes=9000)
    assert contents(folder) == whole


def patched(raw: Dependency, data: bytes) -> dict:
    """The record, but for the size of the file, so that only the digest can tell."""
    [entry] = raw.record["files"]
    return {**raw.record, "files": [{**entry, "bytes": len(data)}]}


def test_foreign_files_are_left_alone(workbench, tokens):
    raw = workbench.raw({"a.jsonl": CORPUS})
    place = workbench.folder / workbench.TOKENS
    place.mkdir(parents=True)
    (place / "notes.txt").write_text("mine")
    (place / "other-00000.arrow").write_text("mine")
    folder, _ = workbench.tokenize(raw, tokens)
    assert (folder / "notes.txt").exists()
    assert (folder / "other-00000.arrow").exists()


# ---- input that is not what it was -----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.row(24)
def test_a_flipped_byte_of_the_source_is_found_before_the_set_is_complete(workbench, tokens, suffix):
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix]
    other = compress(CORPUS.replace(b"0", b"1", 1))
    raw = workbench.raw({f"a.jsonl{suffix}": other})
    raw = replace(raw, record=patched(workbench.raw({f"a.jsonl{suffix}": compress(CORPUS)}), other))
    (raw.folder / f"a.jsonl{suffix}").write_bytes(other)
    with pytest.raises(DamageError, match=r"is not what its record says: expected \w{32}, seen \w{32}\n") as error:
        workbench.tokenize(raw, tokens, shard_bytes=9000)
    assert "marin-build verify --full raw/bench/dev" in str(error.value)
    assert not (workbench.folder / workbench.TOKENS / "ledger.json").exists()


@pytest.mark.row(24)
def test_a_range_that_changes_after_the_survey_is_not_committed(workbench, tokens, monkeypatch):
    raw = workbench.raw({"a.jsonl": CORPUS})
    usual = workshop.Workshop._range

    def change_first(self, job):
        if job.number == 2:
            data = bytearray((raw.folder / "a.jsonl").read_bytes())
            data[job.start + 12] ^= 1
            (raw.folder / "a.jsonl").write_bytes(data)
        return usual(self, job)

    monkeypatch.setattr(workshop.Workshop, "_range", change_first)
    with pytest.raises(DamageError, match=r"a.jsonl is not what its record says: .* seen other bytes from 18,"):
        workbench.tokenize(raw, tokens, shard_bytes=9000)
    folder = workbench.folder / workbench.TOKENS
    assert (folder / "a.jsonl-00001.arrow").exists()
    assert not (folder / "a.jsonl-00002.arrow").exists()
    assert not (folder / "ledger.json").exists()


@pytest.mark.row(24)
def test_a_source_that_grows_or_vanishes_is_an_error(workbench, tokens, monkeypatch):
    raw = workbench.raw({"a.jsonl": CORPUS})
    usual = workshop.Workshop.perform

    def append(self, job):
        with open(raw.folder / "a.jsonl", "ab") as file:
            file.write(b'{"text": "more"}\n')
        return usual(self, job)

    monkeypatch.setattr(workshop.Workshop, "perform", append)
    with pytest.raises(DamageError, match="is not what its record says"):
        workbench.tokenize(raw, tokens)

    def vanish(self, job):
        (raw.folder / "a.jsonl").unlink()
        return usual(self, job)

    monkeypatch.setattr(workshop.Workshop, "perform", vanish)
    raw = workbench.raw({"a.jsonl": CORPUS})
    with pytest.raises(RequestError, match=r"a.jsonl cannot be read at byte 0: No such file"):
        workbench.tokenize(raw, tokens)


def test_a_tokenizer_that_is_not_the_recorded_one_is_damage(workbench, tokens):
    raw = workbench.raw({"a.jsonl": CORPUS})
    path = tokens.folder / "tokenizer.json"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(
        DamageError, match=r"tokenizers/bytes/dev is damaged: tokenizer.json is not what its record says"
    ):
        workbench.tokenize(raw, tokens)


def test_an_id_outside_the_vocabulary_is_an_error(workbench, tokens, monkeypatch):
    def too_large(self, texts):
        return np.array([1, 258], np.uint32), np.array([0, 2])

    monkeypatch.setattr(LoadedTokenizer, "encode", too_large)
    with pytest.raises(RequestError, match="the tokenizer gave id 258, but its vocabulary has 258 ids, 0 to 257"):
        workbench.tokenize(workbench.raw({"a.jsonl": CORPUS}), tokens)


# ---- requests that cannot be served ----------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["bos", "eos"])
def test_a_special_token_that_the_tokenizer_lacks_is_refused(workbench, role):
    tokens = workbench.bytes_tokenizer(specials=schema.SpecialTokens(bos=None, eos=None, pad=None))
    options = {"add_bos": False, "add_eos": False, f"add_{role}": True}
    with pytest.raises(RequestError, match=f"add_{role} is true, but tokenizers/bytes/dev has no {role} token"):
        workbench.tokenize(workbench.raw({"a.jsonl": CORPUS}), tokens, **options)


def test_shards_that_would_not_fit_into_memory_are_refused(workbench, tokens):
    with pytest.raises(RequestError, match="shard_bytes 128,000,001 is too large; at most 128,000,000"):
        workbench.tokenize(workbench.raw({"a.jsonl": CORPUS}), tokens, shard_bytes=128_000_001)


@pytest.mark.row(32)
def test_more_shards_than_can_be_mapped_are_refused_before_any_work(workbench, tokens, monkeypatch):
    monkeypatch.setattr(tokenize, "MAX_SHARDS", 10)
    raw = workbench.raw({"a.jsonl": CORPUS, "b.jsonl": CORPUS})
    with pytest.raises(
        RequestError, match=r"12 shards are too many; at most 10: .*\n  join small files, or raise shard"
    ):
        workbench.tokenize(raw, tokens, shard_bytes=-(-len(CORPUS) // 6))
    assert list((workbench.folder / workbench.TOKENS).iterdir()) == []
    compressed = workbench.raw({"c.jsonl.gz": gzip.compress(CORPUS)})
    with pytest.raises(RequestError, match="shards are too many"):  # known at the end only
        workbench.tokenize(compressed, tokens, files=("c*",), shard_bytes=5000)


# ---- a token budget --------------------------------------------------------------------------------------------------


def many_files(workbench, count: int = 30) -> tuple[Dependency, dict[str, bytes]]:
    files = {f"part-{n:02d}.jsonl": b'{"text": "%04d%s"}\n' % (n, b"x" * 95) for n in range(count)}
    return workbench.raw(files), files


def budget(tokens: int, seed: int = 0) -> schema.TokenBudget:
    return schema.TokenBudget(tokens=tokens, seed=seed)


def taken(folder: Path) -> list[str]:
    return [shard["source"]["file"] for shard in TokenizedSet.open(folder).ledger["shards"]]


def test_a_budget_takes_whole_files_in_a_seeded_order_until_it_is_met(workbench, tokens):
    raw, _ = many_files(workbench)
    folder, result = workbench.tokenize(raw, tokens, token_budget=budget(950))
    assert result.metrics["tokens"] == 1000
    assert len(taken(folder)) == 10
    book = TokenizedSet.open(folder).ledger
    assert book["token_budget"] == {"tokens": 950, "seed": 0, "met": True}
    assert book["source"]["files_available"] == 30
    more, _ = workbench.tokenize(raw, tokens, token_budget=budget(1001), folder="more")
    assert taken(more)[:10] == taken(folder)
    assert len(taken(more)) == 11
    other, _ = workbench.tokenize(raw, tokens, token_budget=budget(950, seed=1), folder="other")
    assert taken(other) != taken(folder)
    assert taken(folder) != sorted(taken(folder))


def test_a_new_file_moves_no_other_in_the_order_of_a_budget(workbench, tokens):
    raw, _ = many_files(workbench)
    before, _ = workbench.tokenize(raw, tokens, token_budget=budget(3000))
    raw = workbench.raw({"new.jsonl": b'{"text": "new"}\n'})
    after, _ = workbench.tokenize(raw, tokens, token_budget=budget(3003), folder="after")
    assert [name for name in taken(after) if name != "new.jsonl"] == taken(before)


@pytest.mark.parametrize("processes", [3])
def test_a_budget_is_the_same_whatever_the_processes_and_leaves_nothing_beyond(workbench, tokens, several, processes):
    raw, _ = many_files(workbench)
    alone, _ = workbench.tokenize(raw, tokens, token_budget=budget(950))
    folder, _ = workbench.tokenize(raw, tokens, token_budget=budget(950), processes=processes, folder="other")
    assert contents(folder) == contents(alone)


def test_shards_beyond_a_budget_are_swept(workbench, tokens):
    raw, _ = many_files(workbench)
    expected = contents(workbench.tokenize(raw, tokens, token_budget=budget(950), folder="fresh")[0])
    workbench.tokenize(raw, tokens, token_budget=budget(3000))
    folder, result = workbench.tokenize(raw, tokens, token_budget=budget(950))
    assert contents(folder) == expected
    assert shards_made(result) == (0, 10)


@pytest.mark.parametrize("processes", [1, 3])
def test_what_a_budget_does_not_need_cannot_fail(workbench, tokens, several, monkeypatch, processes):
    raw, files = many_files(workbench)
    folder, _ = workbench.tokenize(raw, tokens, token_budget=budget(950), folder="before")
    needed = taken(folder)
    raw = workbench.raw({name: b"{broken\n" for name in files if name not in needed})
    folder, _ = workbench.tokenize(raw, tokens, token_budget=budget(950), processes=processes)
    assert taken(folder) == needed
    read = []
    usual = workshop.Workshop.perform
    monkeypatch.setattr(workshop.Workshop, "perform", lambda self, job: read.append(job.file.name) or usual(self, job))
    workbench.tokenize(raw, tokens, token_budget=budget(950), folder="one by one")
    assert read == needed


def test_a_budget_that_is_not_met_is_said(workbench, tokens, caplog):
    raw, _ = many_files(workbench, 3)
    folder, result = workbench.tokenize(raw, tokens, token_budget=budget(10**6))
    assert result.metrics["tokens"] == 300
    assert "all 3 source files hold 300 tokens, less than the token_budget of 1,000,000" in caplog.text
    assert TokenizedSet.open(folder).ledger["token_budget"]["met"] is False


# ---- errors, signals and workers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 3])
def test_of_several_errors_the_first_in_order_is_reported(workbench, tokens, several, processes):
    files = {f"{n}.jsonl": CORPUS for n in range(8)}
    files["2.jsonl"] = CORPUS + b"{broken\n"
    files["3.jsonl"] = b"{broken\n"
    files["4.jsonl"] = b""
    with pytest.raises(RequestError, match=rf"1 unusable documents.* 2.jsonl, byte {len(CORPUS):,}: malformed_json"):
        workbench.tokenize(workbench.raw(files), tokens, processes=processes)


@pytest.mark.parametrize("processes", [1, 3])
def test_bad_documents_are_counted_over_all_files(workbench, tokens, several, processes):
    raw = workbench.raw({f"{n}.jsonl": CORPUS + b"{broken\n" for n in range(5)})
    with pytest.raises(RequestError, match=r"4 unusable documents, max_bad_documents allows 3; the first: 0.jsonl"):
        workbench.tokenize(raw, tokens, processes=processes, max_bad_documents=3, shard_bytes=9000)
    folder, _ = workbench.tokenize(raw, tokens, processes=processes, max_bad_documents=5, shard_bytes=9000)
    assert [bad["file"] for bad in TokenizedSet.open(folder).ledger["rejections"]] == [f"{n}.jsonl" for n in range(5)]


def test_a_lost_lease_commits_no_shard(workbench, tokens):
    def lost() -> None:
        raise LeasedError("another builder has taken over")

    with pytest.raises(LeasedError):
        workbench.tokenize(workbench.raw({"a.jsonl": CORPUS}), tokens, given={"check_lease": lost})
    assert {path.suffix for path in (workbench.folder / workbench.TOKENS).iterdir()} == {".tmp"}


def test_a_full_disk_is_one_line_with_the_bytes_needed(workbench, tokens, monkeypatch):
    raw = workbench.raw({"a.jsonl": CORPUS})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(MarinError, match=r"the disk is full: .*a.jsonl-00000.arrow: [\d,]+ bytes needed"):
            workbench.tokenize(raw, tokens)
    folder, _ = workbench.tokenize(raw, tokens)
    assert texts_of(folder) == TEXTS


@pytest.mark.row(19)
def test_a_killed_worker_is_named_and_the_next_attempt_goes_on(workbench, tokens, several, monkeypatch):
    raw = workbench.raw({"a.jsonl": CORPUS})
    usual = crew.ProcessCrew.receive
    received = []

    def kill_one(self, timeout_seconds):
        news = usual(self, timeout_seconds)
        received.extend(message for _, message in news if isinstance(message, workshop.Made))
        if len(received) == 5:
            received.append(None)
            os.kill(next(w.process.pid for w in self._workers if w.key is not None), signal.SIGKILL)
        return news

    with monkeypatch.context() as patch:
        patch.setattr(crew.ProcessCrew, "receive", kill_one)
        with pytest.raises(MarinError, match=r"a worker process was ended by signal 9 \(SIGKILL\)") as error:
            workbench.tokenize(raw, tokens, processes=2, shard_bytes=2000)
    assert "--config processes=N" in str(error.value)
    assert error.value.exit_code == 1
    folder, result = workbench.tokenize(raw, tokens, processes=2, shard_bytes=2000)
    assert texts_of(folder) == TEXTS
    assert shards_made(result)[1] > 0


def test_no_process_is_left_when_a_build_ends(workbench, tokens, several):
    before = children()
    workbench.tokenize(workbench.raw({"a.jsonl": CORPUS}), tokens, processes=3, shard_bytes=9000)
    stopping = {"stop_requested": lambda: True}
    with pytest.raises(Stopped, match="0 shards are kept, the same command goes on"):
        workbench.tokenize(workbench.raw({"a.jsonl": CORPUS}), tokens, processes=3, folder="x", given=stopping)
    assert children() <= before | resource_trackers()


def children() -> set[int]:
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def resource_trackers() -> set[int]:
    """multiprocessing keeps one for the life of this process."""
    return {pid for pid in children() if b"resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()}


def test_small_texts_and_single_processes_are_worked_on_in_line(workbench, tokens, monkeypatch):
    monkeypatch.setattr(crew, "ProcessCrew", lambda *_: pytest.fail("processes were started"))
    raw = workbench.raw({"a.jsonl": CORPUS})
    workbench.tokenize(raw, tokens, processes=8, shard_bytes=9000)
    monkeypatch.setattr(tokenize, "BYTES_WORTH_A_PROCESS", 1)
    workbench.tokenize(raw, tokens, processes=1, shard_bytes=9000)
    workbench.tokenize(raw, tokens, processes=8)  # one range


def test_processes_default_to_the_cores_that_may_be_used(workbench, tokens, several, monkeypatch):
    sizes = []
    monkeypatch.setattr(
        tokenize, "make_crew", lambda assignment, size: sizes.append(size) or crew.InlineCrew(assignment)
    )
    for cores, expected in ({0}, 1), ({0, 3, 5}, 3):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        workbench.tokenize(workbench.raw({"a.jsonl": CORPUS}), tokens, processes=None, shard_bytes=9000)
        assert sizes[-1] == expected


# ---- progress --------------------------------------------------------------------------------------------------------


def test_progress_says_percent_speed_and_tokens():
    shown = progress.Progress(logging.getLogger("x"), "tokenizing", 20_000_000)
    shown._start -= 2
    shown.add(4_000_000, 1_000_000)
    shown.add(5_000_000, 1_234_567, kept=True)
    assert shown.line() == "tokenizing: 45%, 9.0 of 20.0 MB, 2.0 MB/s, 2,234,567 tokens"
    shown = progress.Progress(logging.getLogger("x"), "tokenizing", 10**12, 4_000_000)
    shown.add(4_000_000, 1_000_000)
    assert re.fullmatch(r"tokenizing: 25%, 4.0 MB, [\d,.]+ MB/s, 1,000,000 tokens of 4,000,000", shown.line())


def test_progress_comes_while_a_library_is_busy(monkeypatch, caplog):
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 0.05)
    with caplog.at_level(logging.INFO), progress.Progress(logging.getLogger("x"), "tokenizing", 10):
        time.sleep(0.4)
    assert len(caplog.records) >= 4
    time.sleep(0.2)
    assert len(caplog.records) <= 9


def test_a_build_says_how_far_it_is(workbench, tokens, monkeypatch, caplog):
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 0.001)
    with caplog.at_level(logging.INFO):
        workbench.tokenize(workbench.raw({"a.jsonl": CORPUS}), tokens, shard_bytes=3000)
    assert re.search(r"tokenizing: \d+%, [\d.]+ of 0.1 MB, [\d.,]+ MB/s, [\d,]+ tokens", caplog.text)
    assert re.search(r"[\d,]+ tokens in [\d,]+ documents, [\d.]+ bytes a token; shards: \d+ made, 0 kept", caplog.text)
