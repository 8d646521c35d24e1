"""metrics.jsonl: rising steps, none twice, cut back on resume, readable after any crash."""

import json
import logging
from pathlib import Path

import pytest

from marin_build.errors import MarinError
from marin_build.training.metrics import MetricsFile, read_metrics

LOGGER = logging.getLogger("test")


def open_file(path, keep_through=10**9):
    return MetricsFile(path, keep_through=keep_through, logger=LOGGER)


def written(path, steps):
    file = open_file(path)
    for step in steps:
        file.write(step, {"train/loss": 1.0 / (step + 1)})
    file.close()
    return path


def test_each_line_is_one_object_with_its_step(tmp_path):
    path = written(tmp_path / "metrics.jsonl", [0, 10, 20])
    assert [line["step"] for line in read_metrics(path)] == [0, 10, 20]
    assert read_metrics(path)[1] == {"step": 10, "train/loss": 1 / 11}


def test_what_is_measured_at_the_same_step_joins_its_line(tmp_path):
    file = open_file(tmp_path / "metrics.jsonl")
    file.write(10, {"train/loss": 2.0})
    file.write(10, {"eval/loss": 3.0})
    file.write(20, {"train/loss": 1.0})
    file.close()
    assert read_metrics(file.path) == [
        {"step": 10, "train/loss": 2.0, "eval/loss": 3.0},
        {"step": 20, "train/loss": 1.0},
    ]


def test_resuming_cuts_the_file_back_to_the_restored_step(tmp_path):
    path = written(tmp_path / "metrics.jsonl", [0, 10, 20, 30])
    file = open_file(path, keep_through=20)
    assert file.last["step"] == 20
    file.write(20, {"eval/loss": 3.0})
    file.write(30, {"train/loss": 9.0})
    file.close()
    assert [(line["step"], line.get("eval/loss")) for line in read_metrics(path)] == [
        (0, None),
        (10, None),
        (20, 3.0),
        (30, None),
    ]


def test_a_restart_at_the_seed_empties_the_file(tmp_path):
    path = written(tmp_path / "metrics.jsonl", [10, 20])
    open_file(path, keep_through=0).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize("torn", [b'{"step": 30, "tra', b'{"step": 30, "train/loss": 1.0}', b"\x00\x00\x00"])
def test_a_line_torn_by_a_crash_is_dropped(tmp_path, torn):
    path = written(tmp_path / "metrics.jsonl", [10, 20])
    with path.open("ab") as file:
        file.write(torn)
    open_file(path).close()
    assert [line["step"] for line in read_metrics(path)] == [10, 20]


def test_an_unreadable_line_in_the_middle_is_said(tmp_path, caplog):
    path = written(tmp_path / "metrics.jsonl", [10])
    with path.open("ab") as file:
        file.write(b"no metrics\n" + json.dumps({"step": 20}).encode() + b"\n")
    open_file(path).close()
    assert [line["step"] for line in read_metrics(path)] == [10]
    assert "metrics.jsonl:2 is no line of metrics" in caplog.text


def test_a_number_without_a_json_form_is_refused(tmp_path):
    file = open_file(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="JSON compliant"):
        file.write(10, {"train/loss": float("nan")})
    file.write(10, {"train/loss": 1.0})
    file.close()
    assert read_metrics(file.path) == [{"step": 10, "train/loss": 1.0}]


def test_a_full_disk_is_one_clear_line(tmp_path):
    file = open_file(tmp_path / "metrics.jsonl")
    file._file.close()
    file._file = Path("/dev/full").open("r+b", buffering=0)  # noqa: SIM115
    with pytest.raises(MarinError, match=r"the disk is full: .*metrics\.jsonl"):
        file.write(10, {"train/loss": 1.0})
