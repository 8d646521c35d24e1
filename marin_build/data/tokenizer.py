"""Builds `tokenizers/…`: trained on text, made of the 256 bytes, or adopted from an existing tokenizer.json.

The folder holds `tokenizer.json` and `tokenizer_config.json` in the form that `transformers.AutoTokenizer` loads. Every
tokenizer has dense ids, and special tokens by role. Which of them a document gets is said by the recipe of a token set.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from marin_build.artifact.context import Adopted, BuildContext, BuildResult
from marin_build.artifact.strict_json import parse_object
from marin_build.data.adoption import adopted_files
from marin_build.data.bpe import train
from marin_build.data.chat_template import load_chat_template, make_chat_template
from marin_build.data.durable import json_bytes, write_whole
from marin_build.data.encoder import byte_characters
from marin_build.data.vocabulary import (
    CHAT_TEMPLATE,
    CONFIG,
    ROLES,
    TOKENIZER,
    LoadedTokenizer,
    all_tokens,
    check_vocabulary,
    load_tokenizer,
    read_small,
    special_ids,
    spelling,
)
from marin_build.errors import RequestError
from marin_build.foreign import shortened
from marin_build.recipe.schema import AdoptedTokenizer, BytesTokenizer, SpecialTokens, TokenizerRecipe

__all__ = ["LoadedTokenizer", "build", "load_tokenizer"]

PROGRAMS = (".py", ".pyc", ".so", ".pkl", ".pickle", ".joblib", ".pt", ".pth", ".ckpt", ".bin", ".npy", ".npz")
RUNS_CODE = ("auto_map", "trust_remote_code")
NAMES_FILES = ("tokenizer_file", "vocab_file", "merges_file")
"""Keys of a configuration that make a loader read other files than those beside it."""
FAST_CLASS = "PreTrainedTokenizerFast"
"""The class that does what tokenizer.json says; others rebuild parts of it by rules of their own."""
NEW_CONFIG = {"clean_up_tokenization_spaces": False, "model_max_length": 10**30}
"""Decoding gives back the text as it was, and no length is too long: that is for the model to say."""


def build(context: BuildContext) -> BuildResult:
    """Write the tokenizer into `context.folder`.

    Raises:
        RequestError: unusable text, a vocabulary size that cannot be had, or an adopted file that cannot be trusted.
        Stopped: a signal came.
        MarinError: the hub cannot be reached, or the disk is full or fails.
    """
    recipe = context.recipe
    assert isinstance(recipe, TokenizerRecipe)
    wanted = recipe.tokenizer
    metrics: dict[str, float | int] = {}
    if isinstance(wanted, AdoptedTokenizer):
        files = _adopt(context, wanted)
    else:
        tokenizer = bytes_tokenizer() if isinstance(wanted, BytesTokenizer) else train(context, wanted, metrics)
        add_special_tokens(tokenizer, wanted.special_tokens, f"{context.target}: tokenizer.special_tokens")
        config = with_roles(NEW_CONFIG, wanted.special_tokens)
        files = {TOKENIZER: tokenizer.to_str(pretty=True).encode(), CONFIG: json_bytes(config, indent=2)}
    context.check_lease()
    for name, data in files.items():
        write_whole(context.folder / name, data)
    loaded = load_tokenizer(context.folder)
    context.logger.info(f"{loaded.vocab_size:,} ids, bos {loaded.bos_id}, eos {loaded.eos_id}, pad {loaded.pad_id}")
    return BuildResult(metrics={"vocabulary_size": loaded.vocab_size, **metrics}, made=tuple(files))


# ---- made here -------------------------------------------------------------------------------------------------------


def bytes_tokenizer() -> Tokenizer:
    """One id a byte, equal to it; special tokens are still to be added."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def add_special_tokens(tokenizer: Tokenizer, roles: SpecialTokens, field: str) -> None:
    """Add the special tokens after all others, in the order bos, eos, pad."""
    for role in ROLES:
        token = getattr(roles, role)
        if token is None:
            continue
        if tokenizer.token_to_id(token) is not None:
            raise RequestError(
                f"{field}.{role} {token!r} is an ordinary token already; choose another, like <|{role}|>"
            )
        tokenizer.add_special_tokens([token])


def with_roles(config: dict[str, Any], roles: SpecialTokens) -> dict[str, Any]:
    """A tokenizer_config.json with these roles; what else it says stays."""
    named = {f"{role}_token": getattr(roles, role) for role in ROLES}
    changed = {key: token for key, token in named.items() if spelling(config.get(key)) != token}
    return {**config, **changed, "tokenizer_class": FAST_CLASS}


# ---- adopted ---------------------------------------------------------------------------------------------------------


