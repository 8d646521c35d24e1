from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from artifact_world import RAW, Parts, World

from marin_build.artifact import provenance
from marin_build.artifact.context import BuildContext, BuildResult
from marin_build.artifact.provenance import code_changed, hidden


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["build", "raw/a/dev", "--prefix", "/data"], ["build", "raw/a/dev", "--prefix", "/data"]),
        (["--token", "abc"], ["--token", "[hidden]"]),
        (["--hf-token", "abc", "x"], ["--hf-token", "[hidden]", "x"]),
        (["--api-key=abc"], ["--api-key=[hidden]"]),
        (["--config", "wandb_api_key=0123", "wait=true"], ["--config", "wandb_api_key=[hidden]", "wait=true"]),
        (["WANDB_API_KEY=0123"], ["WANDB_API_KEY=[hidden]"]),
        (["--config={password: abc, wait: true}"], ["--config={password: [hidden], wait: true}"]),
        (["https://user:pass@host/path"], ["https://[hidden]@host/path"]),
        (["hf_abcdefghijklmnop"], ["[hidden]"]),
        (["--token", "--wait"], ["--token", "--wait"]),
        (["tokenizers/bpe/dev", "tokenized/x/dev"], ["tokenizers/bpe/dev", "tokenized/x/dev"]),
    ],
)
def test_secrets_are_hidden_and_nothing_else(arguments: list[str], shown: list[str]):
    assert hidden(arguments) == shown


def test_a_record_says_where_it_comes_from(world: World):
    def build(context: BuildContext) -> BuildResult:
        Parts()(context)
        return BuildResult(details={"devices": ["cpu:0"], "resumed_from_step": 3})

    found = world.build(RAW, build, run="r1").record.provenance
    assert found["command"] == ["marin-build", "build", RAW]
    assert found["run"] == "r1"
    assert found["devices"] == ["cpu:0"]
    assert found["resumed_from_step"] == 3
    assert found["seconds"] >= 0
    assert {"user", "host", "python", "packages", "code", "started", "finished", "attempts", "commit"} <= set(found)
    assert found["packages"]["xxhash"]
    assert "artifact/publish.py" in found["code"]["modules"]
    assert len(found["code"]["digest"]) == 32


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_commit_and_uncommitted_changes_are_those_of_the_recipes(world: World):
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(world.folder)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "config"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "recipes"], check=True)
    clean = world.build(RAW).record.provenance
    assert len(clean["commit"]) == 40
    assert clean["uncommitted_changes_digest"] is None
    world.edit(RAW, "source:", "# a comment\nsource:")
    dirty = world.build(RAW, force="r1").record.provenance
    assert dirty["commit"] == clean["commit"]
    assert len(dirty["uncommitted_changes_digest"]) == 32


def test_without_a_repository_there_is_no_commit(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(world.folder))
    found = provenance.circumstances(world.folder / "config", [])
    assert found["commit"] is None


def test_without_git_there_is_no_commit(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert provenance.circumstances(world.folder, [])["commit"] is None


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package's sources, which the code digest is made to look at; the modules keep their names."""
    folder = tmp_path / "package"
    shutil.copytree(provenance._package_folder(), folder, ignore=shutil.ignore_patterns("corpora", "__pycache__"))
    loaded = provenance.loaded_modules()
    monkeypatch.setattr(provenance, "_package_folder", lambda: folder)
    monkeypatch.setattr(provenance, "loaded_modules", lambda: loaded)
    return folder


def test_changed_code_is_shown_and_rebuilds_nothing(world: World, package: Path):
    record = world.build(RAW).record
    assert not code_changed(record.provenance)
    with open(package / "artifact" / "publish.py", "a") as file:
        file.write("# changed\n")
    assert code_changed(record.provenance)
    assert not world.build(RAW).built


def test_a_new_module_that_was_not_used_changes_nothing(world: World, package: Path):
    record = world.build(RAW).record
    (package / "new.py").write_text("")
    assert not code_changed(record.provenance)


@pytest.mark.row(23)
def test_code_edited_during_the_build_is_flagged_and_the_digest_is_that_of_the_start(world: World, package: Path):
    before = world.build(RAW).record.provenance["code"]

    def build(context: BuildContext) -> BuildResult:
        with open(package / "artifact" / "publish.py", "a") as file:
            file.write("# changed\n")
        return Parts()(context)

    after = world.build(RAW, build, force="r1").record.provenance["code"]
    assert after["digest"] == before["digest"]
    assert after["edited_while_building"] == ["artifact/publish.py"]
