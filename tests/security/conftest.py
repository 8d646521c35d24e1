"""The world of the unit tests, and the repository of the workflow tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from artifact_world import World
from repository import repository, snakemake

__all__ = ["repository", "snakemake", "world"]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Recipes of every kind in `config`, no artifact yet; the working directory is the world's folder."""
    monkeypatch.chdir(tmp_path)
    return World.make(tmp_path)
