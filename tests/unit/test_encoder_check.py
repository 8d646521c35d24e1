"""The check that lets the fast encoder make token sets: a target of its own, and what follows from it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
from builders import Workbench

from marin_build.artifact.context import Dependency
from marin_build.data import encoder_check, parity, tokenize, tokenizer
from marin_build.data.encoder import FastEncoder, LibraryEncoder
from marin_build.data.encoder_check import RESULT, may_be_fast
from marin_build.data.tokenizer import load_tokenizer
from marin_build.errors import DamageError, RecipeError
from marin_build.recipe import derived, schema
from marin_build.recipe.derived import base_of, check_target
from marin_build.recipe.load import RecipeBook
from marin_build.recipe.sources import JsonLines
from marin_build.recipe.target import parse_target

CONFIG = Path(__file__).parents[2] / "config"
TOKENIZER, CHECK = "tokenizers/words/dev", "checks/encoder/words/dev"
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXT = "".join(
    json.dumps({"text": f"The words of document {n} are not those of {n * n}.\nIt's <|eos|> end — 汉字!"}) + "\n"
    for n in range(200)
).encode()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    return Workbench(tmp_path_factory.mktemp("bench"))


@pytest.fixture(scope="module")
def raw(bench: Workbench) -> Dependency:
    return bench.raw({"text.jsonl": TEXT})


@pytest.fixture(scope="module")
def words(bench: Workbench, raw: Dependency) -> Dependency:
    text = schema.TrainingText(
        target=str(raw.target), files=["text.jsonl"], format=JsonLines(type="jsonl", text_key="text")
    )
    wanted = schema.TrainedTokenizer(
        method="byte_level_bpe",
        text=[text],
        vocabulary_size=300,
        split_regex=SPLIT,
        special_tokens=schema.SpecialTokens(bos="<|bos|>", eos="<|eos|>", pad=None),
    )
    context = bench.context(TOKENIZER, schema.TokenizerRecipe(tokenizer=wanted), raw)
    tokenizer.build(context)
    return bench.finished(TOKENIZER, context.folder)


def build_check(bench: Workbench, words: Dependency, folder: str):
    recipe = schema.EncoderCheckRecipe(of=TOKENIZER, fast="fastokens 0", reference="tokenizers 0")
    context = bench.context(CHECK, recipe, words, folder=folder)
    result = encoder_check.build(context)
    return result, bench.finished(CHECK, context.folder)


@pytest.fixture(scope="module")
def check(bench: Workbench, words: Dependency) -> Dependency:
    return build_check(bench, words, "check")[1]


# ---- the target ------------------------------------------------------------------------------------------------------


def test_the_result_says_what_was_compared_and_that_it_is_equal(bench, words):
    result, made = build_check(bench, words, "first")
    facts = json.loads((made.folder / RESULT).read_bytes())
    assert result.metrics["equal"] == 1
    assert result.made == (RESULT,)
    assert (facts["encoder"], facts["equal"], facts["difference"], facts["refused"]) == ("fastokens", True, None, None)
    assert facts["tokenizer"] == {"target": TOKENIZER, "xxh3_128": load_tokenizer(words.folder).digest}
    assert facts["characters"] > 3_000_000
    assert (facts["fastokens"], facts["tokenizers"]) == (FastEncoder.version, LibraryEncoder.version)


def test_the_same_check_has_the_same_bytes(bench, words, check):
    _, again = build_check(bench, words, "again")
    assert again.record["digest"] == check.record["digest"]


def test_a_difference_is_a_result_and_no_failure(bench, words, monkeypatch):
    class Wrong(LibraryEncoder):
        def __init__(self, data: bytes) -> None:
            super().__init__(parity.read_library(data))

        def encode(self, texts):
            return super().encode([text.replace("\r\n", "\n") for text in texts])

    monkeypatch.setattr(parity, "FastEncoder", Wrong)
    Wrong.version = "9"
    result, made = build_check(bench, words, "wrong")
    facts = json.loads((made.folder / RESULT).read_bytes())
    assert result.metrics["equal"] == 0
    assert facts["encoder"] == "tokenizers"
    assert r"\r\n" in facts["difference"]


def test_a_tokenizer_that_is_not_as_recorded_is_damage(bench, words):
    files = [{**entry, "xxh3_128": "0" * 32} for entry in words.record["files"]]
    changed = replace(words, record={**words.record, "files": files})
    with pytest.raises(DamageError, match=r"tokenizer\.json is not what its record says"):
        build_check(bench, changed, "damaged")


# ---- what it allows --------------------------------------------------------------------------------------------------


def allowed(words: Dependency, *checks: Dependency) -> tuple[bool, str]:
    dependencies = {str(d.target): d for d in (words, *checks)}
    return may_be_fast(dependencies, TOKENIZER, load_tokenizer(words.folder).digest)


def changed(bench: Workbench, check: Dependency, folder: str, **facts) -> Dependency:
    """The check with other facts, and a record that agrees with them."""
    place = bench.folder / folder
    place.mkdir()
    (place / RESULT).write_text(json.dumps(json.loads((check.folder / RESULT).read_bytes()) | facts))
    return bench.finished(CHECK, place)


def test_an_equal_check_allows_the_fast_encoder(words, check):
    fast, why = allowed(words, check)
    assert fast
    assert why.startswith(f"fastokens {FastEncoder.version} gives the ids of tokenizers")


def test_without_a_check_the_reference_is_used(words):
    assert allowed(words) == (False, "no check of the fast encoder was asked for")


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"equal": False, "difference": "by hand: 'x'"}, "other ids: by hand: 'x'"),
        ({"equal": False, "refused": "no Unigram"}, "is not used: no Unigram"),
        ({"fastokens": "0.0.1"}, "of another tokenizer or library"),
        ({"tokenizer": {"target": TOKENIZER, "xxh3_128": "0" * 32}}, "of another tokenizer or library"),
    ],
)
def test_any_other_check_allows_nothing_and_says_why(bench, words, check, facts, reason):
    folder = f"other-{abs(hash(reason + str(facts)))}"
    fast, why = allowed(words, changed(bench, check, folder, **facts))
    assert not fast
    assert reason in why


def test_a_check_that_is_not_as_recorded_is_damage(bench, words, check):
    copy = changed(bench, check, "tampered")
    (copy.folder / RESULT).write_text((copy.folder / RESULT).read_text().replace("true", "true "))
    with pytest.raises(DamageError, match=r"parity\.json is not what its record says"):
        allowed(words, copy)


def test_both_encoders_make_the_same_token_set_and_each_is_named_in_the_record(bench, raw, words, check, caplog):
    made = {}
    with caplog.at_level(logging.INFO):
        for name, checks in (("reference", {}), ("fast", {CHECK: check})):
            dependencies = {str(raw.target): raw, TOKENIZER: words, **checks}
            given = {"dependencies": dependencies}
            folder, result = bench.tokenize(raw, words, folder=f"set-{name}", given=given, processes=2)
            made[name] = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}, result.details
    assert made["fast"][0] == made["reference"][0]
    assert len(made["fast"][0]) > 3
    assert made["reference"][1]["encoder"]["name"] == "tokenizers"
    assert made["fast"][1]["encoder"] == {"name": "fastokens", "version": FastEncoder.version}
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("encoding with ")]
    assert said[0].startswith("encoding with tokenizers")
    assert said[1].startswith(f"encoding with fastokens {FastEncoder.version}: ")
    assert len(said) == 2


def test_a_tokenizer_of_bytes_needs_no_check_to_be_fast(bench, raw, caplog):
    with caplog.at_level(logging.INFO):
        _, result = bench.tokenize(raw, bench.bytes_tokenizer(), folder="set-bytes")
    assert result.details["encoder"]["name"] == "bytes"
    assert "encoding with bytes 1" in [record.getMessage() for record in caplog.records]


def test_the_library_is_chosen_for_a_build_and_not_for_making_shards_again():
    """What proves a token set by making some of it again does so with the reference."""
    assert tokenize.open_tokenizer.__defaults__ == (False,)


# ---- its name and its place in the plan ------------------------------------------------------------------------------


def test_a_check_is_named_after_its_tokenizer():
    check = check_target(parse_target("tokenizers/dclm/small/2026.06.28.2"))
    assert str(check) == "checks/encoder/dclm/small/2026.06.28.2"
    assert str(base_of(check)) == "tokenizers/dclm/small/2026.06.28.2"
    assert check.is_derived


def test_a_token_set_needs_the_check_of_its_tokenizer_and_is_not_made_of_it():
    book, target = RecipeBook(CONFIG), parse_target("tokenized/quickstart/train/2026.06.28")
    check = "checks/encoder/quickstart/2026.06.28"
    assert check in book.needs(target)
    assert check not in derived_free(book, target)
    assert book.needs(parse_target(check)) == ("tokenizers/quickstart/2026.06.28",)
    part = derived.part_target(target, 0, 2)
    assert check in book.needs(part)


def derived_free(book: RecipeBook, target) -> tuple[str, ...]:
    from marin_build.recipe.dependencies import identity_dependencies

    return identity_dependencies(book.load(target))


def test_the_reference_alone_needs_no_check():
    book = RecipeBook(CONFIG, encoder="tokenizers")
    target = parse_target("tokenized/quickstart/train/2026.06.28")
    assert not [text for text in book.needs(target) if text.startswith("checks/")]


def test_a_library_that_is_not_installed_is_not_compared(monkeypatch):
    monkeypatch.setattr(derived, "installed", lambda library: None)
    book, target = RecipeBook(CONFIG), parse_target("tokenized/quickstart/train/2026.06.28")
    assert not [text for text in book.needs(target) if text.startswith("checks/")]


def test_another_version_of_either_library_makes_another_check(monkeypatch):
    check = parse_target("checks/encoder/quickstart/2026.06.28")
    fingerprints = {RecipeBook(CONFIG).fingerprint(check)}
    for changed_library in ("fastokens", "tokenizers"):
        monkeypatch.setattr(derived, "installed", lambda library, c=changed_library: "9" if library == c else "1")
        fingerprints.add(RecipeBook(CONFIG).fingerprint(check))
    assert len(fingerprints) == 3


@pytest.mark.parametrize("text", ["checks/quickstart/2026.06.28", "checks/encoder/2026.06.28"])
def test_another_name_is_refused_with_how_to_write_it(text):
    with pytest.raises(RecipeError, match=r"write it as checks/encoder/<tokenizer>/<version>"):
        RecipeBook(CONFIG).load(parse_target(text))
