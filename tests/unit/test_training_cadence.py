"""When lines, validations and checkpoints are due."""

from marin_build.training import cadence
from marin_build.training.cadence import Cadence


def make(**changes):
    usual = dict(
        steps=25,
        log_every_steps=7,
        validate_every_steps=10,
        keep_every_steps=10,
        rolling_steps=None,
        rolling_seconds=None,
    )
    return Cadence(**{**usual, **changes})


def steps(decide):
    return [step for step in range(26) if decide(step)]


def test_validation_is_at_the_start_at_every_multiple_and_at_the_end():
    assert steps(make().validates) == [0, 10, 20, 25]
    assert steps(make(validate_every_steps=None).validates) == []


def test_lines_are_at_every_multiple_wherever_validation_is_and_at_the_end():
    assert steps(make().writes) == [0, 7, 10, 14, 20, 21, 25]


def test_multiples_and_the_last_checkpoint_are_kept():
    assert steps(make().keeps) == [10, 20, 25]
    assert steps(make(keep_every_steps=None).keeps) == [25]


def test_rolling_checkpoints_come_by_steps_and_by_the_clock(monkeypatch):
    assert steps(make(rolling_steps=8).saves)[1:] == [8, 10, 16, 20, 24, 25]
    assert steps(make().saves) == [10, 20, 25]
    monkeypatch.setattr(cadence.time, "monotonic", lambda: 100.0)
    assert make(rolling_seconds=60).is_overdue(saved_at=40.0)
    assert not make(rolling_seconds=60).is_overdue(saved_at=40.1)
    assert not make().is_overdue(saved_at=0.0)
