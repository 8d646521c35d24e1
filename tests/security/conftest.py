"""The world of the unit tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from artifact_world import World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Recipes of every kind in `config`, no artifact yet; the working directory is the world's folder."""
    monkeypatch.chdir(tmp_path)
    return World.make(tmp_path)
