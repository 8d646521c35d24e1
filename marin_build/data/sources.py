"""Source files: which files a source of a recipe means, under which names, and proof that they are the pinned ones.

The name of a file is its path below the fixed part of the glob that found it, so the digest of a source does not
depend on where the files lie: it equals the digest of the raw artifact that holds them.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from marin_build.artifact.bodies import NO_FILE_NAME, is_file_name
from marin_build.artifact.bucket import at_once
from marin_build.artifact.context import BuildContext, Dependency
from marin_build.artifact.digest import root_digest
from marin_build.artifact.store import LOGS
from marin_build.data.github import cache_of, fetched
from marin_build.data.globs import WILDCARD, Glob
from marin_build.data.hub import HubFile, Repository, chosen_files
from marin_build.data.pin_notes import note, noted
from marin_build.data.places import Place, hasher, is_url, open_place, size_of, stored_matches, unreadable
from marin_build.data.progress import Progress
from marin_build.errors import DamageError, MarinError, RequestError, Stopped
from marin_build.recipe.sources import ArtifactSource, EmbeddedSource, FilesSource, GitHubSource, HuggingFaceSource

CORPORA = Path(__file__).parent / "corpora"
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class SourceFile:
    """A file to read, with what its bytes have to be."""

    name: str
    """Relative path within the source, with `/`."""
    path: Place
    bytes: int
    digest: str
    """xxh3_128 of its bytes, or what a hub says of them: the form says which (`places.hasher`)."""
    artifact: str | None = None
    """The raw artifact that it is a file of; none: a file of the user's."""

    def hasher(self) -> Any:
        """What its bytes are put through to see that they are the expected ones."""
        return hasher(self.digest, self.bytes)

    def changed(self, seen: str) -> MarinError:
        """The error for bytes other than the expected ones."""
        if self.artifact:
            return DamageError(
                f"{self.artifact} is damaged: {self.name} is not what its record says: expected {self.digest}, "
                f"seen {seen}\n  file: {self.path}\n  marin-build verify --full {self.artifact}"
            )
        if isinstance(self.path, HubFile):
            return MarinError(
                f"{self.path} came as something else: expected {self.digest}, seen {seen}\n"
                "  remove it from the cache of the hub's client (hf cache), then run the same command again"
            )
        return RequestError(
            f"{self.path} changed while it was read: expected {self.digest}, seen {seen}\n"
            "  let whatever writes it finish, then run the same command again; or pin what is there now"
        )


def source_files(
    context: BuildContext, source: EmbeddedSource | FilesSource | HuggingFaceSource | GitHubSource | ArtifactSource
) -> list[SourceFile]:
    """The files of a source, in the order of the recipe.

    Raises:
        RequestError: no such file, repository or commit, no access, or other bytes than pinned.
        DamageError: a file of an artifact is missing or has another size.
        MarinError: the hub or the store cannot be reached.
        Stopped: a signal came while files were hashed.
    """
    if isinstance(source, ArtifactSource):
        return artifact_files(context.dependencies[source.target], source.files)
    if isinstance(source, EmbeddedSource):
        return pinned(context, embedded(source.corpus), source.digest)
    if isinstance(source, FilesSource):
        return pinned(context, find(source.paths), source.digest)
    place = source.id if isinstance(source, HuggingFaceSource) else source.repository
    context.logger.info(f"looking up {', '.join(source.files)} of {place} at {source.revision}")
    if isinstance(source, HuggingFaceSource):
        repository = Repository(source.id, "dataset", source.revision)
        return [SourceFile(f.path, f, f.bytes, f.digest) for f in chosen_files(repository, source.files)]
    files = fetched(source, cache_of(context.settings.object_cache))
    return [SourceFile(file.name, file.path, size_of(file.path), file.digest) for file in files]


# ---- finding ---------------------------------------------------------------------------------------------------------


def find(patterns: Sequence[str]) -> list[tuple[str, Place]]:
    """(name, place) of the files that paths, URLs and globs mean: in their order, the matches of one glob sorted.

    A path that two globs match counts once.

    Raises:
        RequestError: a pattern without a file, or two files with one name.
    """
    paths: dict[Place, str] = {}
    for pattern in patterns:
        for name, path in _matches(pattern):
            paths.setdefault(path.absolute() if isinstance(path, Path) else path, name)
    names: dict[str, Place] = {}
    for path, name in paths.items():
        if name in names:
            raise RequestError(
                f"source files {names[name]} and {path} would both be named {name!r}; "
                "write one glob that starts above both, for example folder/**/*"
            )
        names[name] = path
    return list(names.items())


def _matches(pattern: str) -> list[tuple[str, Place]]:
    if is_url(pattern):
        if not (stored := stored_matches(pattern)):
            raise RequestError(f"no source file matches {pattern!r}")
        return [(_checked(name, pattern), file) for name, file in stored]
    pattern = pattern.removeprefix("file://")
    if os.path.isfile(pattern):
        found, base = [pattern], os.path.dirname(pattern)
    else:
        fixed = WILDCARD.split(pattern, maxsplit=1)[0]
        base = os.path.dirname(fixed)
        short = re.sub(r"(?:\*\*/)+", "**/", pattern)  # each repetition would walk the tree once more
        found = sorted(path for path in glob.glob(short, recursive=True) if os.path.isfile(path))
    if not found:
        raise RequestError(_nothing_found(pattern))
    return [(_name_of(path, base), Path(path)) for path in found]


def _nothing_found(pattern: str) -> str:
    place = f"\n  working directory: {os.getcwd()}"
    if os.path.isdir(pattern):
        return f"source path {pattern!r} is a folder; name its files, for example {pattern.rstrip('/')}/**/*{place}"
    if os.path.lexists(pattern):
        return f"source path {pattern!r} is no plain file{place}"
    return f"no source file matches {pattern!r}{place}"


