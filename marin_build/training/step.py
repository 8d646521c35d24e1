"""One training step and one validation step, as compiled functions of plain trees.

    B batch   T tokens that are predicted   M micro-batches   b = B / M rows of one

A batch is a dictionary of device arrays: `tokens` [B, T + 1], and where there are any `segment_ids` [B, T + 1] and
`mask` [B, T]. Inputs are tokens[:, :-1], targets are tokens[:, 1:].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from marin_build.model.sharding import constrain, parameter_shardings
from marin_build.training.loss import cross_entropy
from marin_build.training.state import TrainState

DeviceBatch = dict[str, jax.Array]


class Measured(NamedTuple):
    """What one step measured, as float32 scalars, still on the device."""

    loss: jax.Array
    """Cross-entropy in nats a token, before the update."""
    z_loss: jax.Array
    """What the z-loss adds to it in the loss that is minimised."""
    grad_norm: jax.Array
    """Global norm of the gradient before it is clipped."""
    parameter_norm: jax.Array
    """Global norm of the parameters after the update: not finite when the update ruined them."""


TrainStep = Callable[[TrainState, DeviceBatch], tuple[TrainState, Measured]]
ValidationStep = Callable[[Any, DeviceBatch], jax.Array]


def make_train_step(
    graph: nnx.GraphDef, optimizer: optax.GradientTransformation, *, z_loss: float, micro_batches: int
) -> TrainStep:
    """Return the jitted step, which takes over the memory of the state it is given (donation).

    With several micro-batches their gradients are summed in float32, which differs from one whole batch only in the
    order of sums.
    """

    def step(state: TrainState, batch: DeviceBatch) -> tuple[TrainState, Measured]:
        gradients, (total, nats) = _gradients(graph, state.parameters, batch, z_loss, micro_batches)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.parameters)
        parameters = optax.apply_updates(state.parameters, updates)
        norms = optax.tree.norm(gradients), optax.tree.norm(parameters)
        return TrainState(parameters, optimizer_state), Measured(nats, total - nats, *norms)

    return jax.jit(step, donate_argnums=0)


def make_validation_step(graph: nnx.GraphDef) -> ValidationStep:
    """Return the jitted function from (parameters, batch) to the sum of nats over the batch's unmasked targets."""

    def step(parameters: Any, batch: DeviceBatch) -> jax.Array:
        return _sums(graph, parameters, batch, z_loss=0.0)[1]

    return jax.jit(step)


def _sums(graph: nnx.GraphDef, parameters: Any, batch: DeviceBatch, z_loss: float) -> tuple[jax.Array, jax.Array]:
    """(loss that is minimised, cross-entropy), summed over the unmasked targets."""
    model = nnx.merge(graph, parameters)
    tokens, segment_ids = batch["tokens"], batch.get("segment_ids")
    hidden = model(tokens[:, :-1], None if segment_ids is None else segment_ids[:, :-1])
    return cross_entropy(hidden, model.output_embedding(), tokens[:, 1:], batch.get("mask"), z_loss=z_loss)


def _gradients(
    graph: nnx.GraphDef, parameters: Any, batch: DeviceBatch, z_loss: float, micro_batches: int
) -> tuple[Any, tuple[jax.Array, jax.Array]]:
    """The gradient of the mean loss, and the means (loss that is minimised, cross-entropy)."""
    targets = _count(batch)

    def loss(parameters: Any, part: DeviceBatch) -> tuple[jax.Array, jax.Array]:
        total, nats = _sums(graph, parameters, part, z_loss)
        return total / targets, nats / targets

    differentiate = jax.value_and_grad(loss, has_aux=True)
    if micro_batches == 1:
        (total, nats), gradients = differentiate(parameters, batch)
        return gradients, (total, nats)

    def add(sums: Any, part: DeviceBatch) -> tuple[Any, None]:
        (total, nats), gradients = differentiate(parameters, part)
        return _as_parameters(jax.tree.map(jnp.add, sums, (gradients, (total, nats)))), None

    zero = (jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), parameters), (jnp.float32(0), jnp.float32(0)))
    (gradients, means), _ = jax.lax.scan(add, _as_parameters(zero), _split(batch, micro_batches))
    return gradients, means


def _count(batch: DeviceBatch) -> jax.Array | int:
    """Unmasked targets of the whole batch; 1 where there are none, so that their mean loss is 0 and not 0 / 0."""
    rows, width = batch["tokens"].shape
    return rows * (width - 1) if "mask" not in batch else jnp.maximum(batch["mask"].sum(), 1)


def _split(batch: DeviceBatch, parts: int) -> DeviceBatch:
    """[B, …] → [M, b, …]. Part m has the rows m, m + M, …, so each device splits the rows it has and none moves."""

    def split(x: jax.Array) -> jax.Array:
        x = jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0)
        return constrain(x, (None, "batch") + (None,) * (x.ndim - 2))

    return jax.tree.map(split, batch)


def _as_parameters(sums: tuple[Any, Any]) -> tuple[Any, Any]:
    """Keep summed gradients split over the devices as the parameters are."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return sums
    gradients, means = sums
    return jax.lax.with_sharding_constraint(gradients, parameter_shardings(gradients, mesh)), means
