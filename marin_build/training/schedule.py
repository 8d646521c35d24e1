"""The learning rate as a function of the step: linear warmup from 0, then cosine down to a fraction of the peak.

Step s is the number of updates already made, so the first update runs at step 0 (with a learning rate of 0 when there
is a warmup) and the last one at step `steps - 1`, one step short of the floor. This is the convention of Levanter,
whose DCLM runs the reference recipe reproduces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax.numpy as jnp

from marin_build.recipe.schema import AdamW

if TYPE_CHECKING:
    import jax

Schedule = Callable[["jax.Array | int"], "jax.Array"]


def make_schedule(optimizer: AdamW, steps: int) -> Schedule:
    """Return the learning rate by step, float32, for a run of `steps` updates.

    The cosine takes all steps that the warmup leaves. It ends at `min_lr_ratio` × the peak and stays there.

    Source: Levanter's `OptimizerConfig.lr_scheduler` (warmup joined to `optax.cosine_decay_schedule`).
    """
    peak, floor = optimizer.learning_rate, optimizer.schedule.min_lr_ratio
    warmup = optimizer.schedule.warmup_steps
    decay = max(steps - warmup, 1)

    def learning_rate(step: jax.Array | int) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        rising = peak * step / max(warmup, 1)
        progress = jnp.clip((step - warmup) / decay, 0.0, 1.0)
        falling = peak * (floor + (1 - floor) * 0.5 * (1 + jnp.cos(jnp.pi * progress)))
        return jnp.where(step < warmup, rising, falling)

    return learning_rate