def _name_of(path: str, base: str) -> str:
    return _checked(os.path.relpath(path, base or ".").replace(os.sep, "/"), path)


def _checked(name: str, path: str) -> str:
    if not is_file_name(name):
        raise RequestError(f"source file {path!a}: {NO_FILE_NAME}")
    return name


def embedded(corpus: str) -> list[tuple[str, Place]]:
    """(name, path) of the files of a corpus that is shipped with the package, sorted by name."""
    folder = CORPORA / corpus
    if not folder.is_dir():
        known = ", ".join(sorted(entry.name for entry in CORPORA.iterdir() if entry.is_dir()))
        raise RequestError(f"there is no embedded corpus {corpus!r}; there are: {known}")
    return find([f"{glob.escape(str(folder))}/**/*"])


# ---- pinned files ----------------------------------------------------------------------------------------------------


def pinned(context: BuildContext, found: Sequence[tuple[str, Place]], expected: str) -> list[SourceFile]:
    """Hash the files found, unless an earlier job has noted their digests, and compare their root with the pin."""
    cache = context.settings.object_cache
    if digests := noted(cache, expected, found):
        files = [
            SourceFile(name, place, size_of(place), digest)
            for (name, place), digest in zip(found, digests, strict=True)
        ]
        if digest_of(files) == expected:
            return files
    with Progress(context.logger, "hashing source files", sum(size_of(path) for _, path in found)) as progress:

        def hashed(done_bytes: int) -> None:
            progress.add(done_bytes)
            if context.stop_requested():
                raise Stopped("stopped by a signal while source files were hashed; run the same command again")

        files = _hashed(found, hashed)
    seen = digest_of(files)
    if seen != expected:
        raise RequestError(
            f"{context.target}: the source files are not the pinned ones: digest expected {expected}, seen {seen}\n"
            f"  {len(files):,} files, {sum(file.bytes for file in files):,} bytes, the first: {files[0].path}\n"
            f"  if these are the right files: marin-build pin {context.target}"
        )
    note(cache, expected, found, [file.digest for file in files])
    return files


def files_digest(found: Iterable[tuple[str, Place]]) -> str:
    """The digest that pins these files: a root over (name, bytes, xxh3_128) of each."""
    return digest_of(_hashed(list(found), lambda _: None))


def _hashed(found: Sequence[tuple[str, Place]], seen: Callable[[int], None]) -> list[SourceFile]:
    """Files with their digests; those of stores several at a time, since each waits for its store."""

    def one(entry: tuple[str, Place]) -> SourceFile:
        return SourceFile(*entry, *hash_source(entry[1], seen))

    is_local = all(isinstance(place, Path) for _, place in found)
    return [one(entry) for entry in found] if is_local else at_once(one, found)


def digest_of(files: Iterable[SourceFile]) -> str:
    return root_digest({"path": file.name, "bytes": file.bytes, "xxh3_128": file.digest} for file in files)


def hash_source(path: Place, hashed: Callable[[int], None]) -> tuple[int, str]:
    """(bytes, xxh3_128) of a user's file; `hashed` is told of every chunk."""
    count, digest, buffer = 0, xxhash.xxh3_128(), memoryview(bytearray(CHUNK_BYTES))
    try:
        with open_place(path) as file:
            while read := file.readinto(buffer):
                digest.update(buffer[:read])
                count += read
                hashed(read)
    except OSError as error:
        raise unreadable(error, path, count) from error
    return count, digest.hexdigest()


def unhashed_files(source: FilesSource) -> list[SourceFile]:
    """The files of a source, with no digest: `hashed` makes one that can be read."""
    return [SourceFile(name, place, size_of(place), "") for name, place in find(source.paths)]


def hashed(file: SourceFile) -> SourceFile:
    """The file with the digest of the bytes that are there, where it has none."""
    return file if file.digest else SourceFile(file.name, file.path, *hash_source(file.path, lambda _: None))


# ---- files of a raw artifact -----------------------------------------------------------------------------------------


def artifact_files(dependency: Dependency, patterns: Sequence[str]) -> list[SourceFile]:
    """The files of a finished raw artifact that the globs match, in their order, the matches of one glob sorted.

    Raises:
        RequestError: a glob without a match.
        DamageError: a file is missing or has another size than recorded.
    """
    entries = {entry["path"]: entry for entry in dependency.record["files"] if _is_content(entry["path"])}
    names: dict[str, None] = {}
    for pattern in patterns:
        matched = sorted(filter(Glob(pattern).matches, entries))
        if not matched:
            some = ", ".join(sorted(entries)[:5]) + (", …" if len(entries) > 5 else "")
            raise RequestError(f"no file of {dependency.target} matches {pattern!r}\n  it has: {some}")
        names.update(dict.fromkeys(matched))
    return [_recorded(dependency, entries[name]) for name in names]


def _is_content(name: str) -> bool:
    return not name.startswith((".", f"{LOGS}/"))


def _recorded(dependency: Dependency, entry: Mapping[str, Any]) -> SourceFile:
    path = dependency.folder / entry["path"]
    seen = path.stat().st_size if path.is_file() else None
    if seen != entry["bytes"]:
        what = "is missing" if seen is None else f"has {seen:,} bytes instead of {entry['bytes']:,}"
        raise DamageError(
            f"{dependency.target} is damaged: {entry['path']} {what}\n  file: {path}\n  snakemake {dependency.target}"
        )
    return SourceFile(entry["path"], path, entry["bytes"], entry["xxh3_128"], str(dependency.target))
