"""A tokenizer from somewhere else: its ids or one line; nothing of it runs, and text never becomes a special token."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from builders import Workbench
from hypothesis import HealthCheck, given
from hypothesis import settings as tries
from hypothesis import strategies as st

from marin_build.data import tokenizer
from marin_build.data.sources import files_digest, find
from marin_build.data.tokenizer import bytes_tokenizer, load_tokenizer
from marin_build.data.vocabulary import check_vocabulary, read_small
from marin_build.errors import DamageError, RequestError
from marin_build.recipe import schema
from marin_build.recipe.sources import FilesSource

SPECIALS = schema.SpecialTokens(bos=None, eos="<|end|>", pad=None)
PLAIN = bytes_tokenizer()
PLAIN.add_special_tokens(["<|end|>"])
SPECIFICATION: dict[str, Any] = json.loads(PLAIN.to_str())


def adopt(workbench: Workbench, files: dict[str, bytes]) -> Path:
    """What the builder makes of these files, all of which the recipe names."""
    given_folder = workbench.folder / "given"
    given_folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (given_folder / name).write_bytes(data)
    paths = [f"{given_folder}/*"]
    source = FilesSource(type="files", paths=paths, digest=files_digest(find(paths)))
    wanted = schema.AdoptedTokenizer(method="adopt", source=source, vocabulary_size=257, special_tokens=SPECIALS)
    context = workbench.context("tokenizers/bench/dev", schema.TokenizerRecipe(tokenizer=wanted))
    tokenizer.build(context)
    return context.folder


def refused(workbench: Workbench, files: dict[str, bytes]) -> str:
    with pytest.raises(RequestError) as error:
        adopt(workbench, files)
    first, *rest = str(error.value).split("\n")
    assert len(first) < 1000
    return "\n".join([first, *rest])


HONEST = {"tokenizer.json": json.dumps(SPECIFICATION).encode()}


def test_an_honest_one_is_adopted(workbench: Workbench):
    assert load_tokenizer(adopt(workbench, HONEST)).vocab_size == 257


@pytest.mark.parametrize("name", ["tokenization_x.py", "x.pkl", "x.PT", "model.bin", "x.joblib", "x.so", "x.npy"])
def test_files_that_run_are_refused_by_name(workbench: Workbench, name: str):
    message = refused(workbench, {**HONEST, name: b"x"})
    assert f"holds '{name}', which can run code when it is loaded\n  narrow the files" in message


@pytest.mark.parametrize(
    "config", [{"auto_map": {"AutoTokenizer": ["evil/repo--x.Tokenizer", None]}}, {"trust_remote_code": True}]
)
def test_a_configuration_that_makes_loaders_run_code_is_refused(workbench: Workbench, config: dict[str, Any]):
    message = refused(workbench, {**HONEST, "tokenizer_config.json": json.dumps(config).encode()})
    assert "would run code from elsewhere\n  copy the files, remove" in message


def test_a_configuration_names_no_other_class_and_no_other_files(workbench: Workbench):
    config = {"tokenizer_class": "EvilTokenizer", "tokenizer_file": "/etc/passwd", "vocab_file": "../x", "kept": 1}
    made = adopt(workbench, {**HONEST, "tokenizer_config.json": json.dumps(config).encode()})
    assert json.loads((made / "tokenizer_config.json").read_text()) == {
        **{"tokenizer_class": "PreTrainedTokenizerFast", "kept": 1},
        **{"eos_token": "<|end|>"},
    }


def test_a_chat_template_is_data(workbench: Workbench, tmp_path: Path):
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for x in range(10**12) %}{% endfor %}"
    config = json.dumps({"chat_template": template}).encode()
    made = adopt(workbench, {**HONEST, "tokenizer_config.json": config, "chat_template.jinja": template.encode()})
    assert (made / "chat_template.jinja").read_text() == template


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff\xfe",
        pickle.dumps({"model": 1}),
        b"[" * 100_000,
        b'{"model":' * 100_000,
        b'{"model": NaN}',
        b'{"model": {"vocab": {"a": 0, "a": 1}}}',
        b'{"model": {"vocab": {"a": ' + b"9" * 5000 + b"}}}",
    ],
    ids=lambda data: ascii(data[:20]),
)
def test_what_is_no_tokenizer_is_refused(workbench: Workbench, data: bytes):
    refused(workbench, {"tokenizer.json": data})
    (workbench.folder / "given/tokenizer_config.json").write_text("{}")
    with pytest.raises(DamageError):
        load_tokenizer(workbench.folder / "given")


def test_an_id_of_four_thousand_millions_is_a_hole_and_not_a_list_of_them(workbench: Workbench):
    evil = copy.deepcopy(SPECIFICATION)
    evil["added_tokens"][0]["id"] = 2**32 - 1
    assert "holes in its ids: 4,294,967,039 of 0 to 4,294,967,295 are unused: 256, 257, 258, 259, 260, …" in refused(
        workbench, {"tokenizer.json": json.dumps(evil).encode()}
    )


def test_a_file_larger_than_any_tokenizer_is_not_read(tmp_path: Path):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="larger than"):
        read_small(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("config", [b"[]", b'{"eos_token": [1]}', b'{"eos_token": {"content": {}}}', b"[" * 100_000])
def test_a_damaged_artifact_is_told_in_one_line(tmp_path: Path, config: bytes):
    (tmp_path / "tokenizer.json").write_bytes(HONEST["tokenizer.json"])
    (tmp_path / "tokenizer_config.json").write_bytes(config)
    with contextlib.suppress(DamageError):
        assert load_tokenizer(tmp_path).eos_id is None


def test_text_that_spells_a_special_token_stays_text(workbench: Workbench):
    loaded = load_tokenizer(adopt(workbench, HONEST))
    text = "a<|end|>b\x1b[2J"
    ids, _ = loaded.encode([text])
    assert ids.tolist() == list(text.encode())
    assert loaded.eos_id not in ids


PLACES = [("model",), ("model", "vocab"), ("model", "merges"), ("model", "type"), ("added_tokens",), ("normalizer",)]
PLACES += [("pre_tokenizer",), ("pre_tokenizer", "type"), ("decoder",), ("added_tokens", 0), ("added_tokens", 0, "id")]
SCALARS = st.none() | st.booleans() | st.integers(-2, 2**33) | st.floats(allow_nan=False) | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
PARTS = st.sampled_from(
    [
        {"type": "Replace", "pattern": {"Regex": "("}, "content": ""},
        {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
        {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
        {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
        {"type": "Strip", "content": "a", "start": 2**40, "stop": 2**40},
        {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
        {"type": "Unigram", "unk_id": 5, "vocab": [], "byte_fallback": True},
        {"type": "WordPiece", "vocab": {}, "unk_token": "x", "max_input_chars_per_word": 0},
    ]
)


@tries(max_examples=80, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(PLACES), VALUES | PARTS)
def test_any_value_anywhere_in_a_tokenizer_is_usable_or_refused(place: tuple[Any, ...], value: Any):
    evil = copy.deepcopy(SPECIFICATION)
    inner = evil
    for part in place[:-1]:
        inner = inner[part]
    inner[place[-1]] = value
    with contextlib.suppress(RequestError):
        check_vocabulary(json.dumps(evil).encode(), 257, SPECIALS, "here")