def _adopt(context: BuildContext, wanted: AdoptedTokenizer) -> dict[str, bytes]:
    """tokenizer.json byte for byte, its configuration with the roles of the recipe, and its chat template."""
    found = adopted_files(context, wanted.source)
    where = f"{context.target}: {found.get(TOKENIZER, Path(TOKENIZER))}"
    if TOKENIZER not in found:
        raise RequestError(f"{where} is not among the files of tokenizer.source: {', '.join(sorted(found)) or 'none'}")
    _refuse_programs(context, found)
    data = _read(context, found[TOKENIZER])
    specification = check_vocabulary(data, wanted.vocabulary_size, wanted.special_tokens, where)
    if specification.get("normalizer"):
        context.logger.warning(f"{where} normalizes text, so decoding may not give back every document byte for byte")
    files = {TOKENIZER: data, CONFIG: _adopted_config(context, found.get(CONFIG), wanted.special_tokens)}
    if CHAT_TEMPLATE in found:
        files[CHAT_TEMPLATE] = _read(context, found[CHAT_TEMPLATE])
    _check_tokens(specification, wanted, where)
    if wanted.chat_data:
        make_chat_template(specification, parse_object(files[CONFIG]), files.get(CHAT_TEMPLATE), where)
    unused = sorted(found.keys() - files.keys())
    if unused:
        context.logger.info(f"not used: {', '.join(unused)}")
    return files


def _check_tokens(specification: dict[str, Any], wanted: AdoptedTokenizer, where: str) -> None:
    """Refuse a tokenizer that has not the special tokens that the recipe counts on."""
    ids = special_ids(specification)
    tokens = all_tokens(specification)
    for token, number in wanted.token_ids.items():
        if ids.get(token) != number:
            raise RequestError(
                f"{where}: id {number} is {tokens.get(number)!r}, and tokenizer.token_ids says that it is the "
                f"special token {token!r}\n  it is another tokenizer, or another revision of it"
            )


def _refuse_programs(context: BuildContext, found: Mapping[str, Path]) -> None:
    """Files that run when they are loaded have no place beside a tokenizer, used or not."""
    for name in sorted(found):
        if name.lower().endswith(PROGRAMS):
            raise RequestError(
                f"{context.target}: tokenizer.source holds {name!a}, which can run code when it is loaded\n"
                f"  narrow the files of the source to {TOKENIZER} and {CONFIG}"
            )


def _read(context: BuildContext, path: Path) -> bytes:
    try:
        return read_small(path)
    except OSError as error:
        raise RequestError(f"{context.target}: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise RequestError(f"{context.target}: {path} is not usable: {error}") from None


def _adopted_config(context: BuildContext, path: Path | None, roles: SpecialTokens) -> bytes:
    """The configuration as it is where it agrees with the recipe; else with the roles and class changed."""
    data = _read(context, path) if path else b"{}"
    try:
        config = parse_object(data)
    except ValueError as error:
        raise RequestError(f"{context.target}: {path} is not JSON: {error}") from None
    for key in RUNS_CODE:
        if config.get(key):
            raise RequestError(
                f"{context.target}: {path} has {key} {shortened(ascii(config[key]), 100)}: "
                "whoever loads this tokenizer would run code from elsewhere\n"
                f"  copy the files, remove {key}, and name the copies in a source of type files"
            )
    changed = with_roles({key: value for key, value in config.items() if key not in NAMES_FILES}, roles)
    return data if path and changed == config else json_bytes(changed, indent=2)


# ---- lying somewhere already -----------------------------------------------------------------------------------------


def check_adopted(adopted: Adopted) -> BuildResult:
    """A tokenizer that loads, with the vocabulary and the special tokens of the recipe."""
    recipe = adopted.recipe
    assert isinstance(recipe, TokenizerRecipe)
    loaded = load_tokenizer(adopted.folder)
    wanted, where = recipe.tokenizer, f"{adopted.target}: {adopted.place}/{TOKENIZER}"
    specification = check_vocabulary(
        read_small(adopted.folder / TOKENIZER), wanted.vocabulary_size, wanted.special_tokens, where
    )
    if isinstance(wanted, AdoptedTokenizer):
        _check_tokens(specification, wanted, where)
        if wanted.chat_data:
            load_chat_template(adopted.folder, where)
    ids = special_ids(specification)
    for role in ROLES:
        token, number = getattr(wanted.special_tokens, role), getattr(loaded, f"{role}_id")
        if (ids[token] if token else None) != number:
            raise adopted.refused(f"{CONFIG} names another {role} token than special_tokens.{role} {token!r}")
    return BuildResult(metrics={"vocabulary_size": loaded.vocab_size})
