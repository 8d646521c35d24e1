"""Part jobs and donors: whoever made a shard, the set is the same to the byte, and nothing is made twice."""

from __future__ import annotations

import gzip
import json
import logging
import random
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from marin_build.artifact.digest import hash_bytes, hash_file
from marin_build.artifact.record import read_record
from marin_build.artifact.store import open_store
from marin_build.cli import main
from marin_build.data.durable import json_bytes
from marin_build.data.ledger import ContentDigest
from marin_build.recipe.target import parse_target

RAW, TOKENIZER = "raw/notes/2026.01.01", "tokenizers/bytes/2026.01.01"
ARTIFACT = f"{{type: artifact, target: {RAW}, files: ['*']}}"
RECIPES = {
    RAW: "source: {type: files, paths: [texts/*], digest: unresolved}\n",
    TOKENIZER: "tokenizer:\n  method: bytes\n  special_tokens: {bos: <|bos|>, eos: <|eos|>, pad: null}\n",
}
TOKENS = """
tokenizer: {tokenizer}
source: {source}
format: {{type: jsonl, text_key: text}}
add_bos: true
add_eos: true
shard_bytes: {shard_bytes}
token_budget: {budget}
max_bad_documents: {max_bad}
"""
PARTS = 3


def write_recipe(name, source=ARTIFACT, budget="null", shard_bytes=3000, max_bad=0, version="2026.01.01"):
    path = Path(f"config/tokenized/{name}/{version}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        TOKENS.format(tokenizer=TOKENIZER, source=source, budget=budget, shard_bytes=shard_bytes, max_bad=max_bad)
    )
    return f"tokenized/{name}/{version}"


def lines(seed, count=150):
    pick = random.Random(seed)
    texts = ("whales sing " * pick.randrange(1, 12) + f"{seed} {number}" for number in range(count))
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Large plain files, one of them with a document longer than two shards, a compressed and a small one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MARIN_PREFIX", raising=False)
    Path("texts").mkdir()
    Path("texts/a.jsonl").write_text(lines(1) + json.dumps({"text": "la " * 2500}) + "\n" + lines(2, 40))
    Path("texts/b.jsonl").write_text(lines(3).removesuffix("\n"))
    Path("texts/c.jsonl.gz").write_bytes(gzip.compress(lines(4).encode()))
    Path("texts/d.jsonl").write_text(lines(5, 1))
    for target, text in RECIPES.items():
        path = Path(f"config/{target}.yaml")
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert main(["pin", RAW]) == 0
    for target in (RAW, TOKENIZER):
        assert main(["build", target]) == 0
    return tmp_path


def part(target, number, parts=PARTS):
    _, name, version = target.split("/")
    return f"parts/{name}/{number:05d}-of-{parts:05d}/{version}"


def build(target, *more):
    return main(["build", target, *more])


def record_of(target, prefix="artifacts"):
    return read_record(open_store(prefix), parse_target(target))


def shards_of(target, prefix="artifacts"):
    details = record_of(target, prefix).provenance
    return tuple(details[f"shards_{how}"] for how in ("made", "kept", "taken_over"))


@pytest.fixture
def alone(place):
    """The digest of the set that one job makes by itself."""
    target = write_recipe("notes")
    elsewhere = place / "elsewhere"
    shutil.copytree("artifacts", elsewhere)
    assert build(target, "--prefix", str(elsewhere)) == 0
    return record_of(target, elsewhere).digest


@pytest.mark.parametrize("parts", [1, 2, 3, 50])
def test_joined_from_any_number_of_parts_a_set_is_that_of_one_job(place, alone, parts):
    target = write_recipe("notes")
    for number in range(parts):
        assert build(part(target, number, parts)) == 0
    assert build(target) == 0
    assert record_of(target).digest == alone
    made, kept, taken_over = shards_of(target)
    assert (made, kept) == (0, 0)
    assert taken_over > 15
    assert main(["verify", "--full", target, part(target, 0, parts)]) == 0


def test_on_a_disk_a_shard_of_a_part_is_linked_and_not_copied(place):
    target = write_recipe("notes")
    assert build(part(target, 0, 1)) == 0
    assert build(target) == 0
    shard = "b.jsonl-00001.arrow"
    assert Path("artifacts", target, shard).samefile(Path("artifacts", part(target, 0, 1), shard))
    shutil.rmtree("artifacts/parts")
    assert main(["verify", "--full", target]) == 0


@pytest.mark.parametrize("missing", range(PARTS))
def test_what_a_missing_part_would_have_made_is_made_by_the_joining_job(place, alone, missing):
    target = write_recipe("notes")
    for number in set(range(PARTS)) - {missing}:
        assert build(part(target, number)) == 0
    assert build(target) == 0
    assert record_of(target).digest == alone
    made, kept, taken_over = shards_of(target)
    assert made > 0
    assert kept + taken_over > made


