"""Encoders: the fast one against the reference, the gate between them, and long documents in pieces."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from marin_build.data import parity as gate
from marin_build.data.encoder import FastEncoder, LibraryEncoder, offsets_of, read_library
from marin_build.data.parity import cases, parity
from marin_build.data.pieces import GPT2, cut, groups, may_be_cut
from marin_build.errors import RequestError

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"llama3": LLAMA3, "o200k": O200K, "gpt2": GPT2}
WORDS = [
    "the",
    "that",
    "with",
    "of",
    "they'll",
    "Wonder",
    "12345",
    "naïve",
    "don't",
    "\n\n",
    "x_y",
    "→",
    "汉字",
    "HTTPServer",
]


def prose(seed: int, words: int) -> str:
    dice = random.Random(seed)
    return " ".join(dice.choices(WORDS, k=words) + ["".join(dice.choices("aeinorst", k=6)) for _ in range(words // 4)])


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


def trained(splitter: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = splitter, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator([prose(0, 4000)], trainer)
    tokenizer.add_special_tokens(["<|bos|>", "<|eos|>"])
    return tokenizer


@pytest.fixture(scope="module", params=PATTERNS)
def tokenizer_json(request: pytest.FixtureRequest) -> bytes:
    return trained(split_by(PATTERNS[request.param])).to_str().encode()


@pytest.fixture(scope="module")
def llama_like() -> bytes:
    return trained(split_by(LLAMA3)).to_str().encode()


def specification(tokenizer_json: bytes) -> dict:
    return json.loads(tokenizer_json)


def ids_of(encoder, texts: list[str]) -> list[list[int]]:
    ids, offsets = encoder.encode(texts)
    assert (ids.dtype, offsets.dtype, len(offsets)) == (np.uint32, np.int64, len(texts) + 1)
    return [ids[start:end].tolist() for start, end in pairwise(offsets)]


# ---- the fast encoder ------------------------------------------------------------------------------------------------


@given(st.lists(st.text(max_size=60), max_size=5))
@settings(max_examples=150, deadline=None)
@example([])
@example(["", "<|eos|>", ""])
def test_the_fast_encoder_gives_the_ids_of_the_reference(llama_like, texts):
    reference, fast = LibraryEncoder(read_library(llama_like)), FastEncoder(llama_like)
    assert ids_of(fast, texts) == ids_of(reference, texts)


def test_the_text_of_a_special_token_stays_text_in_the_fast_encoder(llama_like):
    [ids] = ids_of(FastEncoder(llama_like), ["a<|eos|><|bos|>b"])
    special = {token["id"] for token in specification(llama_like)["added_tokens"]}
    assert special
    assert not special & set(ids)


@pytest.mark.parametrize("kind", [FastEncoder, lambda data: LibraryEncoder(read_library(data))])
def test_a_tokenizer_whose_post_processor_adds_bos_adds_none(kind):
    tokenizer = trained(split_by(LLAMA3))
    bos = tokenizer.token_to_id("<|bos|>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", bos)])
    assert tokenizer.encode("the").ids[0] == bos
    [ids] = ids_of(kind(tokenizer.to_str().encode()), ["the"])
    assert bos not in ids


@pytest.mark.parametrize("kind", [FastEncoder, lambda data: LibraryEncoder(read_library(data))])
def test_no_document_is_cut_off_or_padded_as_a_published_file_may_ask(kind):
    tokenizer = trained(split_by(LLAMA3))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=5)
    lengths = [len(ids) for ids in ids_of(kind(tokenizer.to_str().encode()), ["the that", "the that with of " * 9])]
    assert lengths[0] < 5 < lengths[1]


COUNT_THREADS = """
import os, sys
from pathlib import Path
from marin_build.data.encoder import FastEncoder
encoder = FastEncoder(Path(sys.argv[1]).read_bytes())
before = len(os.listdir("/proc/self/task"))
encoder.encode(["the words of a text " * 50_000] * 4)
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_the_fast_encoder_starts_no_threads(llama_like, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(llama_like)
    command = [sys.executable, "-c", COUNT_THREADS, str(tmp_path / "tokenizer.json")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "0"


def test_what_the_fast_encoder_cannot_encode_is_encoded_by_the_reference():
    """A million spaces are too many for its regular expressions where the pattern is none that it knows."""
    tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True))
    data = tokenizer.to_str().encode()
    texts = ["the", f"that{' ' * 1_500_000}of", "with"]
    with pytest.raises(RequestError, match="cannot encode this text"):
        FastEncoder(data).encode(texts)
    reference = LibraryEncoder(read_library(data))
    assert ids_of(FastEncoder(data, falls_back=True), texts) == ids_of(reference, texts)


