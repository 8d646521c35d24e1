"""Trains five steps on 8 devices, then restores on 8, 4, 2 and 1, each from what the one before saved; run as a script.

Prints, by number of devices, the digest of the restored state and the losses of the three steps after it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
from training_world import TrainingWorld

from marin_build.recipe.schema import Mesh
from marin_build.training.checkpoint import Checkpoints
from marin_build.training.execution import choose_execution
from marin_build.training.feed import Feed
from marin_build.training.inputs import open_inputs
from marin_build.training.mesh import make_mesh
from marin_build.training.optimizer import make_optimizer
from marin_build.training.state import abstract_state, initial_state, state_digest
from marin_build.training.step import make_train_step

MESHES = {8: (2, 4), 4: (1, 4), 2: (2, 1), 1: (1, 1)}
STEPS, MORE = 5, 3


def main(folder: Path) -> None:
    world = TrainingWorld(folder, **{"measure.validation": None, "measure.baselines": []})
    found = {devices: go_on(world, folder / "checkpoints", *sizes) for devices, sizes in MESHES.items()}
    print(json.dumps(found))


def go_on(world: TrainingWorld, folder: Path, data: int, fsdp: int) -> dict:
    context, recipe = world.context(), world.recipe
    mesh = make_mesh(Mesh(data=data, fsdp=fsdp, tensor=1), jax.devices()[: data * fsdp])
    execution, optimizer = choose_execution(recipe, context.settings), make_optimizer(recipe.optimizer, recipe.steps)
    loader = open_inputs(context, recipe, recipe.global_batch_size).loader
    losses, restored_digest = [], None
    with (
        jax.set_mesh(mesh),
        Feed(loader, steps=STEPS + MORE, batch_size=recipe.global_batch_size, vocab_size=257, mesh=mesh) as feed,
        Checkpoints(
            folder, identity={}, is_kept=lambda _: True, check_lease=lambda: None, logger=context.logger
        ) as checkpoints,
    ):
        graph, placed = abstract_state(recipe, execution, optimizer, mesh)
        train = make_train_step(graph, optimizer, z_loss=recipe.z_loss, micro_batches=1)
        restored = checkpoints.restore(placed)
        if restored is None:
            state = initial_state(recipe, execution, optimizer, placed)
            for step in range(STEPS):
                state, _ = train(state, feed.batch(step))
            checkpoints.save(STEPS, state, {})
        else:
            state, restored_digest = restored.state, state_digest(restored.state)
            checkpoints.save(restored.step + 1, state, {})  # the same state, as these devices hold it
        checkpoints.wait()
        for step in range(STEPS, STEPS + MORE):
            state, measured = train(state, feed.batch(step))
            losses.append(float(measured.loss))
    newest = folder / str(checkpoints.steps()[-1])
    from orbax.checkpoint import v1 as orbax

    saved = orbax.checkpointables_metadata(newest).custom_metadata["state_digest"]
    return {"restored": restored_digest or saved, "saved": saved, "losses": losses}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
