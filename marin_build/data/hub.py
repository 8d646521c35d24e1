"""Files of a repository of the Hugging Face hub at a commit: which there are, and how each is brought to this machine.

A commit names its content, and the hub says the digest of each file, which whoever reads it compares. The hub's client
keeps its cache, its token and its environment variables (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE); the list of
files at a commit is kept beside its cache, so that what is there can be used without a network.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from marin_build.artifact.bodies import is_file_name
from marin_build.artifact.store import FULL, disk_error
from marin_build.artifact.strict_json import parse_object
from marin_build.data.durable import json_bytes, write_whole
from marin_build.data.globs import Glob
from marin_build.errors import MarinError, RequestError

SHOWN_FILES = 5


@dataclass(frozen=True)
class Repository:
    """A repository of the hub at a commit, which may be shortened."""

    id: str
    type: str
    """model or dataset"""
    revision: str

    def __str__(self) -> str:
        return f"{self.id} at {self.revision}"


@dataclass(frozen=True)
class HubFile:
    """A file of a repository, which is brought to this machine when it is opened."""

    repository: Repository
    path: str
    bytes: int
    digest: str
    """SHA-256 of a large file, git's SHA-1 of a small one."""

    def __str__(self) -> str:
        kind = "datasets/" if self.repository.type == "dataset" else ""
        return f"hf://{kind}{self.repository.id}@{self.repository.revision[:12]}/{self.path}"

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def open(self) -> BinaryIO:
        """The file in the cache of the hub's client, fetched first where it is not there; a fetch goes on where one
        was cut off.

        Raises:
            RequestError: there is no access to it.
            MarinError: the hub cannot be reached, or the disk is full.
        """
        import huggingface_hub

        where = self.repository
        place = {"repo_type": where.type, "revision": where.revision}
        path = huggingface_hub.try_to_load_from_cache(where.id, self.path, **place)
        if not isinstance(path, str):
            logging.getLogger("marin_build").info(f"fetching {self}, {self.bytes / 1e6:,.1f} MB")
            if not sys.stderr.isatty():
                huggingface_hub.utils.disable_progress_bars()
            with asking(where, f"{self.path} of {where}"):
                path = huggingface_hub.hf_hub_download(where.id, self.path, **place)
        return cast(BinaryIO, open(path, "rb", buffering=0))


def chosen_files(repository: Repository, patterns: Sequence[str]) -> list[HubFile]:
    """The files that the globs match, in their order, the matches of one glob sorted.

    Raises:
        RequestError: a glob without a match, no such repository or commit, or no access.
        MarinError: the hub cannot be reached.
    """
    files = {file.path: file for file in files_at(repository)}
    chosen: dict[str, HubFile] = {}
    for pattern in patterns:
        matched = sorted(filter(Glob(pattern).matches, files))
        if not matched:
            raise no_match(repository, pattern, files)
        chosen |= {name: files[name] for name in matched}
    return list(chosen.values())


def no_match(place: object, pattern: str, names: Sequence[str] | dict[str, Any]) -> RequestError:
    some = ", ".join(sorted(names)[:SHOWN_FILES]) + (", …" if len(names) > SHOWN_FILES else "")
    return RequestError(f"{place} has no file that matches {pattern!r}\n  it has: {some or 'no file'}")


def files_at(repository: Repository) -> list[HubFile]:
    """All files of a repository at its commit, in full, from the list kept here or from the hub."""
    kept = _list_path(repository)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        listed = parse_object(kept.read_bytes())
        exact = replace(repository, revision=listed["commit"])
        return [HubFile(exact, str(f["path"]), int(f["bytes"]), str(f["digest"])) for f in listed["files"]]
    with asking(repository, f"the list of files of {repository}"):
        files = _asked(repository)
    body = {"commit": files[0].repository.revision, "files": [_entry(file) for file in files]} if files else {}
    with contextlib.suppress(MarinError):  # a cache that cannot be written to is no reason to stop
        if body:
            write_whole(kept, json_bytes(body))
    return files


def _entry(file: HubFile) -> dict[str, Any]:
    return {key: value for key, value in asdict(file).items() if key != "repository"}


def _asked(repository: Repository) -> list[HubFile]:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api, where = HfApi(), {"repo_type": repository.type}
    commit = repository.revision
    if len(commit) < 40:
        commit = str(api.repo_info(repository.id, revision=commit, files_metadata=False, **where).sha)
        if not commit.startswith(repository.revision):
            raise RequestError(f"{repository.id}: {repository.revision} is the name of a branch or tag, and no commit")
    exact = replace(repository, revision=commit)
    listed = api.list_repo_tree(repository.id, recursive=True, revision=commit, **where)
    return [_file(exact, entry) for entry in listed if isinstance(entry, RepoFile)]


def _file(repository: Repository, entry: Any) -> HubFile:
    path = entry.path
    if not is_file_name(path) or path.startswith("/") or ".." in path.split("/"):
        raise RequestError(f"{repository} has a file with the name {path!a}, which no file can have here")
    return HubFile(repository, path, entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id)


def _list_path(repository: Repository) -> Path:
    from huggingface_hub import constants

    folder = f"{repository.type}s--{repository.id.replace('/', '--')}"
    return Path(constants.HF_HOME) / "marin_build" / folder / f"{repository.revision}.json"


@contextlib.contextmanager
def asking(repository: Repository, what: str, prefix: str = "") -> Iterator[None]:
    """Turn what the hub's client raises into errors for people.

    Raises:
        RequestError: no such repository, commit or file, or no access.
        MarinError: the hub cannot be reached, or the disk is full.
    """
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        raise RequestError(
            f"{prefix}{repository} is gated and this account has no access to it\n"
            f"  accept its terms on the page of {repository.id}, then set HF_TOKEN, or run: hf auth login"
        ) from None
    except errors.RevisionNotFoundError:
        raise RequestError(f"{prefix}{repository.id} has no commit {repository.revision}") from None
    except errors.RepositoryNotFoundError:
        raise RequestError(
            f"{prefix}there is no repository {repository.id} on the hub, or this account may not see it\n"
            "  if it is private, set HF_TOKEN, or run: hf auth login"
        ) from None
    except errors.HfHubHTTPError.__bases__ as error:  # OSError, and the base of whichever HTTP library the hub uses
        if getattr(error, "errno", None) in FULL:
            raise disk_error(cast(OSError, error), ".") from error
        reason = str(error).strip().partition("\n")[0]
        raise MarinError(
            f"{prefix}{what} is not in the local cache and the hub cannot be reached: {reason}\n"
            "  without a network: copy the files here and name them in a source of type files"
        ) from error
