"""Files of an existing tokenizer: on this machine, pinned by digest, or on the Hugging Face hub, pinned by commit.

A commit names its content, so nothing else pins a hub source. The hub's client keeps its cache, its token and its
environment variables (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE).
"""

from __future__ import annotations

from pathlib import Path

from marin_build.artifact.context import BuildContext
from marin_build.data.globs import Glob
from marin_build.data.hub import Repository, asking
from marin_build.data.places import Place
from marin_build.data.sources import source_files
from marin_build.errors import RequestError
from marin_build.recipe.sources import FilesSource, HuggingFaceSource


def adopted_files(context: BuildContext, source: FilesSource | HuggingFaceSource) -> dict[str, Path]:
    """The files of the source by their last name.

    Raises:
        RequestError: no such file, repository or commit, no access, or other bytes than pinned.
        MarinError: the hub cannot be reached.
    """
    if isinstance(source, HuggingFaceSource):
        found = _hub_files(context, source)
    else:
        found = [(file.name, _local(context, file.path)) for file in source_files(context, source)]
    by_name: dict[str, Path] = {}
    for name, path in found:
        if by_name.setdefault(name.rpartition("/")[2], path) != path:
            raise RequestError(f"{context.target}: tokenizer.source has two files named {path.name}; narrow its files")
    return by_name


def _local(context: BuildContext, place: Place) -> Path:
    if not isinstance(place, Path):
        raise RequestError(f"{context.target}: tokenizer.source: {place} is in a store; copy it to this machine")
    return place


def _hub_files(context: BuildContext, source: HuggingFaceSource) -> list[tuple[str, Path]]:
    folder = _snapshot(context, source)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    chosen: dict[str, Path] = {}
    for pattern in source.files:
        matched = list(filter(Glob(pattern).matches, names))
        if not matched:
            raise RequestError(
                f"{context.target}: {source.id} at {source.revision} has no file that matches {pattern!r}"
            )
        chosen |= {name: folder / name for name in matched}
    return list(chosen.items())


def _snapshot(context: BuildContext, source: HuggingFaceSource) -> Path:
    """Folder of the hub client's cache that holds at least the files asked for."""
    import huggingface_hub

    place = Repository(source.id, "model", source.revision)
    context.logger.info(f"fetching {', '.join(source.files)} of {place}")
    # The hub's patterns have no "any number of folders"; what they give too much is left out by the caller.
    patterns = [*source.files, *(pattern.replace("**/", "") for pattern in source.files)]
    with asking(place, str(place), f"{context.target}: "):
        folder = huggingface_hub.snapshot_download(source.id, revision=source.revision, allow_patterns=patterns)
    return Path(folder)
