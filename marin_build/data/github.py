"""Files of a GitHub repository at a commit, brought to this machine with git, which knows the user's access.

Only the commit, its folders and the files asked for are fetched. What was fetched stays, each file under its path, and
is compared with git's own digest of it before it is used again.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from marin_build.artifact.bodies import is_file_name
from marin_build.artifact.strict_json import parse_object
from marin_build.data.durable import commit as rename
from marin_build.data.durable import explained, json_bytes, temporary_of, write_whole, writing
from marin_build.data.globs import Glob
from marin_build.data.hub import no_match
from marin_build.data.places import hasher
from marin_build.errors import MarinError, RequestError
from marin_build.recipe.sources import GitHubSource

QUIET_SECONDS = 60
"""A fetch that brings next to nothing for so long is given up."""
POINTER = b"version https://git-lfs.github.com/spec/"
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Fetched:
    name: str
    path: Path
    digest: str
    """Git's SHA-1 of the file."""


def fetched(source: GitHubSource, cache: Path) -> list[Fetched]:
    """The files that the globs of the source match, in their order, the matches of one glob sorted.

    Raises:
        RequestError: no such repository, commit or file, or a file that lies elsewhere (git-lfs).
        MarinError: GitHub cannot be reached, git is not installed, or the disk is full.
    """
    place = f"{source.repository} at {source.revision}"
    folder = cache / source.repository.replace("/", "--") / source.revision
    blobs = _kept_list(folder)
    if blobs is None or any(not _is_there(folder, name, blobs[name]) for name in _chosen(place, source, blobs)):
        with _Clone(source, cache) as clone:
            blobs = clone.list()
            names = [name for name in _chosen(place, source, blobs) if not _is_there(folder, name, blobs[name])]
            clone.bring({name: blobs[name] for name in names}, folder)
        write_whole(folder / "files.json", json_bytes({"files": blobs}))
    return [Fetched(name, _path(folder, name), blobs[name]) for name in _chosen(place, source, blobs)]


def _chosen(place: str, source: GitHubSource, blobs: Mapping[str, str]) -> list[str]:
    names: dict[str, None] = {}
    for pattern in source.files:
        matched = sorted(filter(Glob(pattern).matches, blobs))
        if not matched:
            raise no_match(place, pattern, list(blobs))
        names |= dict.fromkeys(matched)
    return list(names)


def _path(folder: Path, name: str) -> Path:
    return folder / "files" / name


def _kept_list(folder: Path) -> dict[str, str] | None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        listed = parse_object((folder / "files.json").read_bytes())["files"]
        return {str(name): str(digest) for name, digest in listed.items()}
    return None


def _is_there(folder: Path, name: str, digest: str) -> bool:
    try:
        size = _path(folder, name).stat().st_size
        with open(_path(folder, name), "rb") as file:
            seen = hasher(digest, size)
            while chunk := file.read(CHUNK_BYTES):
                seen.update(chunk)
    except OSError:
        return False
    return bool(seen.hexdigest() == digest)


class _Clone:
    """A bare repository for as long as the block lasts, with the commit and its folders."""

    def __init__(self, source: GitHubSource, cache: Path) -> None:
        self._source, self._cache = source, cache
        self._url = f"https://github.com/{source.repository}"

    def __enter__(self) -> _Clone:
        with explained(self._cache):
            self._cache.mkdir(parents=True, exist_ok=True)
            self._folder = tempfile.TemporaryDirectory(dir=self._cache, prefix="clone-")
        try:
            self._git("init", "-q", "--bare")
            for key, value in {"url": self._url, "promisor": "true", "partialclonefilter": "blob:none"}.items():
                self._git("config", f"remote.origin.{key}", value)
            self._fetch_commit()
        except BaseException:
            self._folder.cleanup()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def _fetch_commit(self) -> None:
        revision = self._source.revision
        fetch = ("fetch", "-q", "--no-tags", "--filter=blob:none", "origin")
        if len(revision) == 40 and self._try(*fetch, "--depth=1", revision).returncode == 0:
            return
        # A shortened commit cannot be asked for; all branches and tags are.
        self._git(*fetch, "+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*")
        if self._try("rev-parse", "-q", "--verify", f"{revision}^{{commit}}").returncode != 0:
            raise RequestError(f"the repository {self._source.repository} has no commit {revision}")

    def list(self) -> dict[str, str]:
        """Git's digest of each plain file, by path; links and submodules are none."""
        listed = self._git("ls-tree", "-r", "-z", "--full-tree", f"{self._source.revision}^{{commit}}")
        entries = (entry.partition(b"\t") for entry in listed.split(b"\0") if entry)
        blobs = {os.fsdecode(path): facts.split() for facts, _, path in entries}
        return {
            name: facts[2].decode()
            for name, facts in blobs.items()
            if facts[0].startswith(b"100") and _can_be_written(name)
        }

    def bring(self, blobs: Mapping[str, str], folder: Path) -> None:
        """Write each file below the folder; all are asked for at once."""
        wanted = "".join(f"{digest}\n" for digest in sorted(set(blobs.values()))).encode()
        self._try("fetch", "-q", "--no-tags", "--filter=blob:none", "--stdin", "origin", input=wanted)
        for name, digest in blobs.items():
            self._write(name, digest, _path(folder, name))
            if not _is_there(folder, name, digest):
                raise MarinError(f"{self._source.repository}: {name} came as something else; try again")

    def _write(self, name: str, digest: str, path: Path) -> None:
        with explained(path), writing(temporary_of(path)) as file:
            done = subprocess.run(
                self._command("cat-file", "blob", digest), stdout=file, stderr=subprocess.PIPE, check=False
            )
        if done.returncode:
            raise self._unreachable(done.stderr)
        with open(temporary_of(path), "rb") as file:
            if file.read(len(POINTER)) == POINTER:
                raise RequestError(
                    f"{self._source.repository}: {name} is kept in git-lfs, which is not fetched\n"
                    "  download it, and name it in a source of type files"
                )
        rename(path)

    def _command(self, *arguments: str) -> list[str]:
        slow = ("-c", "http.lowSpeedLimit=100", "-c", f"http.lowSpeedTime={QUIET_SECONDS}")
        return ["git", "-C", self._folder.name, *slow, *arguments]

    def _try(self, *arguments: str, input: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
        for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
            environment.pop(name, None)
        try:
            return subprocess.run(
                self._command(*arguments), input=input, capture_output=True, env=environment, check=False
            )
        except FileNotFoundError:
            raise self._unreachable(b"git is not installed") from None

    def _git(self, *arguments: str) -> bytes:
        done = self._try(*arguments)
        if done.returncode:
            raise self._unreachable(done.stderr)
        return done.stdout

    def _unreachable(self, said: bytes) -> MarinError:
        reason = next(_lines(said), "git failed")
        return MarinError(
            f"files of {self._source.repository} at {self._source.revision} cannot be fetched: {reason}\n"
            "  without a network: copy the files here and name them in a source of type files"
        )


def _can_be_written(name: str) -> bool:
    """Whether a path of a repository, which may be anybody's, stays below the folder that it is written to."""
    return is_file_name(name) and not set(name.split("/")) & {"", ".", ".."}


def _lines(said: bytes) -> Iterator[str]:
    lines = [line for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
    return iter(sorted(lines, key=lambda line: not line.startswith("fatal:")))


def cache_of(object_cache: str) -> Path:
    """Where fetched files stay on this machine."""
    return Path(os.path.expanduser(object_cache)) / "github"
