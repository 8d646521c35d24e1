"""Tokenizer folders in the hands of transformers: the same ids, special tokens and text."""

from __future__ import annotations

import random
import sys
import unicodedata
from itertools import pairwise

import pytest
from builders import Workbench

from marin_build.data import sources, tokenizer
from marin_build.data.tokenizer import load_tokenizer
from marin_build.recipe import schema
from marin_build.recipe.sources import EmbeddedSource, FilesSource, JsonLines

pytestmark = pytest.mark.parity

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
SPECIALS = schema.SpecialTokens(bos="<|begin_of_text|>", eos="<|end_of_text|>", pad="<|pad|>")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A bytes tokenizer, one trained on the quickstart corpus, and that one adopted from its file alone."""
    bench = Workbench(tmp_path_factory.mktemp("parity"))
    digest = sources.files_digest(sources.embedded("quickstart"))
    raw_context = bench.context(
        "raw/bench/dev",
        schema.RawRecipe(source=EmbeddedSource(type="embedded", corpus="quickstart", digest=digest)),
    )
    from marin_build.data import raw

    raw.build(raw_context)
    text = schema.TrainingText(
        target="raw/bench/dev", files=["train.jsonl"], format=JsonLines(type="jsonl", text_key="text")
    )
    made = schema.TrainedTokenizer(
        method="byte_level_bpe", text=[text], vocabulary_size=1000, split_regex=SPLIT, special_tokens=SPECIALS
    )
    trained = bench.context(
        "tokenizers/trained/dev",
        schema.TokenizerRecipe(tokenizer=made),
        bench.finished("raw/bench/dev", raw_context.folder),
    )
    tokenizer.build(trained)
    paths = [str(trained.folder / "tokenizer.json")]
    source = FilesSource(type="files", paths=paths, digest=sources.files_digest(sources.find(paths)))
    adoption = schema.AdoptedTokenizer(method="adopt", source=source, vocabulary_size=1000, special_tokens=SPECIALS)
    adopted = bench.context("tokenizers/adopted/dev", schema.TokenizerRecipe(tokenizer=adoption))
    tokenizer.build(adopted)
    plain = bench.bytes_tokenizer(specials=SPECIALS)
    return {"bytes": plain.folder, "trained": trained.folder, "adopted": adopted.folder}


def texts() -> list[str]:
    dice = random.Random(0)
    planes = [chr(c) for c in range(0x20, 0x3000) if unicodedata.category(chr(c))[0] != "C"]
    mixed = [
        "".join(dice.choices([*planes, " ", "\n", "\r\n", "\0", "👩‍👩‍👧", "é"], k=dice.randrange(60)))
        for _ in range(300)
    ]
    return [
        *mixed,
        "",
        "  two  spaces ",
        "\ufefffirst",
        "It's 12345.67 o'clock",
        "a" * 5000,
        " " * 5000,
        "क्षि 中文 עברית",
    ]


@pytest.mark.parametrize("name", ["bytes", "trained", "adopted"])
def test_autotokenizer_gives_the_same_ids_and_text(folders, name):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folders[name]))
    ours = load_tokenizer(folders[name])
    ids, offsets = ours.encode(texts())
    for text, (start, end) in zip(texts(), pairwise(offsets), strict=True):
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids[start:end].tolist()
        assert theirs.decode(ids[start:end]) == text == ours.decode(ids[start:end])


@pytest.mark.parametrize("name", ["bytes", "trained", "adopted"])
def test_autotokenizer_knows_size_and_special_tokens_by_role(folders, name):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(folders[name]))
    ours = load_tokenizer(folders[name])
    assert len(theirs) == ours.vocab_size
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (ours.bos_id, ours.eos_id, ours.pad_id)
    assert theirs.bos_token == SPECIALS.bos
    assert theirs.decode([ours.eos_id, 65, ours.bos_id], skip_special_tokens=True) == ours.decode([65])
    assert theirs.model_max_length > sys.maxsize
    assert theirs("a")["input_ids"] == theirs("a", add_special_tokens=False)["input_ids"]
