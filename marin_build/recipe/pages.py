"""The pages that `marin-build new` writes: complete recipes with plausible values, to read once and then to edit.

A page names what stands in the recipe folder where something fits by its name, and else what a user would make next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from marin_build.errors import RequestError
from marin_build.recipe.header import header
from marin_build.recipe.presets import preset
from marin_build.recipe.run_data import DEFAULT_VOCABULARY, likest, words
from marin_build.recipe.run_page import checkpoint_page
from marin_build.recipe.target import Target

if TYPE_CHECKING:
    from marin_build.recipe.load import RecipeBook

SPLIT_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Llama 3's."""


def page(book: RecipeBook, target: Target, model: str | None) -> str:
    """The text of a new recipe.

    Raises:
        RequestError: `model` is no preset, or given for another kind than checkpoints.
    """
    if target.kind == "checkpoints":
        return checkpoint_page(book, target, preset(model))
    if model is not None:
        raise RequestError(f"--model {model!r} is for checkpoints; {target} is of kind {target.kind}")
    return {"raw": _raw, "tokenizers": _tokenizer, "tokenized": _tokenized}[target.kind](book, target)


def _raw(book: RecipeBook, target: Target) -> str:
    note = f"Before it can be built: name your files, then `marin-build pin {target}`."
    head = header(target, "Text, stored as it was found.", "Files on this machine.", note=note)
    return f"""{head}source:
  type: files # or embedded, huggingface, github
  paths: ["texts/{words(target)[-1]}/*.jsonl"] # or globs of a store: gs://, s3://
  digest: unresolved # of the files' names and bytes

measure:
  description: ""
  tags: []
"""


def _tokenizer(book: RecipeBook, target: Target) -> str:
    raw = likest(book, target, "raw") or Target(f"raw/{words(target)[0]}", target.version)
    head = header(target, f"A byte-level BPE of {DEFAULT_VOCABULARY:,} ids.", f"{raw}.")
    return f"""{head}tokenizer:
  method: byte_level_bpe # or bytes, or adopt for a tokenizer.json that exists
  text:
    - target: {raw}
      files: ["*.jsonl"]
      format:
        type: jsonl # or text, json_array, parquet, arrow
        text_key: text
  vocabulary_size: {DEFAULT_VOCABULARY} # ids in all; small corpora want fewer
  # As in Llama 3: English contractions, words with the sign before them, numbers of up to three digits, runs of other
  # signs, line ends, spaces.
  split_regex: |-
    {SPLIT_REGEX}
  special_tokens:
    bos: <|begin_of_text|>
    eos: <|end_of_text|>
    pad: null # training packs sequences full

measure:
  description: ""
  tags: []
"""


def _tokenized(book: RecipeBook, target: Target) -> str:
    tokenizer = likest(book, target, "tokenizers")
    rest = [word for word in words(target) if not tokenizer or word not in words(tokenizer)] or words(target)
    raw = likest(book, target, "raw") or Target(f"raw/{rest[0]}", target.version)
    tokenizer = tokenizer or Target(f"tokenizers/{words(target)[0]}", target.version)
    part = rest[-1] if rest[-1] not in words(raw) else "*"
    head = header(target, "Documents as token ids.", f"{raw} with {tokenizer}.")
    return f"""{head}tokenizer: {tokenizer}
source:
  type: artifact # or files, huggingface, github
  target: {raw}
  files: ["{part}.jsonl"] # globs within the artifact; .gz and .zst are read too
format:
  type: jsonl # or text, json_array, parquet, arrow
  text_key: text
add_bos: true
add_eos: true
shard_bytes: 100000000 # of source text a shard
token_budget: null # or {{tokens: 1000000000, seed: 0}}: files in an order given by the seed, until there are this many
max_bad_documents: 0

measure:
  description: ""
  tags: []
"""
