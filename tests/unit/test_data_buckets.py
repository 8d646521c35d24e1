"""Any text, cut into buckets by workers who know nothing of each other, gives the shards that one worker makes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from builders import Workbench
from hypothesis import example, given, settings
from hypothesis import strategies as st

from marin_build.data.ledger import Policy
from marin_build.data.part import Assignment
from marin_build.data.sources import SourceFile, hash_source
from marin_build.data.vocabulary import load_tokenizer
from marin_build.data.workshop import Cut, FileBucket, Made, WholeFile, Workshop, buckets
from marin_build.recipe.sources import JsonLines, PlainText

FORMATS = {
    "jsonl": JsonLines(type="jsonl", text_key="t"),
    "line": PlainText(type="text", document="line"),
}
ENDS = (b"\n", b"\r\n", b"\n\n\n", b"\r\n \n", b"\n" * 17, b"\xc3", b"")
CONTENTS = (
    b'{"t":"x"}',
    '{"t":"Ünïcödé 😀"}'.encode(),
    b'{"t":null}',
    b"{broken",
    b"\xef\xbb\xbf",
    b'{"t":"' + b"y" * 90 + b'"}',
)
pieces = st.tuples(st.sampled_from(CONTENTS), st.sampled_from(ENDS)).map(b"".join)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(Workbench(tmp_path_factory.mktemp("bench")).bytes_tokenizer().folder)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@given(text=st.lists(pieces, min_size=1, max_size=25).map(b"".join), shard_bytes=st.integers(1, 70))
@example(text=b'{"t":"x"}\n' * 4, shard_bytes=10)
@example(text=b'{"t":"x"}\n' * 4, shard_bytes=9)
@example(text=b"\n" * 40 + b'{"t":"x"}', shard_bytes=10)
@settings(max_examples=20, deadline=None)
def test_buckets_of_a_file_are_its_shards(tokenizer, format, text, shard_bytes):
    place = Path(tempfile.mkdtemp())
    try:
        (place / "f").write_bytes(text)
        policy = Policy(tokenizer.digest, tokenizer.vocab_size, tokenizer.bos_id, None, format, shard_bytes)
        workshop = Workshop(Assignment("tokenized/f/dev", place, tokenizer, policy, 1000))
        file = SourceFile("f", place / "f", *hash_source(place / "f", lambda _: None))
        if buckets(file, policy) > 1:
            apart = [FileBucket(file, number) for number in range(buckets(file, policy))]
            assert made(workshop, apart) == made(workshop, [WholeFile(file)])
    finally:
        shutil.rmtree(place)


def made(workshop, jobs):
    """Sidecars of the shards that come of jobs, in their order."""
    sidecars = []
    for job in jobs:
        for message in workshop.perform(job):
            if isinstance(message, Cut):
                sidecars += made(workshop, message.ranges)
            elif isinstance(message, Made):
                sidecars.append(message.sidecar)
    return sidecars
