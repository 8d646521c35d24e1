"""Files of a GitHub repository at a commit, from a repository that git finds in the place of github.com."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from builders import texts_of
from corpora import written

from marin_build.data import github, raw
from marin_build.data.shards import TokenizedSet
from marin_build.errors import MarinError, RequestError
from marin_build.recipe import schema
from marin_build.recipe.sources import GitHubSource, JsonArray

FILES = {
    "data/bbc_news_20260101to20260131.json": written("c.json", ["one", "two"]),
    "data/bbc_news_dev.json": written("c.json", ["none"]),
    "data/deep/more.json": written("c.json", ["three"]),
    "large.bin": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
}


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "hub" / "owner" / "name"
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "data/link.json").symlink_to("/etc/passwd")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "config", "uploadpack.allowFilter", "true")
    git(folder, "config", "uploadpack.allowAnySHA1InWant", "true")
    commit(folder)
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://{tmp_path}/hub/.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://github.com/")
    return folder


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def commit(folder: Path) -> None:
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "more")


def tree(folder: Path, content: bytes) -> str:
    """Write a tree as it is, whatever it says."""
    command = ["git", "-C", str(folder), "hash-object", "-t", "tree", "-w", "--literally", "--stdin"]
    return subprocess.run(command, input=content, capture_output=True, check=True).stdout.decode().strip()


def head(folder: Path) -> str:
    return git(folder, "rev-parse", "HEAD")


def source(revision: str, *files: str, repository: str = "owner/name") -> GitHubSource:
    return GitHubSource(type="github", repository=repository, revision=revision, files=list(files))


def names(found: list[github.Fetched]) -> list[str]:
    return [file.name for file in found]


@pytest.mark.parametrize("length", [40, 7])
def test_files_of_a_commit_are_fetched_by_globs_and_the_newest_are_not(repository, tmp_path, length):
    pinned = head(repository)[:length]
    (repository / "data/bbc_news_20260201to20260228.json").write_bytes(b"[]")
    commit(repository)
    found = github.fetched(source(pinned, "data/bbc_news_????????to????????.json", "data/**/m*"), tmp_path / "cache")
    assert names(found) == ["data/bbc_news_20260101to20260131.json", "data/deep/more.json"]
    assert all(file.path.read_bytes() == FILES[file.name] for file in found)


def test_links_are_no_files_of_a_repository(repository, tmp_path):
    found = github.fetched(source(head(repository), "data/*"), tmp_path / "cache")
    assert "data/link.json" not in names(found)


def test_a_path_that_leads_out_of_the_folder_is_no_file(repository, tmp_path):
    """Git itself would not make such a tree; who wants to do harm would."""
    blob = bytes.fromhex(git(repository, "hash-object", "-w", "data/deep/more.json"))
    inner = tree(repository, b"100644 evil.json\0" + blob)
    outer = tree(repository, b"40000 ..\0" + bytes.fromhex(inner) + b"100644 good.json\0" + blob)
    made = git(repository, "commit-tree", outer, "-m", "evil")
    git(repository, "update-ref", "refs/heads/evil", made)
    found = github.fetched(source(made, "**/*.json"), tmp_path / "cache")
    assert names(found) == ["good.json"]


def test_what_was_fetched_is_used_again_without_a_network_and_what_is_damaged_is_fetched_again(
    repository, tmp_path, monkeypatch
):
    wanted, cache = source(head(repository), "data/*.json"), tmp_path / "cache"
    first = github.fetched(wanted, cache)
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "url.file:///nowhere/.insteadOf")
    assert github.fetched(wanted, cache) == first
    first[0].path.write_bytes(b"other")
    with pytest.raises(MarinError, match="cannot be fetched: fatal: ") as error:
        github.fetched(wanted, cache)
    assert "name them in a source of type files" in str(error.value)
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://{tmp_path}/hub/.insteadOf")
    assert github.fetched(wanted, cache) == first
    assert first[0].path.read_bytes() == FILES[first[0].name]
    assert not [path for path in cache.iterdir() if path.name.startswith("clone-")]


def test_a_commit_that_is_not_there_is_said(repository, tmp_path):
    for revision in ("f" * 40, "fffffff"):
        with pytest.raises(RequestError, match=rf"the repository owner/name has no commit {revision}"):
            github.fetched(source(revision, "*"), tmp_path / "cache")


def test_a_repository_that_is_not_there_is_told_with_gits_words(repository, tmp_path):
    with pytest.raises(MarinError, match=r"files of owner/other at abcdef0 cannot be fetched: fatal: "):
        github.fetched(source("abcdef0", "*", repository="owner/other"), tmp_path / "cache")


def test_a_glob_without_a_file_is_said_with_some_that_there_are(repository, tmp_path):
    with pytest.raises(RequestError, match=r"has no file that matches '\*.txt'\n  it has: data/bbc_news_2026"):
        github.fetched(source(head(repository), "*.txt"), tmp_path / "cache")


def test_a_file_of_git_lfs_is_refused(repository, tmp_path):
    with pytest.raises(RequestError, match=r"large.bin is kept in git-lfs, which is not fetched"):
        github.fetched(source(head(repository), "*.bin"), tmp_path / "cache")


def test_a_raw_artifact_is_made_of_a_repository_and_tokens_without_one(repository, tmp_path, workbench):
    wanted = source(head(repository), "data/bbc_news_????????to????????.json", "data/deep/*")
    cache = str(tmp_path / "cache")
    context = workbench.context("raw/code/dev", schema.RawRecipe(source=wanted), object_cache=cache)
    raw.build(context)
    assert (context.folder / "data/deep/more.json").read_bytes() == FILES["data/deep/more.json"]
    settings = workbench.context("tokenized/bench/dev", schema.RawRecipe(source=wanted), object_cache=cache).settings
    folder, _ = workbench.tokenize(
        workbench.raw({"none": b""}),
        workbench.bytes_tokenizer(),
        source=wanted,
        format=JsonArray(type="json_array", text_key="text"),
        given={"settings": settings},
    )
    assert texts_of(TokenizedSet.open(folder)) == ["one", "two", "three"]
