"""Fixtures of the unit tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from artifact_world import World

from marin_build.artifact import provenance

MEMORY = Path("/dev/shm")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Recipes of every kind in `config`, no artifact yet; the working directory is the world's folder."""
    monkeypatch.chdir(tmp_path)
    return World.make(tmp_path)


@pytest.fixture
def memory_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A world in memory, without a look at git and at the code: for tests that build hundreds of times."""
    monkeypatch.setattr(provenance, "circumstances", lambda recipes, command: {})
    monkeypatch.setattr(provenance, "code_hashes", dict)
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        monkeypatch.chdir(folder)
        yield World.make(Path(folder))
        monkeypatch.undo()
