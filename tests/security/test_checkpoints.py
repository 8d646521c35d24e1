"""A checkpoint from somewhere else is arrays or an error in one line; nothing pickled is loaded, whatever its name."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from forgery import entry

from marin_build.errors import MarinError
from marin_build.training.checkpoint import Checkpoints, first_problem
from marin_build.training.state import TrainState

pytestmark = pytest.mark.filterwarnings("ignore:coroutine", "ignore::pytest.PytestUnraisableExceptionWarning")
"""Orbax leaves its own unfinished reads behind when one of them fails."""

IDENTITY = {"fingerprint": "0" * 32, "data": "1" * 32}


class Bomb:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (self.command,)


def state(value: float) -> TrainState:
    return TrainState({"w": jnp.full((4, 4), value)}, {"m": jnp.full((4,), value)})


def open_checkpoints(folder: Path) -> Checkpoints:
    return Checkpoints(
        folder,
        identity=IDENTITY,
        is_kept=lambda step: True,
        check_lease=lambda: None,
        logger=logging.getLogger("test"),
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    with open_checkpoints(folder) as checkpoints:
        checkpoints.save(10, state(1), {})
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def restored(folder: Path) -> Any:
    with open_checkpoints(folder) as checkpoints:
        return checkpoints.restore(state(0))


def manifest(folder: Path, **changes: Any) -> None:
    path = folder / "10/manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_was_saved_comes_back(folder: Path):
    assert float(restored(folder).state.parameters["w"][0, 0]) == 1


def test_a_bomb_under_every_name_in_a_checkpoint_does_not_go_off(folder: Path, tmp_path: Path):
    """Each file of the checkpoint, and those that other libraries look for, hold a pickle that would run a command."""
    bomb = pickle.dumps(Bomb(f"touch {tmp_path}/ran"))
    pickle.loads(pickle.dumps(Bomb(f"touch {tmp_path}/primed")))
    assert (tmp_path / "primed").exists(), "the bomb works"
    inside = [path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json"]
    assert len(inside) > 4
    for path in inside:
        kept = path.read_bytes()
        path.write_bytes(bomb)
        shutil.copytree(folder, tmp_path / "copy")
        (tmp_path / "copy/10/manifest.json").unlink()  # never committed, so that its files are not even compared
        try_all(tmp_path / "copy")
        path.write_bytes(kept)
        shutil.rmtree(tmp_path / "copy")
    for name in (
        "checkpoint",
        "data.pkl",
        "model.pt",
        "pytorch_model.bin",
        "state.pickle",
        "x.npy",
        "x.npz",
        "x.joblib",
    ):
        for place in (folder, folder / "10", folder / "10/parameters"):
            (place / name).write_bytes(bomb)
    with zipfile.ZipFile(folder / "10/archive.pt", "w") as archive:
        archive.writestr("archive/data.pkl", bomb)
    np.save(folder / "10/objects.npy", np.array([Bomb(f"touch {tmp_path}/ran")], dtype=object), allow_pickle=True)
    try_all(folder)
    assert not (tmp_path / "ran").exists()


def try_all(folder: Path) -> None:
    try:
        restored(folder)
    except MarinError as error:
        assert len(str(error)) < 2000  # noqa: PT017


@pytest.mark.parametrize(
    "files",
    [
        "x",
        None,
        [1],
        [{"path": "x"}],
        [entry(path="/etc/passwd")],
        [entry(path="../../../secret")],
        [entry(path="a\n")],
        [entry(size=-1)],
        [entry(), entry()],
    ],
    ids=lambda files: ascii(files)[:40],
)
def test_a_manifest_that_leads_elsewhere_is_a_damaged_one(folder: Path, files: Any):
    manifest(folder, files=files)
    problem = first_problem(folder / "10")
    assert problem
    assert problem.startswith("manifest.json cannot be read: ValueError")
    assert problem.isprintable()


@pytest.mark.parametrize("data", [b"[" * 100_000, b"{}", b"\xff", b'{"files": NaN}'])
def test_what_is_no_manifest_is_a_damaged_one(folder: Path, data: bytes):
    (folder / "10/manifest.json").write_bytes(data)
    assert "manifest.json cannot be read" in str(first_problem(folder / "10"))


def test_a_link_in_a_checkpoint_is_not_followed(folder: Path, tmp_path: Path):
    (folder / "10/parameters").rename(tmp_path / "parameters")
    (folder / "10/parameters").symlink_to(tmp_path / "parameters")
    assert str(first_problem(folder / "10")).endswith("is missing, or a link")


@pytest.mark.parametrize(
    "saved_with",
    [None, [], {}, {"identity": "x"}, {"identity": IDENTITY, "state_digest": 1, "notes": {}}, {"identity": IDENTITY}],
    ids=ascii,
)
def test_what_was_written_beside_a_state_is_checked(folder: Path, saved_with: Any):
    path = folder / "10/_CHECKPOINT_METADATA"
    path.write_text(json.dumps({**json.loads(path.read_text()), "custom_metadata": saved_with}))
    (folder / "10/manifest.json").unlink()
    assert restored(folder) is None


@pytest.mark.parametrize("name", ["٣", "007", "-1", "9" * 200, "10 ", "1e1"])
def test_only_plain_numbers_are_steps(folder: Path, name: str):
    (folder / name).mkdir()
    assert open_checkpoints(folder).steps() == [10]