# ---- the gate --------------------------------------------------------------------------------------------------------


def test_equal_encoders_are_found_equal(llama_like):
    result = parity(llama_like, [prose(1, 300)])
    assert (result.equal, result.refused, result.difference) == (True, None, None)
    assert result.fastokens == FastEncoder.version
    assert result.texts > 5000


def test_the_texts_are_always_the_same_and_cost_little():
    assert [*cases(["<|eos|>"])] == [*cases(["<|eos|>"])]
    assert sum(len(text) for _, texts in cases([]) for text in texts) < 5_000_000


class Mistaken:
    """The reference with one fault."""

    name, version = "fastokens", "0"

    def __init__(self, tokenizer_json: bytes) -> None:
        self._library = LibraryEncoder(read_library(tokenizer_json))
        self._last = ""

    def encode(self, texts):
        return self._library.encode([self._mistake(text) for text in texts])

    def _mistake(self, text: str) -> str:
        raise NotImplementedError


class Forgets(Mistaken):
    """Reads one character wrongly, far out in the planes."""

    def _mistake(self, text):
        return text.replace("\U0001e5d0", "a")


class Remembers(Mistaken):
    """Goes on with an earlier text where both begin alike and this one ends within white space."""

    def _mistake(self, text):
        last, self._last = self._last, text
        begins_alike = len(text) > 4096 and text[:4096] == last[:4096]
        return text.rstrip(" ") if begins_alike and text.endswith("  ") else text


class Normalizes(Mistaken):
    def _mistake(self, text):
        return text.replace("\u212b", "\u00c5")


class DropsMarks(Mistaken):
    def _mistake(self, text):
        return text.removeprefix("\ufeff")


class Recognizes(Mistaken):
    """Takes the text of a special token for the token, as if it were nothing."""

    def _mistake(self, text):
        return text.replace("<|eos|>", "")


class LosesTheEnd(Mistaken):
    """Of a run that is longer than its block."""

    def _mistake(self, text):
        return text.replace("a" * 50_000, "a" * 49_999)


@pytest.mark.parametrize("kind", [Forgets, Remembers, Normalizes, DropsMarks, Recognizes, LosesTheEnd])
def test_a_fault_of_the_fast_encoder_is_found_and_shown(llama_like, monkeypatch, kind):
    monkeypatch.setattr(gate, "FastEncoder", kind)
    result = parity(llama_like, [])
    assert not result.equal
    assert result.difference
    assert len(result.difference) < 1000


def test_a_difference_in_the_sample_alone_is_found(llama_like, monkeypatch):
    class Odd(Mistaken):
        def _mistake(self, text):
            return text.replace("Thou shalt", "You shall")

    monkeypatch.setattr(gate, "FastEncoder", Odd)
    assert parity(llama_like, ["none"]).equal
    result = parity(llama_like, ["none", "Thou shalt not"])
    assert not result.equal
    assert result.difference is not None
    assert result.difference.startswith("sample: 'Thou shalt not': id 0: ")


def test_a_tokenizer_that_the_fast_encoder_does_not_read_is_refused_with_its_reason():
    tokenizer = Tokenizer(models.Unigram([("a", -1.0), ("b", -2.0), ("<unk>", -3.0)], unk_id=2))
    result = parity(tokenizer.to_str().encode(), [])
    assert (result.equal, result.difference) == (False, None)
    assert result.refused is not None
    assert "fastokens" in result.refused


# ---- long documents --------------------------------------------------------------------------------------------------


def test_the_patterns_in_use_allow_cuts(tokenizer_json):
    assert may_be_cut(specification(tokenizer_json))


