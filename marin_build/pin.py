"""Pinning a source: the digest of its files, or the commit of its repository, written into the recipe.

A build reads pinned bytes only. Files are hashed here and again by each build; a commit names its content, so it is
only looked up, and with it, where the recipe names a split of a data set, the files of that. Nothing but these values
changes in the recipe.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

from marin_build.errors import MarinError, RequestError
from marin_build.recipe.derived import refuse_derived
from marin_build.recipe.document import Path, dotted
from marin_build.recipe.edit import replace_value, spell_out
from marin_build.recipe.fields import UNRESOLVED
from marin_build.recipe.load import RecipeBook
from marin_build.recipe.schema import AdoptedTokenizer, RawRecipe, Recipe, TokenizedRecipe, TokenizerRecipe
from marin_build.recipe.sources import EmbeddedSource, FilesSource, GitHubSource, HuggingFaceSource
from marin_build.recipe.target import Target

Pinned = EmbeddedSource | FilesSource | HuggingFaceSource | GitHubSource

NETWORK_SECONDS = 60
_COMMIT = re.compile(r"[0-9a-f]{7,40}")


def pin(book: RecipeBook, target: Target, revision: str | None = None) -> str:
    """Pin the source of `target` and return a line that says what was written.

    Files get their digest. A repository gets `revision`, a commit, branch or tag, or else its newest commit.

    Raises:
        RequestError: there is no source to pin, it is pinned already, or there is no such file, repository or revision.
        MarinError: the hub cannot be reached.
    """
    refuse_derived(target, "pin")
    path, source = next(_sources(book.load(target)), (None, None))
    if path is None or source is None:
        raise RequestError(f"{book.shown(target)}: has no source to pin; it is made from other artifacts")
    if isinstance(source, EmbeddedSource | FilesSource):
        path, old, new = (*path, "digest"), source.digest, _digest(book, target, source, revision)
    else:
        if isinstance(source, HuggingFaceSource) and UNRESOLVED in source.files:
            return _pin_split(book, target, path, source, revision)
        path, old, new = (*path, "revision"), source.revision, _commit(book, target, source, revision)
    if new == old:
        return f"{book.shown(target)}: {dotted(path)} is {old} already"
    replace_value(book, target, path, new)
    return f"{book.shown(target)}: {dotted(path)}: {old} → {new}"


def _pin_split(book: RecipeBook, target: Target, path: Path, source: HuggingFaceSource, revision: str | None) -> str:
    """Write the commit, unless it is there, and the files that the data set says its split has at that commit."""
    is_pinned = revision is None and source.revision != UNRESOLVED
    commit = source.revision if is_pinned else _commit(book, target, source, revision)
    files = _files_of_split(source, commit)
    if commit != source.revision:
        replace_value(book, target, (*path, "revision"), commit)
    spell_out(book, target, (*path, "files", source.files.index(UNRESOLVED)), files)
    return (
        f"{book.shown(target)}: {dotted((*path, 'revision'))}: {source.revision} → {commit}, "
        f"{dotted((*path, 'files'))}: the {len(files):,} files of split {source.split}"
    )


def _files_of_split(source: HuggingFaceSource, commit: str) -> list[str]:
    import datasets

    front = f"hf://datasets/{source.id}@"
    try:
        builder = datasets.load_dataset_builder(source.id, source.config, revision=commit)
        splits = builder.config.data_files or {}
    except (OSError, ValueError, RuntimeError) as error:  # what it raises for no access, no such config, no script
        reason = str(error).strip().partition("\n")[0]
        raise MarinError(
            f"the files of {source.id} at {commit} cannot be looked up through datasets: {reason}\n"
            "  name them yourself: files: [paths or globs within the repository]"
        ) from error
    if source.split not in splits:
        raise RequestError(
            f"{source.id} at {commit} has no split {source.split!r}; it has: {', '.join(map(str, splits)) or 'none'}"
        )
    places = [str(place) for place in splits[source.split]]
    if elsewhere := [place for place in places if not place.startswith(front)]:
        raise RequestError(f"split {source.split!r} of {source.id} has files elsewhere, the first: {elsewhere[0]}")
    return [place.removeprefix(front).partition("/")[2] for place in places]


def _sources(recipe: Recipe) -> Iterator[tuple[Path, Pinned]]:
    if isinstance(recipe, TokenizerRecipe) and isinstance(recipe.tokenizer, AdoptedTokenizer):
        yield ("tokenizer", "source"), recipe.tokenizer.source
    if isinstance(recipe, RawRecipe | TokenizedRecipe) and isinstance(recipe.source, Pinned):
        yield ("source",), recipe.source


def _digest(book: RecipeBook, target: Target, source: EmbeddedSource | FilesSource, revision: str | None) -> str:
    from marin_build.data.sources import embedded, files_digest, find

    if revision is not None:
        raise RequestError(
            f"{book.shown(target)}: --revision {revision!r} is for repositories; the source is of type {source.type}, "
            "which is pinned by the digest of its files"
        )
    return files_digest(embedded(source.corpus) if isinstance(source, EmbeddedSource) else find(source.paths))


def _commit(book: RecipeBook, target: Target, source: HuggingFaceSource | GitHubSource, revision: str | None) -> str:
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    if revision is None and source.revision != UNRESOLVED:
        raise RequestError(
            f"{book.shown(target)}: the source is pinned to {source.revision}\n"
            "  to move it: --revision COMMIT, or --revision main for the newest; for a finished artifact bump it first"
        )
    if isinstance(source, GitHubSource):
        return _github_commit(source.repository, revision)
    return _hub_commit(source.id, "model" if target.kind == "tokenizers" else "dataset", revision)


def _hub_commit(repository: str, repository_type: str, revision: str | None) -> str:
    from huggingface_hub import HfApi, errors

    try:
        found = HfApi().repo_info(
            repository, repo_type=repository_type, revision=revision, timeout=NETWORK_SECONDS, files_metadata=False
        )
    except errors.RevisionNotFoundError:
        raise RequestError(f"the {repository_type} {repository} has no revision {revision!r}") from None
    except errors.RepositoryNotFoundError:  # gated ones, too
        raise RequestError(
            f"there is no {repository_type} {repository} on the Hugging Face hub, or this account may not see it\n"
            "  if it is private or gated, set HF_TOKEN, or run: hf auth login"
        ) from None
    except errors.HfHubHTTPError.__bases__ as error:  # OSError, and the base of whichever HTTP library the hub uses
        raise _unreachable(repository, str(error)) from error
    return str(found.sha)


def _github_commit(repository: str, revision: str | None) -> str:
    """Asked with git, which knows the user's credentials; branches and tags without their prefix are found, too."""
    wanted = revision or "HEAD"
    command = ["git", "ls-remote", "--exit-code", "--", f"https://github.com/{repository}", wanted]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=NETWORK_SECONDS, stdin=subprocess.DEVNULL, check=False
        )
    except FileNotFoundError:
        raise _unreachable(repository, "git is not installed") from None
    except subprocess.TimeoutExpired:
        raise _unreachable(repository, f"no answer in {NETWORK_SECONDS} seconds") from None
    if done.returncode == 2:
        raise RequestError(f"the repository {repository} has no revision {wanted!r}")
    if done.returncode != 0:
        raise _unreachable(repository, done.stderr)
    return done.stdout.split()[0]


def _unreachable(repository: str, reason: str) -> MarinError:
    first = reason.strip().partition("\n")[0]
    return MarinError(
        f"the newest commit of {repository} cannot be looked up: {first}\n"
        "  without a network: look it up elsewhere and give it with --revision COMMIT"
    )
