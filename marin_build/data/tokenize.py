"""Builds `tokenized/…`: documents as token ids in Arrow shards, the same bytes however the work was cut or interrupted.

The order of the work is the order of the source files, or of their keyed hashes where a token budget says how many of
them are needed. A shard is committed when it is ready and kept for the next attempt; the ledger comes last.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from marin_build.artifact.context import Adopted, BuildContext, BuildResult, Dependency
from marin_build.artifact.digest import hash_bytes
from marin_build.artifact.store import TEMPORARY
from marin_build.data.cache_adoption import check_cache
from marin_build.data.chat_template import load_chat_template, template_digest, template_files
from marin_build.data.crew import cores, make_crew
from marin_build.data.documents import can_be_cut
from marin_build.data.donors import Donors
from marin_build.data.durable import json_bytes, remove
from marin_build.data.encoder import ByteEncoder
from marin_build.data.encoder_check import may_be_fast, recorded_bytes
from marin_build.data.foreman import Foreman, Piece
from marin_build.data.ledger import DATASET_INFO, STATE, Policy, names_of, shard_stem, write_ledger
from marin_build.data.part import Assignment
from marin_build.data.progress import Progress
from marin_build.data.reading import check_format, is_compressed
from marin_build.data.shards import LEDGER, TokenizedSet
from marin_build.data.sources import SourceFile, source_files
from marin_build.data.vocabulary import CHAT_TEMPLATE, CONFIG, TOKENIZER, LoadedTokenizer, load_tokenizer
from marin_build.errors import DamageError, RequestError
from marin_build.recipe.schema import TokenizedRecipe
from marin_build.recipe.sources import Chat

MAX_SHARD_BYTES = 128_000_000
"""What a killed worker loses is at most this. A text has at most about as many ids as bytes, so no shard holds more
than about 128 M of them."""

MAX_SHARDS = 50_000
"""Reading maps every shard into memory, and Linux gives a process 65,530 mappings."""
BYTES_WORTH_A_PROCESS = 2 << 20
"""Starting a process takes about as long as encoding this much text."""


def build(context: BuildContext) -> BuildResult:
    """Make or complete the token set in `context.folder`.

    Raises:
        RequestError: an unusable source, too many unusable documents, or a policy that the tokenizer cannot serve.
        DamageError: a dependency is not what its record says.
        Stopped: a signal came; finished shards are kept.
        MarinError: the disk is full or fails, or a worker died.
    """
    recipe = context.recipe
    assert isinstance(recipe, TokenizedRecipe)
    tokenizer = choose_encoder(context, recipe)
    assignment = make_assignment(context, recipe, tokenizer)
    files = files_in_order(context, recipe)
    if not recipe.token_budget:
        _check_count(context, sum(_ranges(file, assignment.policy) for file in files))
    sweep_unfinished(context.folder)
    crew = make_crew(assignment, crew_size(context, files, assignment.policy))
    try:
        with Progress(context.logger, "tokenizing", sum(f.bytes for f in files), _budget(recipe)) as progress:
            donors = Donors(context, assignment.policy, recipe, context.target)
            pieces = [Piece(file) for file in files]
            foreman = Foreman(context, assignment, pieces, crew, progress, donors=donors, budget=_budget(recipe))
            foreman.run()
    finally:
        crew.close()
    return _finish(context, recipe, tokenizer, files, foreman)


def choose_encoder(context: BuildContext, recipe: TokenizedRecipe) -> LoadedTokenizer:
    """The tokenizer with the fast encoder, where a check of this very tokenizer allows it; says which it is."""
    dependency = context.dependencies[recipe.tokenizer]
    digest = hash_bytes(recorded_bytes(dependency, TOKENIZER))
    fast, why = may_be_fast(context.dependencies, recipe.tokenizer, digest)
    loaded = open_tokenizer(dependency, fast)
    kind = loaded.encoder_kind
    context.logger.info(f"encoding with {kind.name} {kind.version}" + ("" if kind is ByteEncoder else f": {why}"))
    return loaded


def open_tokenizer(dependency: Dependency, fast: bool = False) -> LoadedTokenizer:
    recorded_bytes(dependency, TOKENIZER)  # is what its record says
    return load_tokenizer(dependency.folder, fast)


def make_assignment(context: BuildContext, recipe: TokenizedRecipe, tokenizer: LoadedTokenizer) -> Assignment:
    if recipe.shard_bytes > MAX_SHARD_BYTES:
        raise RequestError(
            f"{context.target}: shard_bytes {recipe.shard_bytes:,} is too large; at most {MAX_SHARD_BYTES:,}"
        )
    policy = Policy(
        tokenizer_digest=tokenizer.digest,
        vocabulary_size=tokenizer.vocab_size,
        bos_id=_special(context, recipe, "bos", tokenizer.bos_id) if recipe.add_bos else None,
        eos_id=_special(context, recipe, "eos", tokenizer.eos_id) if recipe.add_eos else None,
        format=recipe.format,
        shard_bytes=recipe.shard_bytes,
        split=recipe.split,
        template_digest=_template_digest(context, recipe),
    )
    return Assignment(str(context.target), context.folder, tokenizer, policy, recipe.max_bad_documents)


def _template_digest(context: BuildContext, recipe: TokenizedRecipe) -> str | None:
    """Digest of the chat template where documents are conversations, once it is seen to be usable and as recorded."""
    if not isinstance(recipe.format, Chat):
        return None
    dependency = context.dependencies[recipe.tokenizer]
    recorded = {entry["path"]: entry["xxh3_128"] for entry in dependency.record["files"]}
    files = template_files(dependency.folder)
    for name in {*files, *({CONFIG, CHAT_TEMPLATE} & recorded.keys())}:
        if recorded.get(name) != files.get(name):
            raise DamageError(
                f"{dependency.target} is damaged: {name} is not what its record says: "
                f"expected {recorded.get(name)}, seen {files.get(name)}\n  snakemake {dependency.target}"
            )
    load_chat_template(dependency.folder, recipe.tokenizer)
    return template_digest(files)


def _special(context: BuildContext, recipe: TokenizedRecipe, role: str, number: int | None) -> int:
    if number is None:
        raise RequestError(
            f"{context.target}: add_{role} is true, but {recipe.tokenizer} has no {role} token\n"
            f"  write add_{role}: false, or name one in special_tokens.{role} of a version of the tokenizer"
        )
    return number


def _budget(recipe: TokenizedRecipe) -> int | None:
    return recipe.token_budget.tokens if recipe.token_budget else None


def files_in_order(context: BuildContext, recipe: TokenizedRecipe) -> list[SourceFile]:
    """The order of the recipe, or with a budget that of a keyed hash of each name: adding a file moves no other."""
    return ordered(source_files(context, recipe.source), recipe)


def ordered(files: list[SourceFile], recipe: TokenizedRecipe) -> list[SourceFile]:
    """The files as they are taken, once each is known to be of the format."""
    budget = recipe.token_budget
    for file in files:
        check_format(file.name, recipe.format)
    if budget is None:
        return files
    return sorted(files, key=lambda file: (hash_bytes(json_bytes([budget.seed, file.name])), file.name))


def _ranges(file: SourceFile, policy: Policy) -> int:
    """In how many ranges a file is worked on: at least as many shards come of it."""
    if is_compressed(file.name) or not can_be_cut(policy.format):
        return 1
    return -(-file.bytes // policy.shard_bytes)


def _check_count(context: BuildContext, shards: int) -> None:
    if shards > MAX_SHARDS:
        raise RequestError(
            f"{context.target}: {shards:,} shards are too many; at most {MAX_SHARDS:,}: "
            "every source file and every shard_bytes of it makes one\n  join small files, or raise shard_bytes"
        )


def crew_size(context: BuildContext, files: list[SourceFile], policy: Policy) -> int:
    """Processes: as many as the settings say, but no more than there are ranges, and none for a small text alone."""
    ranges = sum(_ranges(file, policy) for file in files)
    worth = -(-sum(file.bytes for file in files) // BYTES_WORTH_A_PROCESS)
    return max(1, min(context.settings.processes or cores(), ranges, worth))


# ---- before and after ------------------------------------------------------------------------------------------------


def sweep_unfinished(folder: Path) -> None:
    """Remove what a killed attempt was writing, and the ledger: the set is not complete until it is written again."""
    for path in folder.glob(f"*{TEMPORARY}"):
        remove(path)
    remove(folder / LEDGER)


def sweep_unneeded(folder: Path, files: list[SourceFile], sidecars: list[dict[str, Any]]) -> None:
    """Remove shards of these files that are not in the set: workers run ahead of a token budget."""
    needed = {name for sidecar in sidecars for name in names_of(sidecar)}
    stems = {shard_stem(file.name) for file in files}
    for path in [*folder.glob("*.arrow"), *folder.glob("*.json"), *folder.glob(f"*{TEMPORARY}")]:
        if path.name not in needed and path.name.rpartition("-")[0] in stems:
            remove(path)


def _finish(
    context: BuildContext,
    recipe: TokenizedRecipe,
    tokenizer: LoadedTokenizer,
    files: list[SourceFile],
    foreman: Foreman,
) -> BuildResult:
    if recipe.token_budget and not foreman.budget_met:
        context.logger.warning(
            f"{context.target}: all {len(files):,} source files hold {foreman.tokens:,} tokens, "
            f"less than the token_budget of {recipe.token_budget.tokens:,}"
        )
    if not any(sidecar["documents"] for sidecar in foreman.sidecars):
        raise RequestError(f"{context.target}: the source has no document with text ({len(files):,} files)")
    _check_count(context, len(foreman.sidecars))
    context.check_lease()
    sweep_unneeded(context.folder, files, foreman.sidecars)
    ledger = write_ledger(
        context.folder, foreman.sidecars, foreman.content.hexdigest(), _facts(recipe, tokenizer, files, foreman)
    )
    totals = ledger["totals"]
    context.logger.info(
        f"{totals['tokens']:,} tokens in {totals['documents']:,} documents, "
        f"{totals['text_bytes'] / totals['tokens']:.3f} bytes a token; "
        f"shards: {foreman.made} made, {foreman.kept} kept, {foreman.shared} taken over"
    )
    encoder = {"name": tokenizer.encoder_kind.name, "version": tokenizer.encoder_kind.version}
    details = {
        "encoder": encoder,
        "processes": foreman.processes,
        "shards_made": foreman.made,
        "shards_kept": foreman.kept,
        "shards_taken_over": foreman.shared,
    }
    shards = [name for sidecar in foreman.sidecars for name in names_of(sidecar)]
    made = (*shards, LEDGER, STATE, DATASET_INFO)
    return BuildResult(metrics=_metrics(ledger), made=made, details=details)


def _facts(
    recipe: TokenizedRecipe, tokenizer: LoadedTokenizer, files: list[SourceFile], foreman: Foreman
) -> dict[str, Any]:
    """What the ledger says besides the shards."""
    taken = files[: foreman.pieces_taken]
    budget = recipe.token_budget
    return {
        "tokenizer": tokenizer.facts(recipe.tokenizer),
        "policy": foreman.policy.to_dict() | {"max_bad_documents": recipe.max_bad_documents},
        "source": {"files": len(taken), "bytes": sum(f.bytes for f in taken), "files_available": len(files)},
        "token_budget": budget.model_dump() | {"met": foreman.budget_met} if budget else None,
    }


def _metrics(ledger: dict[str, Any]) -> dict[str, float | int]:
    totals = ledger["totals"]
    return {
        "tokens": totals["tokens"],
        "documents": totals["documents"],
        "shards": len(ledger["shards"]),
        **_mask_metrics(totals),
        "text_bytes": totals["text_bytes"],
        "bytes_per_token": totals["text_bytes"] / totals["tokens"],
        **{f"skipped/{reason}": count for reason, count in ledger["skipped"].items()},
    }


def _mask_metrics(totals: dict[str, int]) -> dict[str, float | int]:
    """How many tokens are trained on, and what share of all that is; nothing where all are."""
    if "trained_tokens" not in totals:
        return {}
    return {
        "trained_tokens": totals["trained_tokens"],
        "loss_mask_fraction": totals["trained_tokens"] / totals["tokens"],
    }


# ---- lying somewhere already -----------------------------------------------------------------------------------------


def check_adopted(adopted: Adopted) -> BuildResult:
    """A token set with its ledger, of the tokenizer and the policy of the recipe, whose shards open; or without one a
    cache of others."""
    recipe = adopted.recipe
    assert isinstance(recipe, TokenizedRecipe)
    tokenizer = adopted.dependencies[recipe.tokenizer]
    if LEDGER not in adopted.files:
        dependency = Dependency(tokenizer.target, adopted.fetch(tokenizer), tokenizer.to_dict())
        return check_cache(adopted, open_tokenizer(dependency))
    token_set = TokenizedSet.open(adopted.folder)
    ledger = token_set.ledger
    used = {entry["path"]: entry["xxh3_128"] for entry in tokenizer.files}
    policy = ledger.get("policy", {})
    seen = {
        "tokenizer": ledger["tokenizer"].get("xxh3_128"),
        "add_bos": policy.get("bos_id") is not None,
        "add_eos": policy.get("eos_id") is not None,
        "format": policy.get("format"),
        "chat template": policy.get("template_digest"),
        "shard_bytes": policy.get("shard_bytes"),
        "split": policy.get("split"),
        "token_budget": {k: v for k, v in (ledger.get("token_budget") or {}).items() if k != "met"} or None,
    }
    wanted = {
        "tokenizer": used.get(TOKENIZER),
        "add_bos": recipe.add_bos,
        "add_eos": recipe.add_eos,
        "format": recipe.format.model_dump(exclude_defaults=True),
        "chat template": template_digest(used) if isinstance(recipe.format, Chat) else None,
        "shard_bytes": recipe.shard_bytes,
        "split": recipe.split.model_dump() if recipe.split else None,
        "token_budget": recipe.token_budget.model_dump() if recipe.token_budget else None,
    }
    for field, value in wanted.items():
        if seen[field] != value:
            raise adopted.refused(f"{field} of its recipe is {value}, its {LEDGER} says {seen[field]}")
    for shard in token_set.shards:
        if (shard.loss_mask is not None) != isinstance(recipe.format, Chat):  # opens it and compares it with the ledger
            raise adopted.refused(
                f"{shard.path.name} has a loss mask or none, against format.type {recipe.format.type}"
            )
    return BuildResult(metrics=_metrics(ledger))
