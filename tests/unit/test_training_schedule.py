"""The learning rate schedule, against closed forms and against optax."""

import numpy as np
import optax
import pytest

from marin_build.recipe.schema import AdamW, CosineSchedule
from marin_build.training.schedule import make_schedule


def adamw(learning_rate=3e-3, warmup_steps=5000, min_lr_ratio=0.1):
    return AdamW(
        type="adamw",
        learning_rate=learning_rate,
        beta1=0.9,
        beta2=0.95,
        epsilon=1e-8,
        weight_decay=0.033,
        no_weight_decay=["norms", "embeddings"],
        max_grad_norm=1.0,
        schedule=CosineSchedule(type="cosine", warmup_steps=warmup_steps, min_lr_ratio=min_lr_ratio),
    )


def test_the_reference_run_warms_up_from_zero_and_ends_at_a_tenth_of_its_peak():
    rate = make_schedule(adamw(), steps=54_931)
    assert rate(0) == 0
    assert float(rate(2500)) == pytest.approx(1.5e-3, rel=1e-6)
    assert float(rate(5000)) == pytest.approx(3e-3, rel=1e-6)
    assert float(rate(5000 + 49_931 // 2)) == pytest.approx(3e-3 * 0.55, rel=1e-4)
    assert float(rate(54_931)) == pytest.approx(3e-4, rel=1e-6)


def test_the_schedule_equals_the_one_optax_joins_from_its_parts():
    rate = make_schedule(adamw(1e-2, warmup_steps=7, min_lr_ratio=0.25), steps=40)
    joined = optax.join_schedules(
        [optax.linear_schedule(0.0, 1e-2, 7), optax.cosine_decay_schedule(1e-2, 33, alpha=0.25)], [7]
    )
    steps = np.arange(41)
    # float32 on both sides; the two round differently in the last bits.
    np.testing.assert_allclose(rate(steps), [joined(s) for s in steps], rtol=1e-6, atol=1e-10)


def test_without_a_warmup_the_first_update_is_made_at_the_peak():
    assert float(make_schedule(adamw(warmup_steps=0), steps=10)(0)) == pytest.approx(3e-3, rel=1e-6)


def test_a_run_that_is_all_warmup_never_decays():
    rate = make_schedule(adamw(warmup_steps=10), steps=10)
    assert float(rate(9)) == pytest.approx(2.7e-3, rel=1e-6)


def test_the_rate_stays_at_the_floor_after_the_last_step():
    rate = make_schedule(adamw(warmup_steps=2, min_lr_ratio=0.0), steps=10)
    assert float(rate(10)) == pytest.approx(0, abs=1e-9)
    assert float(rate(1000)) == float(rate(10))