def test_a_byte_level_splitter_of_its_own_allows_cuts_unless_it_adds_a_space():
    for prefix, expected in ((False, True), (True, False)):
        tokenizer = trained(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=True))
        assert may_be_cut(specification(tokenizer.to_str().encode())) is expected


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}},
        {"added_tokens": [{"id": 1, "content": "a b", "special": False}]},
        {"added_tokens": [{"id": 1, "content": "ab", "special": False, "single_word": True}]},
        {"added_tokens": [{"id": 1, "content": "ab", "special": False, "lstrip": True}]},
        {"model": {"type": "Unigram"}},
    ],
)
def test_a_tokenizer_that_may_look_over_the_place_gets_its_documents_whole(llama_like, change):
    assert not may_be_cut({**specification(llama_like), **change})


@pytest.mark.parametrize(
    "pattern", [r"\p{N}+", r"\p{L}+ \p{L}+|\p{L}+", r"(?<=a) |\p{L}+", r"[a|\p{L}]+", r"\p{L}+|a(?= b)"]
)
def test_a_pattern_with_other_alternatives_allows_no_cuts(llama_like, pattern):
    changed = specification(llama_like)
    changed["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    assert not may_be_cut(changed)


PARTS = st.sampled_from(
    [*WORDS, " ", "  ", "\n", "'s", "'", "a", "B", "1", "é", " a", "<|eos|>", "\u2003", "ſ", "\t x"]
)


@given(st.lists(PARTS, max_size=60).map("".join), st.integers(1, 30))
@settings(max_examples=300, deadline=None)
def test_pieces_have_the_ids_of_the_whole(tokenizer_json, text, characters):
    pieces = [*cut(text, characters)]
    assert "".join(pieces) == text
    encoder = LibraryEncoder(read_library(tokenizer_json))
    assert [i for ids in ids_of(encoder, pieces) for i in ids] == ids_of(encoder, [text])[0]


@pytest.mark.parametrize("kind", ["fast", "reference"])
def test_a_long_document_in_pieces_has_the_ids_of_the_whole(llama_like, kind):
    texts = ["the", prose(3, 400_000), "", "x" * 2_000_000, "of"]
    whole = FastEncoder(llama_like) if kind == "fast" else LibraryEncoder(read_library(llama_like))
    pieces = FastEncoder(llama_like, True) if kind == "fast" else LibraryEncoder(read_library(llama_like), True)
    assert len([*cut(texts[1])]) > 2
    assert ids_of(pieces, texts) == ids_of(whole, texts)


def test_a_text_without_a_place_to_cut_stays_whole():
    assert [*cut("a" * 5000, 100)] == ["a" * 5000]
    assert [*cut("", 100)] == [""]
    assert [*cut("ab cd", 1)] == ["ab", " cd"]


def test_groups_hold_about_so_many_characters_and_lose_nothing():
    pieces = ["aa", "bbb", "", "c" * 10, "d"]
    assert [*groups(pieces, 5)] == [["aa", "bbb", ""], ["c" * 10], ["d"]]
    assert [*groups([], 5)] == []


TEXTS = {
    "prose": lambda n: prose(5, n // 5)[:n],
    "one letter": lambda n: "a" * n,
    "spaces": lambda n: " " * n,
    "CJK": lambda n: "汉字" * (n // 2),
    "base64": lambda n: "".join(random.Random(0).choices("ABCabc0123456789+/xyzXYZ", k=n)),
}


@pytest.mark.parametrize("kind", ["fast", "reference"])
@pytest.mark.parametrize("name", TEXTS)
def test_time_grows_with_the_length_of_a_document_and_not_with_its_square(llama_like, name, kind):
    small = 100_000 if kind == "fast" else 40_000
    encoder = FastEncoder(llama_like, True) if kind == "fast" else LibraryEncoder(read_library(llama_like), True)
    encoder.encode([TEXTS[name](small)])
    short, long = (_least_seconds(encoder, TEXTS[name](size)) for size in (small, 8 * small))
    assert long < 24 * short + 0.02  # 8 if it is linear, 64 if it is quadratic


def _least_seconds(encoder, text: str) -> float:
    seconds = []
    for _ in range(3):
        start = time.process_time()
        encoder.encode([text])
        seconds.append(time.process_time() - start)
    return min(seconds)


def test_offsets_begin_with_zero():
    assert offsets_of([2, 0, 3]).tolist() == [0, 2, 2, 5]
