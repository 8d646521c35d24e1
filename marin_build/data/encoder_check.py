"""Builds `checks/encoder/…`: whether the fast encoder gives the ids of the reference for a tokenizer, and reads it.

The folder holds `parity.json`: the versions of both, how much was compared, and what differed first. A token set is
made with the fast encoder only after such a check of the very same tokenizer.json and library said `equal`. Since the
ids are the same then, the check is no part of what the set is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from marin_build.artifact.context import BuildContext, BuildResult, Dependency
from marin_build.artifact.digest import hash_bytes
from marin_build.artifact.strict_json import parse_object
from marin_build.data.durable import json_bytes, write_whole
from marin_build.data.encoder import FAST, REFERENCE, FastEncoder
from marin_build.data.parity import parity
from marin_build.data.sources import CORPORA
from marin_build.data.vocabulary import TOKENIZER, read_small
from marin_build.errors import DamageError
from marin_build.recipe.derived import check_target
from marin_build.recipe.schema import EncoderCheckRecipe
from marin_build.recipe.target import parse_target

RESULT = "parity.json"
SAMPLE, SAMPLE_CHARACTERS = CORPORA / "quickstart/train.jsonl", 200_000


def build(context: BuildContext) -> BuildResult:
    """Compare the encoders and write what came of it; another id is a result, no failure.

    Raises:
        DamageError: the tokenizer is not what its record says.
    """
    recipe = context.recipe
    assert isinstance(recipe, EncoderCheckRecipe)
    tokenizer = context.dependencies[recipe.of]
    data = recorded_bytes(tokenizer, TOKENIZER)
    try:
        result = parity(data, sample())
    except ValueError as error:
        raise DamageError(f"{recipe.of} cannot be loaded: {error}\n  snakemake {recipe.of}") from None
    context.logger.info(in_words(result.to_dict()))
    context.check_lease()
    facts = {"encoder": FAST if result.equal else REFERENCE, **result.to_dict()}
    facts["tokenizer"] = {"target": recipe.of, "xxh3_128": hash_bytes(data)}
    write_whole(context.folder / RESULT, json_bytes(facts, indent=2))
    metrics = {"equal": int(result.equal), "texts": result.texts, "characters": result.characters}
    return BuildResult(metrics=metrics, made=(RESULT,))


def sample() -> list[str]:
    """Real text: the beginning of the corpus that is shipped."""
    texts, characters = [], 0
    with SAMPLE.open(encoding="utf-8") as lines:
        for line in lines:
            texts.append(json.loads(line)["text"])
            characters += len(texts[-1])
            if characters >= SAMPLE_CHARACTERS:
                break
    return texts


def may_be_fast(dependencies: Mapping[str, Dependency], tokenizer: str, digest: str) -> tuple[bool, str]:
    """Whether a check among the dependencies allows the fast encoder for a tokenizer.json of this digest, and why."""
    check = dependencies.get(str(check_target(parse_target(tokenizer))))
    if check is None:
        return False, "no check of the fast encoder was asked for"
    facts = parse_object(recorded_bytes(check, RESULT))
    if facts["tokenizer"]["xxh3_128"] != digest or facts["fastokens"] != FastEncoder.version:
        return False, f"{check.target} is of another tokenizer or library"
    return facts["equal"] is True, in_words(facts)


def in_words(facts: Mapping[str, Any]) -> str:
    library = f"{FAST} {facts['fastokens']}"
    if facts["equal"]:
        return f"{library} gives the ids of {REFERENCE} {facts['tokenizers']} for {facts['characters']:,} characters"
    if facts["refused"]:
        return f"{library} is not used: {facts['refused']}"
    return f"{library} is not used, it gives other ids: {facts['difference']}"


def recorded_bytes(dependency: Dependency, name: str) -> bytes:
    """A small file of a finished artifact.

    Raises:
        DamageError: it is not what the record says.
    """
    recorded = {entry["path"]: entry["xxh3_128"] for entry in dependency.record["files"]}.get(name)
    try:
        data = read_small(dependency.folder / name)
    except (OSError, ValueError) as error:
        raise DamageError(f"{dependency.target} is damaged: {name}: {error}\n  snakemake {dependency.target}") from None
    if hash_bytes(data) != recorded:
        raise DamageError(
            f"{dependency.target} is damaged: {name} is not what its record says: "
            f"expected {recorded}, seen {hash_bytes(data)}\n  snakemake {dependency.target}"
        )
    return data
