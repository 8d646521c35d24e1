"""Builds `raw/…`: source files as they were found, byte for byte, under names that depend on the recipe alone."""

from __future__ import annotations

from pathlib import Path

from marin_build.artifact.context import Adopted, BuildContext, BuildResult
from marin_build.artifact.store import LOGS, TEMPORARY
from marin_build.data.durable import commit, explained, temporary_of, writing
from marin_build.data.progress import Progress
from marin_build.data.reading import read_chunks
from marin_build.data.sources import SourceFile, source_files
from marin_build.errors import RequestError, Stopped
from marin_build.recipe.schema import RawRecipe


def build(context: BuildContext) -> BuildResult:
    """Copy the source files into `context.folder`; intact copies of an earlier attempt are kept.

    Raises:
        RequestError: a source file is missing, unreadable, not the pinned one, or changed while it was read.
        Stopped: a signal came; copied files are kept.
        MarinError: the disk is full or fails.
    """
    recipe = context.recipe
    assert isinstance(recipe, RawRecipe)
    files = source_files(context, recipe.source)
    for file in files:
        _check_name(context, file.name)
    total = sum(file.bytes for file in files)
    with Progress(context.logger, "copying", total) as progress:
        for file in files:
            if _is_there(file, context.folder / file.name):
                progress.add(file.bytes, kept=True)
            else:
                _copy(context, file, context.folder / file.name, progress)
    context.logger.info(f"{len(files):,} files, {total:,} bytes")
    return BuildResult(metrics={"files": len(files), "bytes": total}, made=tuple(file.name for file in files))


def _check_name(context: BuildContext | Adopted, name: str) -> None:
    """Refuse names that the artifact's own files have or could have."""
    first, *_ = parts = name.split("/")
    if any(part.startswith(".") for part in parts) or first == LOGS or name.endswith(TEMPORARY) or len(name) > 1000:
        raise RequestError(
            f"{context.target}: a source file would be stored as {name!r}, which is not possible: "
            f"names may not begin with '.' or '{LOGS}/', end in '{TEMPORARY}' or have over 1,000 characters"
        )


def _is_there(file: SourceFile, copy: Path) -> bool:
    return copy.is_file() and copy.stat().st_size == file.bytes and _digest(copy, file) == file.digest


def _digest(copy: Path, file: SourceFile) -> str:
    digest = file.hasher()
    for chunk in read_chunks(copy, 0, None, digest.update):
        del chunk
    return digest.hexdigest()


def _copy(context: BuildContext, file: SourceFile, copy: Path, progress: Progress) -> None:
    digest = file.hasher()
    with explained(copy, file.bytes), writing(temporary_of(copy)) as output:
        for chunk in read_chunks(file.path, 0, None, digest.update):
            output.write(chunk)
            progress.add(len(chunk))
            if context.stop_requested():
                raise Stopped(f"stopped by a signal while {file.name} was copied; the same command goes on")
    if digest.hexdigest() != file.digest:
        raise file.changed(digest.hexdigest())
    context.check_lease()
    commit(copy)
    context.keep([file.name])


def check_adopted(adopted: Adopted) -> BuildResult:
    """Any plain files may be raw text, under the names that a raw artifact can have."""
    for name in adopted.files:
        _check_name(adopted, name)
    sizes = [(adopted.folder / name).stat().st_size for name in adopted.files]
    return BuildResult(metrics={"files": len(sizes), "bytes": sum(sizes)})
