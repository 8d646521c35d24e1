"""Training on several devices and in several processes."""

from __future__ import annotations

import socket

import pytest
from training_runner import Runner
from training_world import TrainingWorld


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    with Runner(tmp_path_factory.mktemp("training")) as made:
        yield made


def test_a_batch_that_the_devices_cannot_share_is_one_clear_line(runner):
    output = runner.start("indivisible", devices=8, global_batch_size=12).finish(code=2)
    assert "global_batch_size 12 is not divisible by the 8 devices that share a batch" in output


def test_two_processes_train_together_to_the_losses_of_one(runner):
    short = {"steps": 10, "settings": {"rolling_checkpoint_steps": 6}}
    alone = runner.run("alone", devices=4, **short)
    TrainingWorld(runner.folder / "together")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pair = [runner.start("together", devices=2, distributed=[rank, 2, port], **short) for rank in range(2)]
    first, second = (process.result() for process in pair)
    assert first["details"]["processes"] == 2
    assert first["digest"] == second["digest"]
    for one, two in zip(runner.losses("alone"), runner.losses("together"), strict=True):
        # The same sums over four devices; the collectives of two processes may add in another order.
        assert two == pytest.approx(one, rel=1e-4)
    assert first["metrics"]["eval/bpb"] == pytest.approx(alone["metrics"]["eval/bpb"], rel=1e-4)