def test_a_damaged_shard_of_a_part_is_made_again(place, alone):
    target = write_recipe("notes")
    for number in range(PARTS):
        assert build(part(target, number)) == 0
    shard = next(Path("artifacts", part(target, 1)).glob("b.jsonl-*.arrow"))
    damaged = bytearray(shard.read_bytes())
    damaged[-100] ^= 1
    shard.write_bytes(damaged)
    assert build(target) == 0
    assert record_of(target).digest == alone
    assert main(["verify", "--full", target]) == 0
    assert main(["verify", "--full", part(target, 1)]) == 4


def test_the_users_own_files_are_proven_by_the_joining_job_alone(place):
    target = write_recipe("own", source="{type: files, paths: [texts/*], digest: unresolved}")
    assert main(["pin", target]) == 0
    for number in range(PARTS):
        assert build(part(target, number)) == 0
    assert build(target) == 0
    made, _, taken_over = shards_of(target)
    assert made == 0
    assert taken_over > 15


def test_parts_of_a_file_that_changed_meanwhile_are_not_believed(place, caplog):
    target = write_recipe("own", source="{type: files, paths: [texts/b.jsonl], digest: unresolved}")
    assert main(["pin", target]) == 0
    assert build(part(target, 0, 2)) == 0
    before = Path("texts/b.jsonl").read_text()
    Path("texts/b.jsonl").write_text(before.replace("whales", "snails"))
    assert build(part(target, 1, 2)) == 0
    assert build(target) == 2, "not the pinned file"
    Path("texts/b.jsonl").write_text(before)
    assert build(target) == 0
    assert shards_of(target)[0] > 0, "those of the part that saw other bytes"
    assert b"snails" not in b"".join(path.read_bytes() for path in Path("artifacts", target).glob("*.arrow"))


@pytest.mark.parametrize("surveying_part_is_there", [True, False])
def test_parts_that_read_a_raw_file_while_it_was_damaged_are_not_believed(place, alone, surveying_part_is_there):
    target = write_recipe("notes")
    raw = Path("artifacts", RAW, "b.jsonl")
    good = raw.read_bytes()
    raw.write_bytes(good.replace(b"whales", b"snails"))
    assert build(part(target, 0, 2)) == 0, "it has only some ranges of the file, and cannot know"
    raw.write_bytes(good)
    if surveying_part_is_there:
        assert build(part(target, 1, 2)) == 0
    assert build(target) == 0
    assert record_of(target).digest == alone
    assert 0 < shards_of(target)[2] < 18


