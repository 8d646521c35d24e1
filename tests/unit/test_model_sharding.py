"""One device against eight: the same first values, the same losses over several AdamW steps, and where arrays live.

The steps run in one process with eight virtual CPU devices; run as a script, this file prints what they measured.
"""

from __future__ import annotations

import json
import re
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from llamas import TIED, TINY, on_virtual_devices

MESHES = {
    "one device": (1, 1, 1),
    "data 8": (8, 1, 1),
    "fsdp 8": (1, 8, 1),
    "data 4, fsdp 2": (4, 2, 1),
    "data 2, fsdp 2, tensor 2": (2, 2, 2),
}
STEPS, ROWS, TOKENS = 4, 8, 24
TOLERANCE = 1e-5
"""Relative, in float32. Sums over devices come in another order, and each step carries the differences on: about 2e-7
is seen after four."""


@cache
def measured() -> dict:
    """What the script measured, by mesh, and its warnings."""
    results, errors = on_virtual_devices(Path(__file__), 8)
    return {**results, "stderr": errors}


@pytest.mark.parametrize(
    ("case", "mesh"), [("untied", mesh) for mesh in list(MESHES)[1:]] + [("tied", "data 2, fsdp 2, tensor 2")]
)
def test_every_mesh_gives_the_losses_of_one_device(case, mesh):
    one, other = measured()[case]["one device"]["losses"], measured()[case][mesh]["losses"]
    assert one[-1] < one[0] - 0.1  # the steps do learn
    np.testing.assert_allclose(other, one, rtol=TOLERANCE)


@pytest.mark.parametrize("mesh", list(MESHES)[1:])
def test_first_values_have_the_same_bits_on_every_mesh(mesh):
    assert measured()["untied"][mesh]["first values"] == measured()["untied"]["one device"]["first values"]


@pytest.mark.parametrize(("mesh", "share"), [("data 8", 1), ("fsdp 8", 1 / 8), ("data 2, fsdp 2, tensor 2", 1 / 4)])
def test_parameters_and_their_moments_are_split_over_fsdp_and_tensor(mesh, share):
    # Scales of norms and the step counter are on every device: 1.5% of this tiny state.
    assert measured()["untied"][mesh]["share of the state"] == pytest.approx(share, abs=0.02)


def test_no_array_is_repeated_on_every_device_because_the_compiler_found_no_other_way():
    assert not re.search("involuntary", measured()["stderr"], re.IGNORECASE)


def test_data_parallel_steps_move_no_parameters_and_fsdp_gathers_them():
    assert measured()["untied"]["one device"]["collectives"] == []
    assert measured()["untied"]["data 8"]["collectives"] == ["all-reduce"]
    assert "all-gather" in measured()["untied"]["fsdp 8"]["collectives"]
    # An all-to-all would mean that activations change hands between layers.
    assert "all-to-all" not in measured()["untied"]["fsdp 8"]["collectives"]


def test_the_tpu_kernel_runs_on_each_devices_rows_and_heads():
    assert measured()["largest difference of the TPU kernel on a mesh"] < 1e-5


# ---- the script ------------------------------------------------------------------------------------------------------


def measure() -> dict:
    tied = ("one device", "data 2, fsdp 2, tensor 2")
    return {
        "untied": {name: run(TINY, *MESHES[name]) for name in MESHES},
        "tied": {name: run(TIED, *MESHES[name]) for name in tied},
        "largest difference of the TPU kernel on a mesh": kernel_difference(),
    }


def run(config, data: int, fsdp: int, tensor: int) -> dict:
    """Several AdamW steps on one mesh, as the trainer makes them."""
    import jax
    import optax

    from marin_build.model.sharding import batch_sharding, parameter_shardings
    from marin_build.model.transformer import initialize
    from marin_build.recipe.schema import Mesh
    from marin_build.training.mesh import make_mesh

    mesh = make_mesh(Mesh(data=data, fsdp=fsdp, tensor=tensor), jax.devices()[: data * fsdp * tensor])
    with jax.set_mesh(mesh):
        graph, parameters = initialize(config, seed=0, compute_dtype="float32")
        first = [np.asarray(leaf).tobytes().hex() for leaf in jax.tree.leaves(parameters)]
        optimizer = optax.adamw(1e-2)
        shardings = parameter_shardings(jax.eval_shape(optimizer.init, parameters), mesh)
        state = (parameters, jax.jit(optimizer.init, out_shardings=shardings)(parameters))
        held = [(leaf.addressable_shards[0].data.nbytes, leaf.nbytes) for leaf in jax.tree.leaves(state)]
        batches = [jax.device_put(batch(config, step), batch_sharding(mesh)) for step in range(STEPS)]
        step = jax.jit(partial(train_step, graph, optimizer), donate_argnums=0)
        compiled = step.lower(state, *batches[0]).compile()
        losses = []
        for tokens, segment_ids in batches:
            state, loss = compiled(state, tokens, segment_ids)
            losses.append(float(loss))
    return {
        "losses": losses,
        "first values": first,
        "share of the state": sum(mine for mine, _ in held) / sum(whole for _, whole in held),
        "collectives": collectives(compiled.as_text()),
    }


def train_step(graph, optimizer, state, tokens, segment_ids):
    import jax
    import optax
    from flax import nnx

    from marin_build.model.sharding import parameter_shardings
    from marin_build.training.loss import cross_entropy

    def loss(parameters):
        model = nnx.merge(graph, parameters)
        hidden = model(tokens[:, :-1], segment_ids)
        return cross_entropy(hidden, model.output_embedding(), tokens[:, 1:], z_loss=1e-4, chunk=7)[0] / (ROWS * TOKENS)

    parameters, moments = state
    value, gradients = jax.value_and_grad(loss)(parameters)
    updates, moments = optimizer.update(gradients, moments, parameters)
    state = (optax.apply_updates(parameters, updates), moments)
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(state, parameter_shardings(state, mesh)), value


def batch(config, step: int):
    """Tokens [B, T + 1] that repeat, so that there is something to learn, and documents [B, T]."""
    random = np.random.default_rng(step)
    period = random.integers(0, config.vocab_size // 4, (ROWS, 5))
    tokens = np.tile(period, (1, TOKENS // 5 + 1))[:, : TOKENS + 1].astype(np.int32)
    return tokens, np.cumsum(random.random((ROWS, TOKENS)) < 0.1, axis=1).astype(np.int32)


def collectives(compiled_text: str) -> list[str]:
    names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return sorted(set(re.findall(rf" ({names})(?:-start)?\(", compiled_text)))


def kernel_difference() -> float:
    """Splash attention, interpreted on a mesh of rows and heads, against the plain formula."""
    import jax
    import jax.numpy as jnp

    from marin_build.model import kernels
    from marin_build.model.attention import attention
    from marin_build.recipe.schema import Mesh
    from marin_build.training.mesh import make_mesh

    random = np.random.default_rng(0)
    query, key, value = (jnp.asarray(random.normal(size=(4, 130, heads, 64)), jnp.float32) for heads in (4, 2, 2))
    segment_ids = jnp.asarray(np.cumsum(random.random((4, 130)) < 0.05, axis=1), jnp.int32)
    expected = attention(query, key, value, segment_ids, "reference")
    with jax.set_mesh(make_mesh(Mesh(data=2, fsdp=2, tensor=2), jax.devices())):
        seen = jax.jit(partial(kernels.splash, interpret=True))(query, key, value, segment_ids)
    return float(jnp.abs(seen - expected).max())


if __name__ == "__main__":
    print(json.dumps(measure()))
