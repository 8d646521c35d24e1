"""How a training runs: the recipe's block for the platform, overridden by settings."""

import jax
import pytest
from training_world import RECIPE, changed

from marin_build.errors import RequestError
from marin_build.recipe.schema import CheckpointRecipe, Execution, Mesh
from marin_build.settings import Settings
from marin_build.training.execution import choose_execution, micro_batches, use_compilation_cache


def recipe(execution=None, **changes):
    return CheckpointRecipe.model_validate({**changed(RECIPE, changes), "execution": execution or {}})


BLOCKS = {"default": {"micro_batch_size": 4}, "tpu": {"micro_batch_size": 2, "mesh": {"fsdp": 4, "data": 2}}}


def test_the_block_of_the_platform_is_taken_and_else_the_default_one():
    assert choose_execution(recipe(BLOCKS), Settings(platform="tpu")).micro_batch_size == 2
    assert choose_execution(recipe(BLOCKS), Settings(platform="gpu")).micro_batch_size == 4
    assert choose_execution(recipe(), Settings()) == Execution()


def test_settings_override_the_recipe_field_by_field():
    settings = Settings(platform="tpu", mesh={"data": -1, "fsdp": 1}, rematerialization="full")
    chosen = choose_execution(recipe(BLOCKS), settings)
    assert chosen == Execution(micro_batch_size=2, mesh=Mesh(data=-1, fsdp=1), rematerialization="full")


@pytest.mark.parametrize("mesh", [{"dta": 2}, {"data": 0}, {"data": -1, "fsdp": -1}])
def test_a_setting_that_is_no_mesh_is_refused(mesh):
    with pytest.raises(RequestError, match="setting mesh"):
        choose_execution(recipe(), Settings(mesh=mesh))


def test_a_micro_batch_must_divide_the_batch():
    assert micro_batches(recipe(), Execution(micro_batch_size=2)) == 4
    assert micro_batches(recipe(), Execution()) == 1
    with pytest.raises(RequestError, match=r"micro_batch_size 3 does not divide global_batch_size 8\n.*1, 2, 4, 8"):
        micro_batches(recipe(), Execution(micro_batch_size=3))


def test_the_compilation_cache_is_set_unless_the_user_has_one(monkeypatch, tmp_path):
    before = jax.config.jax_compilation_cache_dir
    try:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "theirs")
        use_compilation_cache(str(tmp_path))
        use_compilation_cache(None)
        assert jax.config.jax_compilation_cache_dir == before
        monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
        use_compilation_cache(str(tmp_path))
        assert jax.config.jax_compilation_cache_dir.startswith(str(tmp_path / jax.default_backend()))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
