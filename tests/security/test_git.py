"""A folder of recipes that was copied with its `.git`: asking git for the commit starts none of its programs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from marin_build import pin
from marin_build.artifact.provenance import circumstances
from marin_build.errors import MarinError, RequestError


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(
        ["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True, capture_output=True
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "recipes"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "a.yaml").write_text("a: 1\n")
    (folder / ".gitattributes").write_text("*.yaml filter=evil diff=evil\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "a")
    (folder / "a.yaml").write_text("a: 2\n")
    return folder


def test_commit_and_changes_are_found(repository: Path):
    found = circumstances(repository, [])
    assert len(found["commit"]) == 40
    before = found["uncommitted_changes_digest"]
    assert len(before) == 32
    (repository / "a.yaml").write_text("a: 3\n")
    assert circumstances(repository, [])["uncommitted_changes_digest"] != before


@pytest.mark.parametrize("included", [False, True])
def test_no_program_of_the_repository_runs(repository: Path, included: bool):
    honest = circumstances(repository, [])
    ran = repository.parent / "ran"
    evil = (
        f"[core]\n\tfsmonitor = touch {ran}-fsmonitor\n\thooksPath = {repository}/hooks\n\tpager = touch {ran}-pager\n"
        f"\tsshCommand = touch {ran}-ssh\n[diff]\n\texternal = touch {ran}-external\n"
        f'[filter "evil"]\n\tclean = touch {ran}-clean; cat\n\tsmudge = touch {ran}-smudge\n\trequired = true\n'
        f'[filter "process"]\n\tprocess = touch {ran}-process\n'
        f'[diff "evil"]\n\tcommand = touch {ran}-command\n\ttextconv = touch {ran}-textconv\n'
        f"[alias]\n\tdiff = !touch {ran}-alias\n\trev-parse = !touch {ran}-alias\n"
    )
    (repository / "hooks").mkdir()
    for name in ("post-index-change", "post-checkout", "fsmonitor-watchman"):
        (repository / "hooks" / name).write_text(f"#!/bin/sh\ntouch {ran}-hook\n")
        (repository / "hooks" / name).chmod(0o755)
    (repository / ".git/evil").write_text(evil)
    with (repository / ".git/config").open("a") as config:
        config.write(f"[include]\n\tpath = {repository}/.git/evil\n" if included else evil)
    assert circumstances(repository, []) == honest
    assert sorted(repository.parent.glob("ran*")) == []


@pytest.mark.parametrize("revision", ["--upload-pack=touch ran", "-h", "--exec=touch ran"])
def test_a_revision_is_no_option_of_git(revision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_ALLOW_PROTOCOL", "none")
    with pytest.raises(MarinError, match="transport 'https' not allowed") as error:
        pin._github_commit("a/b", revision)
    assert not isinstance(error.value, RequestError)
    assert list(tmp_path.iterdir()) == []
