"""The whole step of the reference model, compiled for 64 virtual devices without making an array: what each would hold.

It compiles in a process of its own; run as a script, this file prints what the compiler says.
"""

from __future__ import annotations

import json
from pathlib import Path

from llamas import on_virtual_devices

RECIPES = Path(__file__).parents[2] / "config"
DEVICES = 64


def test_a_step_of_the_reference_model_fits_64_devices_of_32_gigabytes():
    """256 rows of 2,048 tokens, all layers rematerialised, parameters split over 64 devices.

    The CPU's compiler holds bfloat16 as float32, so its figure is up to twice that of an accelerator. 7.2 GB are seen;
    it was 8.7 with all scores of a row at once, 16.7 with all its logits, and 77 without rematerialisation.
    """
    measured, errors = on_virtual_devices(Path(__file__), DEVICES)
    # float32 parameters and two moments: 12 bytes each of 2,136 million, in 64 parts.
    assert measured["arguments"] < 1.02 * 12 * 2_136_049_664 / DEVICES
    assert measured["temporary"] < 8e9
    assert "involuntary" not in errors.lower()


# ---- the script ------------------------------------------------------------------------------------------------------


def measure() -> dict[str, int]:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    from marin_build.model.sharding import batch_sharding, parameter_shardings
    from marin_build.model.transformer import abstract
    from marin_build.recipe.load import RecipeBook
    from marin_build.recipe.schema import Mesh
    from marin_build.recipe.target import parse_target
    from marin_build.training.loss import cross_entropy
    from marin_build.training.mesh import make_mesh

    recipe = RecipeBook(RECIPES).load(parse_target("checkpoints/dclm_1b_1x/2026.06.28"))
    rows, tokens = recipe.global_batch_size, recipe.data.sequence_length
    optimizer = optax.adamw(1e-3)

    def step(state, batch, segment_ids):
        def loss(parameters):
            model = nnx.merge(graph, parameters)
            hidden = model(batch, segment_ids)
            return cross_entropy(hidden, model.output_embedding(), batch, z_loss=1e-4)[0] / batch.size

        value, gradients = jax.value_and_grad(loss)(state[0])
        updates, moments = optimizer.update(gradients, state[1], state[0])
        return (optax.apply_updates(state[0], updates), moments), value

    def placed(shape, sharding):
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)

    mesh = make_mesh(Mesh(), jax.devices())
    with jax.set_mesh(mesh):
        graph, parameters = abstract(recipe.model, compute_dtype="bfloat16", rematerialization="full")
        shapes = (parameters, jax.eval_shape(optimizer.init, parameters))
        state = jax.tree.map(placed, shapes, parameter_shardings(shapes, mesh))
        batch = jax.ShapeDtypeStruct((rows, tokens), jnp.int32, sharding=batch_sharding(mesh))
        kept = jax.tree.map(lambda shape: shape.sharding, state)
        compiled = jax.jit(step, donate_argnums=0, out_shardings=(kept, None)).lower(state, batch, batch).compile()
    memory = compiled.memory_analysis()
    return {"arguments": memory.argument_size_in_bytes, "temporary": memory.temp_size_in_bytes}


if __name__ == "__main__":
    print(json.dumps(measure()))
