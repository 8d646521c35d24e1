"""Tokenizers: bytes, trained and adopted; what their folders hold and which files cannot be trusted."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from builders import Workbench
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from marin_build.data import sources, tokenizer
from marin_build.data.encoder import ByteEncoder, LibraryEncoder
from marin_build.data.tokenizer import load_tokenizer
from marin_build.errors import DamageError, RequestError, Stopped
from marin_build.recipe import schema
from marin_build.recipe.sources import FilesSource, JsonLines, PlainText

TARGET = "tokenizers/bench/dev"
SPECIALS = schema.SpecialTokens(bos="<|bos|>", eos="<|eos|>", pad=None)
NONE = schema.SpecialTokens(bos=None, eos=None, pad=None)
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = ["the", "of", "and", "that", "his", "with", "not", "my", "shall", "thou", "lord", "king"]
SYLLABLES = [a + b for a in "bcdfglmnprst" for b in ("a", "e", "i", "o", "an", "er", "ing")]


def prose(seed: int, count: int = 400) -> str:
    """Some words that come often, and many that are made up of syllables."""
    dice = random.Random(seed)
    made_up = ["".join(dice.choices(SYLLABLES, k=3)) for _ in range(count)]
    return " ".join(dice.choices(WORDS + made_up, k=count)) + ".\n"


TEXT = b"".join(json.dumps({"text": prose(seed)}).encode() + b"\n" for seed in range(30))


def trained_recipe(size: int = 300, specials: schema.SpecialTokens = SPECIALS, **fields) -> schema.TokenizerRecipe:
    text = schema.TrainingText(
        target="raw/bench/dev", files=["text.jsonl"], format=JsonLines(type="jsonl", text_key="text")
    )
    usual = {"text": [text], "vocabulary_size": size, "split_regex": SPLIT, "special_tokens": specials}
    return schema.TokenizerRecipe(tokenizer=schema.TrainedTokenizer(method="byte_level_bpe", **{**usual, **fields}))


def train(workbench, recipe: schema.TokenizerRecipe, text: bytes = TEXT, folder: str | None = None):
    context = workbench.context(TARGET, recipe, workbench.raw({"text.jsonl": text}), folder=folder)
    return tokenizer.build(context), context.folder


def documents(loaded, texts: list[str]) -> list[list[int]]:
    ids, offsets = loaded.encode(texts)
    assert (ids.dtype, offsets.dtype) == (np.uint32, np.int64)
    return [ids[start:end].tolist() for start, end in pairwise(offsets)]


# ---- bytes -----------------------------------------------------------------------------------------------------------


def test_a_bytes_tokenizer_gives_each_byte_its_value(workbench):
    loaded = load_tokenizer(workbench.bytes_tokenizer().folder)
    assert (loaded.vocab_size, loaded.bos_id, loaded.eos_id, loaded.pad_id) == (258, 256, 257, None)
    assert isinstance(loaded.encoder, ByteEncoder)
    assert documents(loaded, ["Aé", "", "\0\n"]) == [[65, 0xC3, 0xA9], [], [0, 10]]
    assert loaded.token_bytes() == [bytes([byte]) for byte in range(256)] + [b"", b""]


@given(st.lists(st.text(), max_size=4))
@settings(max_examples=200, deadline=None)
def test_bytes_round_trip_for_any_text(shared_bytes, texts):
    loaded, library = shared_bytes
    ids = documents(loaded, texts)
    assert [bytes(i).decode() for i in ids] == texts
    assert [loaded.decode(i) for i in ids] == texts
    assert documents(library, texts) == ids  # the short cut gives what the library gives


@pytest.fixture(scope="module")
def shared_bytes(tmp_path_factory):
    """The bytes tokenizer, and the same through the library."""
    loaded = load_tokenizer(Workbench(tmp_path_factory.mktemp("bytes")).bytes_tokenizer().folder)
    library = LibraryEncoder(Tokenizer.from_file(str(loaded.folder / "tokenizer.json")))
    return loaded, replace(loaded, make_encoder=lambda: library)


# ---- trained ---------------------------------------------------------------------------------------------------------


def test_a_trained_tokenizer_has_all_bytes_dense_ids_and_specials_last(workbench):
    result, folder = train(workbench, trained_recipe())
    loaded = load_tokenizer(folder)
    assert (loaded.vocab_size, loaded.bos_id, loaded.eos_id, loaded.pad_id) == (300, 298, 299, None)
    assert result.metrics["vocabulary_size"] == 300
    assert result.metrics["training_documents"] == 30
    of_id = loaded.token_bytes()
    assert {bytes([byte]) for byte in range(256)} <= set(of_id)
    assert of_id[298:] == [b"", b""]
    assert sum(len(token) > 1 for token in of_id) == 300 - 256 - 2
    library = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert sorted(library.get_vocab().values()) == list(range(300))


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_a_trained_tokenizer_round_trips_text_it_never_saw(shared_trained, text):
    [ids] = documents(shared_trained, [text])
    of_id = shared_trained.token_bytes()
    assert b"".join(of_id[i] for i in ids).decode() == text
    assert shared_trained.decode(ids) == text


@pytest.fixture(scope="module")
def shared_trained(tmp_path_factory):
    _, folder = train(Workbench(tmp_path_factory.mktemp("trained")), trained_recipe())
    return load_tokenizer(folder)


@pytest.mark.parametrize("which", ["shared_trained", "bytes"])
def test_the_text_of_a_special_token_in_a_document_stays_text(request, which):
    loaded = (
        request.getfixturevalue("shared_trained") if which != "bytes" else request.getfixturevalue("shared_bytes")[0]
    )
    [ids] = documents(loaded, ["a<|eos|><|bos|>b"])
    assert not {loaded.bos_id, loaded.eos_id} & set(ids)
    assert loaded.decode(ids) == "a<|eos|><|bos|>b"
    assert loaded.decode([loaded.bos_id, *ids]) == "<|bos|>a<|eos|><|bos|>b"


TRAIN_ALONE = """
import sys, json
from pathlib import Path
from builders import Workbench
from marin_build.recipe import schema
from marin_build.data import tokenizer
folder, recipe = sys.argv[1], schema.TokenizerRecipe.model_validate_json(sys.argv[2])
bench = Workbench(Path(folder))
raw = bench.finished("raw/bench/dev", Path(sys.argv[3]))
tokenizer.build(bench.context("tokenizers/bench/dev", recipe, raw, folder="out"))
"""


def test_training_gives_the_same_bytes_whatever_the_threads(workbench, tmp_path):
    recipe = trained_recipe(size=700)
    raw = workbench.raw({"text.jsonl": TEXT})
    made = []
    for threads in (1, 2, 3, 3):
        folder = tmp_path / str(len(made))
        environment = {**os.environ, "RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
        environment["PYTHONPATH"] = os.path.dirname(sys.modules["builders"].__file__)
        command = [sys.executable, "-c", TRAIN_ALONE, folder, recipe.model_dump_json(), raw.folder]
        subprocess.run(command, env=environment, check=True, timeout=120)
        made.append({path.name: path.read_bytes() for path in (folder / "out").iterdir()})
    assert set(made[0]) == {"tokenizer.json", "tokenizer_config.json"}
    assert all(other == made[0] for other in made[1:])


def test_the_order_of_documents_does_not_change_the_merges(workbench):
    lines = TEXT.splitlines(keepends=True)
    _, one = train(workbench, trained_recipe(), folder="one")
    _, other = train(workbench, trained_recipe(), b"".join(reversed(lines)), folder="other")
    assert (one / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()


def test_too_small_a_vocabulary_is_refused_with_the_least_that_works(workbench):
    with pytest.raises(RequestError, match="vocabulary_size 257 is too small: needs at least 258, for 256 bytes and 2"):
        train(workbench, trained_recipe(size=257))
    train(workbench, trained_recipe(size=258))


def test_text_that_runs_out_of_pairs_is_an_error_that_says_what_it_gives(workbench):
    text = b'{"text": "ab ab ab"}\n'
    with pytest.raises(RequestError, match=r"gives only 260 ids of the tokenizer.vocabulary_size 300"):
        train(workbench, trained_recipe(), text)


def test_a_wrong_regex_is_refused(workbench):
    with pytest.raises(RequestError, match=r"tokenizers/bench/dev: tokenizer.split_regex is not a regular expression"):
        train(workbench, trained_recipe(split_regex="(unclosed"))


def test_bad_training_text_is_named(workbench):
    with pytest.raises(RequestError, match=r"text.jsonl, byte 0: missing_key: no key 'text'"):
        train(workbench, trained_recipe(), b'{"other": "x"}\n')
    with pytest.raises(RequestError, match=r"tokenizer.text has no document with text"):
        train(workbench, trained_recipe(), b'{"text": null}\n')


def test_training_reads_compressed_and_plain_text_alike(workbench):
    import gzip

    format = PlainText(type="text", document="line")
    text = [schema.TrainingText(target="raw/bench/dev", files=["text.*"], format=format)]
    recipe = trained_recipe(text=text)
    plain = "".join(prose(seed) for seed in range(30)).encode()
    folders = []
    for name, data in {"text.txt": plain, "text.txt.gz": gzip.compress(plain)}.items():
        raw = Workbench(workbench.folder / name).raw({name: data})
        context = workbench.context(TARGET, recipe, raw, folder=f"out-{name}")
        tokenizer.build(context)
        folders.append(context.folder)
    assert (folders[0] / "tokenizer.json").read_bytes() == (folders[1] / "tokenizer.json").read_bytes()


def test_text_that_is_not_the_recorded_one_is_damage(workbench):
    raw = workbench.raw({"text.jsonl": TEXT})
    (raw.folder / "text.jsonl").write_bytes(TEXT.replace(b"a", b"b", 1))
    with pytest.raises(DamageError, match=r"raw/bench/dev is damaged: text.jsonl is not what its record says"):
        tokenizer.build(workbench.context(TARGET, trained_recipe(), raw))


def test_a_signal_stops_the_training(workbench):
    context = workbench.context(TARGET, trained_recipe(), workbench.raw({"text.jsonl": TEXT}))
    with pytest.raises(Stopped):
        tokenizer.build(replace(context, stop_requested=lambda: True))
    assert list(context.folder.iterdir()) == []


def test_a_special_token_that_is_a_token_already_is_refused(workbench):
    with pytest.raises(RequestError, match=r"special_tokens.bos 'a' is an ordinary token already"):
        workbench.bytes_tokenizer(specials=schema.SpecialTokens(bos="a", eos=None, pad=None))


# ---- adopted ---------------------------------------------------------------------------------------------------------


def adopt(workbench, files: dict[str, str | bytes], size: int = 300, specials: schema.SpecialTokens = SPECIALS):
    """Adopt the files; returns the folder."""
    place = workbench.folder / "given"
    place.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (place / name).write_bytes(data if isinstance(data, bytes) else data.encode())
    paths = [str(place / name) for name in files]
    source = FilesSource(type="files", paths=paths, digest=sources.files_digest(sources.find(paths)))
    recipe = schema.TokenizerRecipe(
        tokenizer=schema.AdoptedTokenizer(method="adopt", source=source, vocabulary_size=size, special_tokens=specials)
    )
    context = workbench.context(TARGET, recipe, folder="adopted")
    tokenizer.build(context)
    return context.folder


@pytest.fixture(scope="module")
def given_file(tmp_path_factory) -> str:
    """A tokenizer.json that somebody else made."""
    _, folder = train(Workbench(tmp_path_factory.mktemp("given")), trained_recipe())
    return (folder / "tokenizer.json").read_text()


def changed(text: str, change) -> str:
    specification = json.loads(text)
    change(specification)
    return json.dumps(specification)


def test_an_adopted_tokenizer_is_kept_byte_for_byte(workbench, given_file):
    config = (
        '{"bos_token": {"content": "<|bos|>"}, "eos_token": "<|eos|>",  "tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    folder = adopt(workbench, {"tokenizer.json": given_file, "tokenizer_config.json": config})
    assert (folder / "tokenizer.json").read_text() == given_file
    assert (folder / "tokenizer_config.json").read_text() == config
    loaded = load_tokenizer(folder)
    assert (loaded.vocab_size, loaded.bos_id, loaded.eos_id, loaded.pad_id) == (300, 298, 299, None)


def test_the_recipe_has_the_last_word_about_roles_and_the_rest_of_the_configuration_stays(workbench, given_file):
    config = json.dumps({"bos_token": "<|eos|>", "eos_token": "<|eos|>", "pad_token": "<|eos|>", "chat_template": "x"})
    folder = adopt(workbench, {"tokenizer.json": given_file, "tokenizer_config.json": config})
    written = json.loads((folder / "tokenizer_config.json").read_text())
    assert written["chat_template"] == "x"
    assert (written["bos_token"], written["eos_token"], written["pad_token"]) == ("<|bos|>", "<|eos|>", None)
    assert load_tokenizer(folder).bos_id == 298


def test_a_tokenizer_without_configuration_gets_one(workbench, given_file):
    assert load_tokenizer(adopt(workbench, {"tokenizer.json": given_file})).eos_id == 299


def test_truncation_and_padding_of_an_adopted_file_cut_nothing_off(workbench, given_file):
    library = Tokenizer.from_str(given_file)
    library.enable_truncation(3)
    library.enable_padding(length=3)
    [ids] = documents(load_tokenizer(adopt(workbench, {"tokenizer.json": library.to_str()})), [prose(0)])
    assert len(ids) > 100


def hole(specification) -> None:
    specification["added_tokens"][-1]["id"] = 305


def lost_byte(specification) -> None:
    del specification["model"]["vocab"]["a"]
    specification["model"]["merges"] = []


def twice(specification) -> None:
    specification["added_tokens"][-1]["id"] = 298


def ordinary(specification) -> None:
    specification["added_tokens"][-1]["special"] = False


def dropout(specification) -> None:
    specification["model"]["dropout"] = 0.1


REFUSED = {
    "a hole in the ids": (hole, r"has holes in its ids: 6 of 0 to 305 are unused: 299, 300, .*\n.*<\|unused_0\|>"),
    "a missing byte": (lost_byte, r"has holes in its ids: "),
    "one id twice": (twice, r"gives id 298 to several tokens: '<\|bos\|>', '<\|eos\|>'"),
    "a role that text can spell": (
        ordinary,
        r"special_tokens.eos '<\|eos\|>' is an ordinary token, so a document could",
    ),
    "dropout": (dropout, r"model.dropout 0.1: it encodes at random"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_cannot_be_trusted_are_refused(workbench, given_file, case):
    change, message = REFUSED[case]
    with pytest.raises(RequestError, match=message) as error:
        adopt(workbench, {"tokenizer.json": changed(given_file, change)})
    assert str(error.value).startswith("tokenizers/bench/dev: ")
    assert not (workbench.folder / "adopted/tokenizer.json").exists()


def test_a_wrong_vocabulary_size_says_both_sizes(workbench, given_file):
    with pytest.raises(RequestError, match=r"has 300 ids, 0 to 299, and the recipe says tokenizer.vocabulary_size 299"):
        adopt(workbench, {"tokenizer.json": given_file}, size=299)


def test_a_missing_special_token_is_refused_with_those_that_there_are(workbench, given_file):
    specials = schema.SpecialTokens(bos="<s>", eos=None, pad=None)
    with pytest.raises(RequestError, match=r"special_tokens.bos '<s>' is not in the vocabulary\n.*'<\|bos\|>'"):
        adopt(workbench, {"tokenizer.json": given_file}, specials=specials)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}', "\0"])
def test_a_file_that_is_no_tokenizer_is_refused(workbench, content):
    with pytest.raises(RequestError, match=r"is not a tokenizer.json that tokenizers .* reads"):
        adopt(workbench, {"tokenizer.json": content})


def test_a_source_without_tokenizer_json_is_refused(workbench):
    with pytest.raises(RequestError, match=r"tokenizer.json is not among the files of tokenizer.source: vocab.json"):
        adopt(workbench, {"vocab.json": "{}"})


def test_a_configuration_that_is_no_json_is_refused(workbench, given_file):
    with pytest.raises(RequestError, match=r"tokenizer_config.json is not JSON"):
        adopt(workbench, {"tokenizer.json": given_file, "tokenizer_config.json": "{"})


def test_a_tokenizer_whose_bytes_are_unknown_is_refused_at_once(workbench):
    library = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(
        RequestError, match="cannot tell the bytes of this tokenizer's tokens: its parts are Whitespace"
    ):
        adopt(workbench, {"tokenizer.json": library.to_str()}, size=2, specials=NONE)


def test_a_normalizer_is_mentioned(workbench, given_file, caplog):
    library = Tokenizer.from_str(given_file)
    library.normalizer = normalizers.NFC()
    adopt(workbench, {"tokenizer.json": library.to_str()})
    assert "normalizes text" in caplog.text


def test_the_bytes_of_sentencepiece_tokens(workbench):
    vocabulary = {"<unk>": 0, "<0x0A>": 1, "▁the": 2, "é": 3, "▁": 4}
    library = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.add_special_tokens(["<unk>"])
    folder = adopt(workbench, {"tokenizer.json": library.to_str()}, size=5, specials=NONE)
    assert load_tokenizer(folder).token_bytes() == [b"", b"\n", b" the", "é".encode(), b" "]


def test_added_tokens_that_are_not_special_are_text(workbench, given_file):
    library = Tokenizer.from_str(given_file)
    library.add_tokens(["<think>é"])
    loaded = load_tokenizer(adopt(workbench, {"tokenizer.json": library.to_str()}, size=301))
    assert loaded.token_bytes()[300] == "<think>é".encode()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_folder_is_damage(workbench, name):
    folder = workbench.bytes_tokenizer().folder
    (folder / name).write_text("{")
    with pytest.raises(DamageError, match="cannot be loaded"):
        load_tokenizer(folder)
    (folder / name).unlink()
    with pytest.raises(DamageError, match=f"{name} cannot be read: No such file"):
        load_tokenizer(folder)
