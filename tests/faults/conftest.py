"""Fixtures of the fault tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from repository import (
    BYTES,
    HELD_OUT,
    RAW,
    TOKENS,
    Repository,
    gate,
    make_repository,
    new_repository,
    repository,
    snakemake,
)
from training_runner import Runner

from marin_build.cli import main

__all__ = ["gate", "new_repository", "repository", "snakemake"]


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner(tmp_path_factory.mktemp("training")) as made:
        yield made


@pytest.fixture(scope="session")
def straight(runner: Runner) -> dict[str, Any]:
    """The result of a training that nothing disturbed, in the world `straight`."""
    return runner.run("straight")


@pytest.fixture(scope="session")
def prepared_once(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    made = make_repository(tmp_path_factory.mktemp("prepared") / "repository")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made.folder)
        patch.delenv("MARIN_PREFIX", raising=False)
        for target in (RAW, BYTES, TOKENS, HELD_OUT):
            assert main(["build", target]) == 0
    return made


@pytest.fixture
def prepared(prepared_once: Repository, tmp_path: Path) -> Repository:
    """A repository in which all that the tiny model is made from is finished."""
    return Repository(Path(shutil.copytree(prepared_once.folder, tmp_path / "repository", symlinks=True)))
