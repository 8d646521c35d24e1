"""The pace, the progress line and the peak it is measured against."""

import logging
from types import SimpleNamespace

import pytest

from marin_build.training import peak, progress
from marin_build.training.peak import Peak, find_peak
from marin_build.training.progress import Progress


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.seconds)
    return now


A_GIGAFLOP = Peak(1e9, "test")


def make(first=0, steps=100, peak=A_GIGAFLOP):
    return Progress(
        first=first,
        steps=steps,
        tokens_per_step=1000,
        flops_per_token=1e4,
        peak=peak,
        logger=logging.getLogger("progress"),
    )


def test_the_pace_counts_training_seconds_and_not_validation(clock):
    pace = make()
    clock.seconds += 5
    with pace.paused():
        clock.seconds += 100
    clock.seconds += 5
    assert pace.measure(20) == {"train/tokens_per_second": 2000.0, "train/flops_utilization": pytest.approx(0.02)}
    assert pace.seconds == 10


def test_each_measurement_covers_the_steps_since_the_last(clock):
    pace = make()
    clock.seconds += 10
    pace.measure(10)
    clock.seconds += 1
    assert pace.measure(12)["train/tokens_per_second"] == pytest.approx(2000)


def test_the_line_tells_percent_loss_pace_utilization_and_time_left(clock):
    pace = make(first=50)
    clock.seconds += 10
    line = pace.line(60, {"train/loss": 2.34567, **pace.measure(60)})
    assert line == "step 60/100  60.0% | loss 2.3457 | 1,000 tokens/s | 1.0% of peak FLOP/s | ETA 0:00:40"


def test_an_unknown_device_has_no_utilization(clock):
    pace = make(peak=None)
    clock.seconds += 1
    metrics = pace.measure(1)
    assert "train/flops_utilization" not in metrics
    assert "peak" not in pace.line(1, {"train/loss": 1.0, **metrics})


def test_fast_steps_do_not_fill_the_log_and_the_last_line_always_comes(clock, caplog):
    caplog.set_level(logging.INFO)
    pace = make()
    for step in range(1, 101):
        clock.seconds += 0.125
        pace.show(step, {"train/loss": 1.0, **pace.measure(step)})
    assert [record.message.split()[1] for record in caplog.records] == ["1/100", "41/100", "81/100", "100/100"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("TPU v4", 275e12), ("TPU v5 lite", 197e12), ("TPU v5", 459e12), ("NVIDIA H100 80GB HBM3", 989e12)],
)
def test_known_devices_have_their_datasheet_peak(kind, expected):
    devices = [SimpleNamespace(device_kind=kind, platform="accelerator")] * 4
    assert find_peak(devices).flops_per_second == 4 * expected


def test_a_device_that_is_not_in_the_table_has_no_peak():
    assert find_peak([SimpleNamespace(device_kind="Abacus 3000", platform="abacus")]) is None


def test_the_peak_of_a_cpu_is_measured_and_says_so(monkeypatch):
    monkeypatch.setattr(peak, "MATRIX_SIZE", 256)
    found = find_peak([SimpleNamespace(device_kind="cpu", platform="cpu")] * 8)
    assert 1e8 < found.flops_per_second < 1e14
    assert "measured on this CPU" in found.origin
