"""Builds `parts/…`: a share of the work on a token set, which the build of the set takes over.

The files of a source, and the buckets of its large plain files, are dealt out one by one: part k of N gets every N-th,
from k on. All parts find the same list by themselves, and none needs to know how far the others are.

With a token budget nobody knows beforehand how many files it takes. A part begins a file as long as those before it
cannot be expected to hold the budget, by what it has seen of tokens a byte. A wrong guess costs work, never truth: the
build of the set takes as many files as the budget needs, and makes what is missing itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from marin_build.artifact.context import BuildContext, BuildResult
from marin_build.data.crew import make_crew
from marin_build.data.donors import SHARE, Donors
from marin_build.data.durable import json_bytes, write_whole
from marin_build.data.foreman import Foreman, Piece
from marin_build.data.ledger import Policy, names_of
from marin_build.data.progress import Progress
from marin_build.data.reading import is_compressed
from marin_build.data.shards import FORMAT
from marin_build.data.sources import SourceFile, hashed, unhashed_files
from marin_build.data.tokenize import (
    choose_encoder,
    crew_size,
    files_in_order,
    make_assignment,
    ordered,
    sweep_unfinished,
    sweep_unneeded,
)
from marin_build.data.workshop import buckets
from marin_build.errors import DamageError, RequestError
from marin_build.recipe.schema import PartRecipe, TokenBudget, TokenizedRecipe
from marin_build.recipe.sources import FilesSource
from marin_build.recipe.target import parse_target

FEWEST_TOKENS_A_BYTE = {False: 0.15, True: 0.4}
"""Of plain and of compressed source files, before a part has seen any: rather too few, so that no file is missing."""
MARGIN = 1.05
"""So much more than the budget the files before one have to hold before it is left out."""


def build(context: BuildContext) -> BuildResult:
    """Make or complete a share of the shards in `context.folder`.

    Raises:
        RequestError: an unusable source, or too many unusable documents in this share alone, without a token budget.
        DamageError: a dependency is not what its record says.
        Stopped: a signal came; finished shards are kept.
        MarinError: the disk is full or fails, or a worker died.
    """
    part = context.recipe
    assert isinstance(part, PartRecipe)
    recipe = part.set
    assignment = make_assignment(context, recipe, choose_encoder(context, recipe))
    policy = assignment.policy
    files = _files(context, recipe)
    pieces = _hashed(_all_pieces(files, policy)[part.part :: part.parts])
    sweep_unfinished(context.folder)
    donors = Donors(context, policy, recipe, parse_target(part.of))
    crew = make_crew(assignment, crew_size(context, [piece.file for piece in pieces], policy))
    try:
        with Progress(context.logger, "tokenizing", sum(_size(piece, policy) for piece in pieces)) as progress:
            is_needed = _is_needed(files, pieces, policy, recipe.token_budget)
            foreman = Foreman(context, assignment, pieces, crew, progress, donors=donors, is_needed=is_needed)
            _run(context, recipe, foreman)
    finally:
        crew.close()
    return _finish(context, pieces, foreman)


def _run(context: BuildContext, recipe: TokenizedRecipe, foreman: Foreman) -> None:
    """Make the share; with a budget up to a source file that cannot be used, since the set may not need that one."""
    try:
        foreman.run()
    except (RequestError, DamageError) as error:
        if recipe.token_budget is None:
            raise
        context.logger.warning(f"the rest of this share is left to the build of the set, if that needs it: {error}")


def _files(context: BuildContext, recipe: TokenizedRecipe) -> list[SourceFile]:
    """All files in their order. The user's own are not hashed yet: that would be each file as often as there are parts.

    The build of the set compares them with the digest of the recipe, and takes over only what was made from those.
    """
    if isinstance(recipe.source, FilesSource):
        return ordered(unhashed_files(recipe.source), recipe)
    return files_in_order(context, recipe)


def _hashed(pieces: Sequence[Piece]) -> list[Piece]:
    known = {piece.file.name: piece.file for piece in pieces}
    known = {name: hashed(file) for name, file in known.items()}
    return [Piece(known[piece.file.name], piece.bucket) for piece in pieces]


def _all_pieces(files: Sequence[SourceFile], policy: Policy) -> list[Piece]:
    """All pieces of the work, in their order."""
    found = []
    for file in files:
        count = buckets(file, policy)
        found += [Piece(file, bucket if count > 1 else None) for bucket in range(count)]
    return found


def _size(piece: Piece, policy: Policy) -> int:
    """Source bytes, roughly."""
    return piece.file.bytes if piece.bucket is None else policy.shard_bytes


def _is_needed(
    files: Sequence[SourceFile], pieces: Sequence[Piece], policy: Policy, budget: TokenBudget | None
) -> Callable[[int, Foreman], bool]:
    """Whether the budget can be expected to need a piece, by its number and by what has been made so far."""
    ends = accumulate(file.bytes for file in files)
    bytes_before = {file.name: end - file.bytes for file, end in zip(files, ends, strict=True)}
    bytes_done = list(accumulate((_size(piece, policy) for piece in pieces), initial=0))

    def is_needed(number: int, foreman: Foreman) -> bool:
        if budget is None:
            return True
        seen, name = bytes_done[foreman.pieces_taken], pieces[number].file.name
        tokens_a_byte = foreman.tokens / seen if foreman.tokens else FEWEST_TOKENS_A_BYTE[is_compressed(name)]
        return tokens_a_byte * bytes_before[name] < budget.tokens * MARGIN

    return is_needed


def _finish(context: BuildContext, pieces: Sequence[Piece], foreman: Foreman) -> BuildResult:
    digests = {piece.file.name: piece.file.digest for piece in pieces}
    share = {
        "format": FORMAT,
        "shards": foreman.sidecars,
        "surveys": [{"file": n, "xxh3_128": digests[n], "ranges": ranges} for n, ranges in foreman.surveys.items()],
    }
    context.check_lease()
    sweep_unneeded(context.folder, [piece.file for piece in pieces], foreman.sidecars)
    write_whole(context.folder / SHARE, json_bytes(share))
    made = [name for sidecar in foreman.sidecars for name in names_of(sidecar)]
    context.logger.info(
        f"{foreman.tokens:,} tokens; shards: {foreman.made} made, {foreman.kept} kept, {foreman.shared} taken over"
    )
    return BuildResult(metrics={"tokens": foreman.tokens, "shards": len(foreman.sidecars)}, made=(*made, SHARE))
