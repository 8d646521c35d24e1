"""Worlds of artifacts on every kind of store, for tests that must hold on all of them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import flaky_store
import pytest
from artifact_world import World
from object_servers import BUCKET, gcs_server, missing_packages, s3_server

from marin_build.artifact import fsspec_bucket

SERVERS = {"gs": gcs_server, "s3": s3_server}
KINDS = ("disk", "memory", "flaky", "gs", "s3")
OBJECTS = KINDS[1:]
CONDITIONAL = ("disk", "gs", "s3")
"""The kinds whose exchange is one step."""

_numbers = itertools.count()


@pytest.fixture(scope="session")
def servers() -> Iterator[dict[str, str]]:
    """Starts servers as they are asked for; they and their environment variables last for the session."""
    with ExitStack() as stack:
        yield _Servers(stack)


class _Servers(dict[str, str]):
    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __missing__(self, kind: str) -> str:
        os.environ.update(self._stack.enter_context(SERVERS[kind]()))
        self[kind] = f"{kind}://{BUCKET}"
        return self[kind]


def make_world(kind: str, folder: Path, servers: dict[str, str]) -> World:
    if kind in SERVERS and (missing := missing_packages()):
        pytest.skip(f"needs {missing}")
    if kind == "disk":
        return World.make(folder)
    place = servers[kind] if kind in SERVERS else f"{kind}://{BUCKET}"
    return World.make(folder, f"{place}/{os.getpid()}-{next(_numbers)}")


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path, servers: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    """A world on the kind of store that the test is parametrised with; a flaky one fails in a tenth of its calls."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fsspec_bucket, "FIRST_PAUSE_SECONDS", 0.001)
    if request.param == "flaky":
        flaky_store.TROUBLE.start(7, errors=0.1, lost_answers=0.05, short_reads=0.1, old_listings=0.3)
    yield make_world(request.param, tmp_path, servers)
    flaky_store.TROUBLE.be_good()


def on(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("world", kinds, indirect=True)
