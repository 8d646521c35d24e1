"""One trajectory of 100 steps against torch: clip by the global norm, AdamW with decay by group, warmup and cosine.

The gradients are a fixed function of the parameters (a quadratic with a moving target), so an error in any step carries
into all later ones. Both sides compute in float32. They round differently: after 100 steps parameters of size 1 agree
to about 1e-6, and torch adds 1e-6 to the norm when it clips, which ours (and optax) does not.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from marin_build.recipe.schema import AdamW, CosineSchedule
from marin_build.training.optimizer import make_optimizer

torch = pytest.importorskip("torch", reason="needs the parity extra")
pytestmark = pytest.mark.parity

STEPS, WARMUP, PEAK, FLOOR = 100, 10, 3e-2, 0.1
RECIPE = AdamW(
    type="adamw",
    learning_rate=PEAK,
    beta1=0.9,
    beta2=0.95,
    epsilon=1e-8,
    weight_decay=0.033,
    no_weight_decay=["norms", "embeddings"],
    max_grad_norm=1.0,
    schedule=CosineSchedule(type="cosine", warmup_steps=WARMUP, min_lr_ratio=FLOOR),
)
DECAYED = {"query": True, "lm_head": True, "embedding": False, "scale": False}


def start() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    shapes = {"query": (2, 4, 4), "lm_head": (4, 9), "embedding": (9, 4), "scale": (4,)}
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def target(step: int, name: str) -> np.float32:
    return np.float32(math.sin(0.3 * step + len(name)))


def tree(flat):
    """The flat parameters under the paths of the model's table."""
    return {
        "layers": {"attention": {"query": flat["query"]}},
        "lm_head": flat["lm_head"],
        "embedding": flat["embedding"],
        "final_norm": {"scale": flat["scale"]},
    }


def flat(tree):
    return {
        "query": tree["layers"]["attention"]["query"],
        "lm_head": tree["lm_head"],
        "embedding": tree["embedding"],
        "scale": tree["final_norm"]["scale"],
    }


def ours() -> list[dict[str, np.ndarray]]:
    optimizer = make_optimizer(RECIPE, STEPS)
    parameters = tree({name: jnp.asarray(value) for name, value in start().items()})
    state, trajectory = optimizer.init(parameters), []

    @jax.jit
    def update(gradients, state, parameters):
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    for step in range(STEPS):
        gradients = tree({name: 3 * (value - target(step, name)) for name, value in flat(parameters).items()})
        parameters, state = update(gradients, state, parameters)
        trajectory.append({name: np.asarray(value) for name, value in flat(parameters).items()})
    return trajectory


def theirs() -> list[dict[str, np.ndarray]]:
    parameters = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in start().items()}
    groups = [
        {"params": [p for name, p in parameters.items() if DECAYED[name]], "weight_decay": RECIPE.weight_decay},
        {"params": [p for name, p in parameters.items() if not DECAYED[name]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(RECIPE.beta1, RECIPE.beta2), eps=RECIPE.epsilon)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _torch_factor)
    trajectory = []
    for step in range(STEPS):
        for name, value in parameters.items():
            value.grad = 3 * (value.detach() - float(target(step, name)))
        torch.nn.utils.clip_grad_norm_(list(parameters.values()), RECIPE.max_grad_norm)
        optimizer.step()
        schedule.step()
        trajectory.append({name: value.detach().numpy().copy() for name, value in parameters.items()})
    return trajectory


def _torch_factor(step: int) -> float:
    if step < WARMUP:
        return step / WARMUP
    progress = (step - WARMUP) / (STEPS - WARMUP)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))


def test_a_hundred_steps_of_adamw_equal_those_of_torch():
    for step, (mine, other) in enumerate(zip(ours(), theirs(), strict=True)):
        for name in mine:
            np.testing.assert_allclose(mine[name], other[name], rtol=2e-5, atol=5e-6, err_msg=f"{name} at step {step}")


def test_the_trajectory_moves_far_enough_to_mean_something():
    first, last = start(), ours()[-1]
    assert all(np.abs(last[name] - first[name]).max() > 0.3 for name in first)
