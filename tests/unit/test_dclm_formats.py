"""The reference recipes' token sets, made as they are written of stand-ins in the formats and layouts of the real."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from builders import Workbench

from marin_build.data import tokenize
from marin_build.data.globs import Glob
from marin_build.data.shards import TokenizedSet
from marin_build.data.sources import files_digest, find
from marin_build.recipe.load import RecipeBook
from marin_build.recipe.schema import TokenBudget, TokenizedRecipe
from marin_build.recipe.sources import ArtifactSource, FilesSource, HuggingFaceSource
from marin_build.recipe.target import parse_target

BOOK = RecipeBook(Path(__file__).parents[2] / "config")
VERSION = "2026.06.28"


def documents(name: str, count: int = 40) -> list[str]:
    return [f"{name} says é and\n\n<|end_of_text|> {number}" for number in range(count)]


def web_text(texts: list[str]) -> bytes:
    """As in DCLM-baseline: many keys, a newline in the text, NaN in a score."""
    records = [f'{{"url": "http://x", "bff": 1, "score": NaN, "text": {json.dumps(text)}}}\n' for text in texts]
    return zstandard.ZstdCompressor().compress("".join(records).encode())


def mathematics(texts: list[str]) -> bytes:
    """As in Proof-Pile-2: text and a nested meta, in several frames."""
    frames = [json.dumps({"text": text, "meta": {"a": [1, {"b": None}]}}).encode() + b"\n" for text in texts]
    return b"".join(map(zstandard.compress, frames))


def code(texts: list[str]) -> bytes:
    """As in StarCoderData: Parquet with small row groups and a column `content` among others."""
    table = pa.table(
        {
            "max_stars_repo_path": ["a.py"] * len(texts),
            "max_stars_repo_name": ["o/n"] * len(texts),
            "max_stars_count": pa.array([None, *range(1, len(texts))], pa.int64()),
            "id": [str(number) for number in range(len(texts))],
            "content": texts,
        }
    )
    output = io.BytesIO()
    pq.write_table(table, output, row_group_size=7, compression="snappy")
    return output.getvalue()


TRAINING = {
    "dclm_baseline": {
        f"global-shard_0{shard}_of_10/local-shard_{local}_of_10/shard_0000000{shard}_processed.jsonl.zst": web_text
        for shard in (1, 2)
        for local in (0, 1)
    },
    "proofpile_2": {
        "algebraic-stack/train/agda0000.jsonl.zst": mathematics,
        "arxiv/train/arXiv_000.jsonl.zst": mathematics,
        "open-web-math/train/shard_0.jsonl.zst": mathematics,
        "arxiv/validation/arXiv_000.jsonl.zst": mathematics,
    },
    "starcoderdata": {
        "python/train-00000-of-00002.parquet": code,
        "c-sharp/train-00001-of-00002.parquet": code,
    },
}


def recipe_of(target: str) -> TokenizedRecipe:
    recipe = BOOK.load(parse_target(f"{target}/{VERSION}"))
    assert isinstance(recipe, TokenizedRecipe)
    return recipe


def without_specials(token_set: TokenizedSet) -> list[str]:
    """Documents of bytes, each between BOS 256 and EOS 257."""
    texts = []
    for shard in token_set.shards:
        ids = shard.ids.tolist()
        for start, end in zip(shard.offsets[:-1], shard.offsets[1:], strict=True):
            assert (ids[start], ids[end - 1]) == (256, 257)
            texts.append(bytes(ids[start + 1 : end - 1]).decode())
    return texts


@pytest.mark.parametrize("size", ["dclm_1b_1x", "dclm_7b_1x"])
@pytest.mark.parametrize("name", TRAINING)
def test_a_training_set_of_the_reference_is_made_of_stand_ins_in_its_format(workbench: Workbench, tmp_path, name, size):
    recipe = recipe_of(f"tokenized/llama3/{size}/{name}")
    assert isinstance(recipe.source, HuggingFaceSource)
    for path, write in TRAINING[name].items():
        (tmp_path / "hub" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hub" / path).write_bytes(write(documents(path)))
    meant = [path for path in TRAINING[name] if any(Glob(pattern).matches(path) for pattern in recipe.source.files)]
    assert len(meant) == len(TRAINING[name]) - (name == "proofpile_2")
    paths = [f"{tmp_path}/hub/{pattern}" for pattern in recipe.source.files]
    source = FilesSource(type="files", paths=paths, digest=files_digest(find(paths)))
    assert recipe.token_budget is not None
    tokens = 60 * len(documents("x" * 60)[0])  # of about two files
    changed = {
        "tokenizer": workbench.BYTES,
        "source": source,
        "token_budget": TokenBudget(tokens=tokens, seed=recipe.token_budget.seed),
    }
    context = workbench.context("tokenized/bench/dev", recipe.model_copy(update=changed), workbench.bytes_tokenizer())
    result = tokenize.build(context)
    token_set = TokenizedSet.open(context.folder)
    texts = without_specials(token_set)
    taken = [shard["source"]["file"] for shard in token_set.ledger["shards"]]
    assert len(texts) == 40 * len(taken)
    assert {text.partition(" says ")[0].rpartition("/")[2] for text in texts} == {t.rpartition("/")[2] for t in taken}
    assert all(text in documents(text.partition(" says ")[0]) for text in texts)
    assert len(set(texts)) == len(texts)
    assert result.metrics["tokens"] == token_set.tokens


def test_validation_sets_of_paloma_are_read_as_they_come(workbench: Workbench):
    recipe = recipe_of("tokenized/llama3/paloma/ptb")
    assert isinstance(recipe.source, ArtifactSource)
    lines = "".join(json.dumps({"text": text, "added": "2023"}) + "\n" for text in documents("ptb"))
    raw = workbench.raw(
        {"ptb/val/val.jsonl.gz": gzip.compress(lines.encode()), "ptb/test/test.jsonl.gz": b"x"}, recipe.source.target
    )
    changed = recipe.model_copy(update={"tokenizer": workbench.BYTES})
    context = workbench.context("tokenized/bench/dev", changed, raw, workbench.bytes_tokenizer())
    tokenize.build(context)
    assert without_specials(TokenizedSet.open(context.folder)) == documents("ptb")


def test_validation_sets_of_uncheatable_eval_are_read_as_they_come(workbench: Workbench):
    recipe = recipe_of("tokenized/llama3/uncheatable_eval/bbc_news")
    assert isinstance(recipe.source, ArtifactSource)
    files = {
        "data/bbc_news_20240601to20240615.json": json.dumps(documents("bbc"), indent=1, ensure_ascii=False).encode(),
        "data/bbc_news_20240601to20240615_dev.json": b"[]",
    }
    raw = workbench.raw(files, recipe.source.target)
    changed = recipe.model_copy(update={"tokenizer": workbench.BYTES})
    context = workbench.context("tokenized/bench/dev", changed, raw, workbench.bytes_tokenizer())
    tokenize.build(context)
    assert without_specials(TokenizedSet.open(context.folder)) == documents("bbc")


@pytest.mark.parametrize("set_name", ["paloma", "uncheatable_eval"])
def test_every_validation_set_has_a_format_that_is_read(set_name):
    targets = [target for target in BOOK.targets() if target.name.startswith(f"tokenized/llama3/{set_name}/")]
    assert len(targets) in (16, 7)
    formats = {recipe.format.type for recipe in map(BOOK.load, targets) if isinstance(recipe, TokenizedRecipe)}
    assert formats == ({"jsonl"} if set_name == "paloma" else {"json_array"})
