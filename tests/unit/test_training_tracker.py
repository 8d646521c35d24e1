"""Weights & Biases: a copy that may fail, loudly and once, without stopping anything."""

import logging
import sys
from types import SimpleNamespace

import pytest

from marin_build.settings import Settings
from marin_build.training.tracker import Tracker


class FakeRun:
    def __init__(self, fails_at=None):
        self.lines, self.exit_code, self.fails_at = [], None, fails_at

    def log(self, metrics, step):
        if step == self.fails_at:
            raise ConnectionError("the network is down")
        self.lines.append((step, metrics))

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package; its `run` is what init returns, its `options` what init was given."""
    fake = SimpleNamespace(run=FakeRun(), options=None, Settings=lambda **options: options, teardown=lambda: None)

    def init(**options):
        fake.options = options
        if isinstance(fake.run, Exception):
            raise fake.run
        return fake.run

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    return fake


@pytest.fixture
def real_wandb(tmp_path, monkeypatch):
    """The package itself, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    yield
    import wandb

    wandb.teardown()  # it keeps the folder and the environment of its first run


def tracker(**settings):
    return Tracker(
        Settings(**settings), name="checkpoints/x/dev", run_id="x", config={"steps": 3}, logger=logging.getLogger("t")
    )


def said(caplog):
    """Lines of ours; the real package has a logger of its own."""
    return [record.getMessage() for record in caplog.records if record.name == "t"]


def test_metrics_are_copied_under_their_steps(wandb):
    tracked = tracker()
    tracked.log(10, {"train/loss": 1.0})
    tracked.finish()
    assert wandb.run.lines == [(10, {"train/loss": 1.0})]
    assert wandb.run.exit_code == 0
    assert (wandb.options["mode"], wandb.options["config"]) == ("offline", {"steps": 3})


@pytest.mark.row(31)
def test_a_failure_is_said_once_and_ends_the_tracking(wandb, caplog):
    wandb.run = FakeRun(fails_at=20)
    tracked = tracker()
    for step in (10, 20, 30):
        tracked.log(step, {})
    tracked.finish()
    assert [step for step, _ in wandb.run.lines] == [10]
    assert len(caplog.records) == 1
    assert "failed to log and is off for this run" in caplog.text
    assert "the network is down" in caplog.text


@pytest.mark.row(31)
def test_a_tracker_that_does_not_start_is_no_reason_to_stop(wandb, caplog):
    wandb.run = RuntimeError("no such\naccount")
    tracked = tracker(wandb="online")
    tracked.log(10, {})
    tracked.finish()
    (line,) = said(caplog)
    assert "no such account" in line


@pytest.mark.row(31)
@pytest.mark.usefixtures("real_wandb")
def test_without_a_network_the_run_is_kept_offline_to_be_sent_later(tmp_path, monkeypatch, caplog):
    """At an address where nobody listens."""
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    tracked = tracker(wandb="online")
    tracked.log(10, {"train/loss": 1.0})
    tracked.finish()
    (line,) = said(caplog)
    assert "kept offline; `wandb sync` uploads it later" in line
    assert "\n" not in line
    (sent_later,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"train/loss" in sent_later.read_bytes()


def test_disabled_means_that_wandb_is_not_even_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    tracker(wandb="disabled").log(10, {})


def test_the_variables_of_wandb_keep_their_meaning(wandb, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    tracker(wandb="offline")
    assert (wandb.options["mode"], wandb.options["project"]) == ("online", None)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    wandb.options = None
    tracker(wandb="online")
    assert wandb.options is None


@pytest.mark.usefixtures("real_wandb")
def test_the_real_package_writes_an_offline_run_into_the_working_directory(tmp_path, caplog):
    tracked = tracker()
    tracked.log(0, {"eval/loss": 2.0})
    tracked.log(10, {"train/loss": 1.0})
    tracked.finish()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert said(caplog) == []
