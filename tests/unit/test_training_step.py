"""The training step: the loss it minimises, micro-batches, donation, and the same numbers on every mesh."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from marin_build.model.transformer import initialize
from marin_build.recipe.schema import AdamW, CosineSchedule, LlamaModel
from marin_build.training.optimizer import make_optimizer
from marin_build.training.state import TrainState
from marin_build.training.step import make_train_step, make_validation_step

MODEL = LlamaModel(
    architecture="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=10_000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    initializer_range=0.1,
    tie_word_embeddings=False,
)
ADAMW = AdamW(
    type="adamw",
    learning_rate=1e-2,
    beta1=0.9,
    beta2=0.95,
    epsilon=1e-8,
    weight_decay=0.1,
    no_weight_decay=["norms", "embeddings"],
    max_grad_norm=1.0,
    schedule=CosineSchedule(type="cosine", warmup_steps=0, min_lr_ratio=0.1),
)
OPTIMIZER = make_optimizer(ADAMW, steps=10)
ONE_DEVICE = jax.make_mesh((1, 1, 1), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)


@pytest.fixture(autouse=True)
def quick_to_compile():
    """Most of the time of these tests is compilation; the code need not be fast."""
    jax.config.update("jax_disable_most_optimizations", True)
    with jax.set_mesh(ONE_DEVICE):
        yield
    jax.config.update("jax_disable_most_optimizations", False)


initialized = functools.cache(lambda: initialize(MODEL, seed=0, compute_dtype="float32"))


def start():
    """A state of its own for each caller, since the step takes it over."""
    graph, parameters = initialized()
    parameters = jax.tree.map(jnp.copy, parameters)
    return graph, TrainState(parameters, OPTIMIZER.init(parameters))


@functools.cache
def compiled(micro_batches):
    return make_train_step(initialized()[0], OPTIMIZER, z_loss=1e-4, micro_batches=micro_batches)


def batch(rows=8, tokens=16, masked=False):
    random = np.random.default_rng(0)
    made = {"tokens": jnp.asarray(random.integers(0, 64, (rows, tokens + 1)), jnp.int32)}
    if masked:
        made["mask"] = jnp.asarray(random.random((rows, tokens)) < 0.7)
    return made


def run(steps=3, micro_batches=1, masked=False):
    state = start()[1]
    step = compiled(micro_batches)
    measured = []
    for _ in range(steps):
        state, numbers = step(state, batch(masked=masked))
        measured.append([float(number) for number in numbers])
    return state, np.array(measured)


def test_the_loss_before_the_first_update_is_the_mean_cross_entropy():
    graph, state = start()
    tokens = batch()["tokens"]
    model = nnx.merge(graph, state.parameters)
    logits = model(tokens[:, :-1]) @ model.output_embedding()
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
    logsumexp = jax.nn.logsumexp(logits, axis=-1)
    _, measured = run(steps=1)
    # float32, sums over 128 tokens in another order.
    np.testing.assert_allclose(measured[0, 0], expected, rtol=1e-5)
    np.testing.assert_allclose(measured[0, 1], 1e-4 * jnp.mean(logsumexp**2), rtol=1e-3)


def uneven():
    """A batch whose micro-batches have very different numbers of trained tokens, one of them none."""
    made = batch(masked=True)
    mask = np.zeros(made["mask"].shape, bool)
    mask[0, :15], mask[1, 3], mask[2, 5:8], mask[4, 0] = True, True, True, True  # rows 3 and 7 are micro-batch 3 of 4
    return made | {"mask": jnp.asarray(mask)}


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_the_loss_is_the_mean_over_the_trained_tokens_of_the_whole_batch(micro_batches):
    graph, state = start()
    given = uneven()

    def independent(parameters):
        model = nnx.merge(graph, parameters)
        logits = model(given["tokens"][:, :-1]) @ model.output_embedding()
        picked, targets = logits[given["mask"]], given["tokens"][:, 1:][given["mask"]]
        nats = optax.softmax_cross_entropy_with_integer_labels(picked, targets)
        return nats.mean() + 1e-4 * jnp.mean(jax.nn.logsumexp(picked, axis=-1) ** 2), nats.mean()

    (_, nats), gradients = jax.value_and_grad(independent, has_aux=True)(state.parameters)
    _, measured = compiled(micro_batches)(state, given)
    # float32, sums over 20 tokens in another order.
    np.testing.assert_allclose(measured.loss, nats, rtol=1e-5)
    np.testing.assert_allclose(measured.grad_norm, optax.tree.norm(gradients), rtol=1e-4)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_batch_without_trained_tokens_gives_no_gradient_and_no_nan(micro_batches):
    state = start()[1]
    state, measured = compiled(micro_batches)(state, batch() | {"mask": jnp.zeros((8, 16), bool)})
    assert [float(number) for number in measured[:3]] == [0, 0, 0]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.parameters))


def test_the_loss_falls_on_a_batch_seen_again():
    _, measured = run(steps=6)
    assert measured[5, 0] < measured[0, 0] - 0.3


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("micro_batches", [4])
def test_micro_batches_give_the_result_of_the_whole_batch(micro_batches, masked):
    whole, measured = run(masked=masked)
    split, measured_split = run(masked=masked, micro_batches=micro_batches)
    # float32 sums in another order, then three steps of Adam, which divides small numbers by small numbers.
    np.testing.assert_allclose(measured, measured_split, rtol=2e-4, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), whole.parameters, split.parameters)


def test_the_step_takes_over_the_memory_of_its_state():
    state = start()[1]
    compiled(1)(state, batch())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_documents_of_a_row_do_not_see_each_other_when_segments_are_given():
    graph, state = start()
    step = make_validation_step(graph)
    tokens = batch(rows=1)["tokens"]
    segments = jnp.asarray([[0] * 8 + [1] * 9], jnp.int32)
    mask = jnp.arange(16)[None] >= 8
    other = tokens.at[0, :8].set(5)
    with_segments = [
        step(state.parameters, {"tokens": t, "segment_ids": segments, "mask": mask}) for t in (tokens, other)
    ]
    without = [step(state.parameters, {"tokens": t, "mask": mask}) for t in (tokens, other)]
    assert with_segments[0] == with_segments[1]
    assert without[0] != without[1]


def test_a_validation_step_sums_nats_over_the_unmasked_targets():
    graph, state = start()
    step = make_validation_step(graph)
    part = batch(rows=4)
    halves = [jnp.arange(16)[None].repeat(4, 0) < 8, jnp.arange(16)[None].repeat(4, 0) >= 8]
    summed = [float(step(state.parameters, {**part, "mask": mask})) for mask in halves]
    np.testing.assert_allclose(sum(summed), float(step(state.parameters, part)), rtol=1e-5)


ON_EIGHT_DEVICES = """
import sys; sys.path.insert(0, {here!r})
import jax, json, numpy as np, test_training_step as t
from marin_build.model.sharding import batch_sharding, parameter_shardings
from marin_build.recipe.schema import Mesh
from marin_build.training.mesh import make_mesh
losses = []
for sizes, micro in [((1, 1, 1), 1), ((8, 1, 1), 1), ((2, 2, 2), 2)]:
    devices = jax.devices()[: int(np.prod(sizes))]
    mesh = make_mesh(Mesh(data=sizes[0], fsdp=sizes[1], tensor=sizes[2]), devices)
    t.initialized.cache_clear()
    with jax.set_mesh(mesh):
        graph, state = t.start()
        state = jax.device_put(state, parameter_shardings(state, mesh))
        step = t.make_train_step(graph, t.OPTIMIZER, z_loss=1e-4, micro_batches=micro)
        batch = jax.device_put(t.batch(), batch_sharding(mesh))
        run = []
        for _ in range(4):
            state, measured = step(state, batch)
            run.append(float(measured.loss))
        losses.append(run)
print(json.dumps(losses))
"""


def test_every_mesh_gives_the_losses_of_one_device():
    script = ON_EIGHT_DEVICES.format(here=str(Path(__file__).parent))
    flags = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **flags}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    one, *others = json.loads(done.stdout.splitlines()[-1])
    for other in others:
        # float32; sums over devices come in another order.
        np.testing.assert_allclose(other, one, rtol=2e-5)