def test_what_was_taken_over_without_proof_is_not_believed_once_its_part_is_gone(place, alone, monkeypatch):
    from marin_build.data import foreman

    target = write_recipe("notes")
    raw = Path("artifacts", RAW, "b.jsonl")
    good = raw.read_bytes()
    raw.write_bytes(good.replace(b"whales", b"snails"))
    assert build(part(target, 0, 2)) == 0
    raw.write_bytes(good)
    assert build(part(target, 1, 2)) == 0

    def interrupted(path):
        raise KeyboardInterrupt

    usual = foreman.commit
    monkeypatch.setattr(foreman, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(target)
    monkeypatch.setattr(foreman, "commit", usual)
    shutil.rmtree("artifacts/parts")
    assert build(target) == 0
    assert record_of(target).digest == alone


def test_with_a_budget_the_set_is_that_of_one_job_and_parts_make_little_that_is_not_needed(place):
    for number in range(30):
        Path(f"texts/e{number:02d}.jsonl").write_text(lines(100 + number, 20))
    source = "{type: files, paths: [texts/e*], digest: unresolved}"
    target = write_recipe("budget", source, budget="{tokens: 8000, seed: 3}")
    assert main(["pin", target]) == 0
    alone = Path("elsewhere")
    shutil.copytree("artifacts", alone)
    assert build(target, "--prefix", str(alone)) == 0
    tokens = 0
    for number in range(PARTS):
        assert build(part(target, number)) == 0
        tokens += record_of(part(target, number)).metrics["tokens"]
    assert build(target) == 0
    assert record_of(target).digest == record_of(target, alone).digest
    assert shards_of(target)[0] == 0
    assert 8000 <= tokens < 8000 + (PARTS + 2) * 2000


def unzipped(name):
    return gzip.decompress(Path("texts", name).read_bytes())


@pytest.mark.parametrize("harm", [b"{broken\n" * 9, b"cut off"])
def test_a_file_that_the_budget_does_not_need_may_be_unusable(place, harm):
    for number in range(12):
        Path(f"texts/e{number:02d}.jsonl.gz").write_bytes(gzip.compress(lines(100 + number, 20).encode()))
    source = "{type: files, paths: [texts/e*], digest: unresolved}"
    order = [f"e{number:02d}.jsonl.gz" for number in range(12)]
    order.sort(key=lambda name: hash_bytes(json_bytes([3, name])))
    texts = [json.loads(line)["text"] for name in order[:6] for line in unzipped(name).splitlines()]
    target = write_recipe("budget", source, budget=f"{{tokens: {sum(len(text) + 2 for text in texts)}, seed: 3}}")
    for name in order[6:]:
        path = Path("texts", name)
        path.write_bytes(gzip.compress(harm) if harm[:1] == b"{" else path.read_bytes()[:-20])
    assert main(["pin", target]) == 0
    for number in range(PARTS):
        assert build(part(target, number)) == 0
        assert main(["verify", "--full", part(target, number)]) == 0
    assert build(target) == 0
    first = {
        shard["source"]["file"] for shard in json.loads(Path("artifacts", target, "ledger.json").read_text())["shards"]
    }
    assert first <= set(order[:6])


def test_a_later_version_with_a_larger_budget_takes_over_what_is_there(place):
    for number in range(12):
        Path(f"texts/e{number:02d}.jsonl").write_text(lines(100 + number, 20))
    source = "{type: files, paths: [texts/e*], digest: unresolved}"
    small = write_recipe("small", source, budget="{tokens: 4000, seed: 3}")
    large = write_recipe("large", source, budget="{tokens: 9000, seed: 3}", version="2026.01.02")
    other = write_recipe("other", source, budget="{tokens: 4000, seed: 3}", shard_bytes=5000)
    for target in (small, large, other):
        assert main(["pin", target]) == 0
        assert build(target) == 0
    made, _, taken_over = shards_of(large)
    assert taken_over == len(list(Path("artifacts", small).glob("*.arrow")))
    assert made > 0
    assert shards_of(other)[2] == 0, "another policy makes other shards"
    stamps = [shard["stamp"] for shard in json.loads(Path("artifacts", large, "ledger.json").read_text())["shards"]]
    assert len(set(stamps)) == len(stamps)


def test_forced_a_set_is_made_from_nothing_or_from_parts_that_were_forced_with_it(place, alone):
    target = write_recipe("notes")
    for number in range(PARTS):
        assert build(part(target, number)) == 0
    assert build(target) == 0
    assert build(target, "--force") == 0
    assert shards_of(target)[2] == 0
    assert record_of(target).digest == alone


def test_the_limit_of_bad_documents_is_that_of_the_whole_set(place, caplog):
    Path("texts/b.jsonl").write_text(lines(1) + "{broken\n" + lines(2) + "[broken\n" + lines(3))
    source = "{type: files, paths: [texts/b.jsonl], digest: unresolved}"
    strict, lenient = write_recipe("strict", source, max_bad=1), write_recipe("lenient", source, max_bad=2)
    for target in (strict, lenient):
        assert main(["pin", target]) == 0
    for number in range(20):
        assert build(part(strict, number, 20)) == 0, "each part has at most one"
        assert build(part(lenient, number, 20)) == 0
    with caplog.at_level(logging.ERROR):
        assert build(strict) == 2
    assert build(lenient) == 0
    ledger = json.loads(Path("artifacts", lenient, "ledger.json").read_text())
    assert ledger["skipped"]["malformed_json"] == 2
    assert [rejection["byte"] for rejection in ledger["rejections"]] == sorted(
        len(lines(1)) + shift for shift in (0, len("{broken\n") + len(lines(2)))
    )


def test_the_digest_of_ids_joins_however_they_are_cut():
    import numpy as np

    random_ids = np.random.default_rng(0)
    lengths = random_ids.integers(0, 9, 500)
    ids = random_ids.integers(0, 70000, lengths.sum(), dtype=np.int32)
    whole = ContentDigest()
    whole.add(ids, lengths)
    for cuts in ([0, 500], [0, 1, 500], [0, 100, 100, 499, 500]):
        joined = ContentDigest()
        for start, end in pairwise(cuts):
            piece = ContentDigest()
            piece.add(ids[lengths[:start].sum() : lengths[:end].sum()], lengths[start:end])
            joined.join(piece.to_dict())
        assert joined.hexdigest() == whole.hexdigest()
    other = ContentDigest()
    other.add(ids, np.concatenate([lengths[1:2], lengths[:1], lengths[2:]]))
    assert other.hexdigest() != whole.hexdigest()


def test_a_part_that_was_stopped_resumes(place, alone, monkeypatch):
    from marin_build.data import foreman

    target = write_recipe("notes")
    usual, count = foreman.commit, 0

    def failing(path):
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        usual(path)

    monkeypatch.setattr(foreman, "commit", failing)
    with pytest.raises(KeyboardInterrupt):
        build(part(target, 0, 1))
    monkeypatch.setattr(foreman, "commit", usual)
    assert build(part(target, 0, 1)) == 0
    assert build(target) == 0
    assert record_of(target).digest == alone
    assert {hash_file(path) for path in Path("artifacts", part(target, 0, 1)).glob("*.arrow")} == {
        hash_file(path) for path in Path("artifacts", target).glob("*.arrow")
    }
