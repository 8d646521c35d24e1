"""Sizes of the mesh, and the one-line errors for what does not fit on it."""

import jax
import pytest
from llamas import TINY

from marin_build.errors import RequestError
from marin_build.recipe.schema import Mesh
from marin_build.training.mesh import AXES, check_batch_fits, check_model_fits, make_mesh, mesh_sizes


def fake_mesh(data, fsdp, tensor):
    """A mesh of devices that need not exist."""
    return jax.sharding.AbstractMesh((data, fsdp, tensor), AXES)


@pytest.mark.parametrize(
    ("mesh", "devices", "sizes"),
    [
        (Mesh(), 1, (1, 1, 1)),
        (Mesh(), 8, (1, 8, 1)),
        (Mesh(data=2, fsdp=2, tensor=2), 8, (2, 2, 2)),
        (Mesh(data=-1, fsdp=2, tensor=2), 16, (4, 2, 2)),
        (Mesh(data=2, fsdp=4, tensor=-1), 8, (2, 4, 1)),
    ],
)
def test_minus_one_takes_the_devices_that_are_left(mesh, devices, sizes):
    assert mesh_sizes(mesh, devices) == sizes


@pytest.mark.parametrize(
    ("mesh", "devices", "words"),
    [
        (Mesh(data=2, fsdp=2, tensor=2), 4, ["data: 2, fsdp: 2, tensor: 2", "4 devices", "needs 8"]),
        (Mesh(data=1, fsdp=1, tensor=1), 8, ["8 devices", "needs 1", "--config mesh="]),
        (Mesh(data=-1, fsdp=3, tensor=1), 8, ["8 devices", "a multiple of 3"]),
        (Mesh(data=2, fsdp=-1, tensor=1), 1, ["1 device:", "a multiple of 2"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_both_numbers(mesh, devices, words):
    with pytest.raises(RequestError) as error:
        mesh_sizes(mesh, devices)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value).splitlines()[0]


def test_a_mesh_has_automatic_axes_on_one_device_too():
    mesh = make_mesh(Mesh(), jax.devices()[:1])
    assert mesh.axis_names == AXES
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


@pytest.mark.parametrize(
    ("sizes", "field", "axis"),
    [
        ((1, 1, 8), "num_attention_heads 4", "tensor of 8"),
        ((1, 1, 4), "num_key_value_heads 2", "tensor of 4"),
        ((1, 5, 1), "hidden_size 32", "fsdp of 5"),
    ],
)
def test_a_dimension_that_does_not_divide_is_named_with_its_axis(sizes, field, axis):
    with pytest.raises(RequestError, match=rf"^model\.{field} is not divisible by the mesh axis {axis} devices"):
        check_model_fits(TINY, fake_mesh(*sizes))


def test_every_dimension_that_is_split_is_checked():
    """Whatever the check lets pass, JAX can place: each sharded dimension of each parameter divides."""
    from marin_build.model.sharding import parameter_shardings
    from marin_build.model.transformer import abstract

    for sizes in [(1, 1, 1), (1, 2, 2), (2, 4, 1), (1, 16, 2), (1, 32, 1), (1, 3, 1), (1, 1, 3)]:
        mesh = fake_mesh(*sizes)
        _, shapes = abstract(TINY, compute_dtype="float32")
        shardings = parameter_shardings(shapes, mesh)

        def place(shape, sharding):
            sharding.shard_shape(shape.shape)

        try:
            check_model_fits(TINY, mesh)
        except RequestError:
            with pytest.raises(ValueError, match="evenly divide"):
                jax.tree.map(place, shapes, shardings)
        else:
            jax.tree.map(place, shapes, shardings)


def test_a_batch_that_does_not_split_is_refused_with_what_would():
    check_batch_fits("global_batch_size", 16, fake_mesh(2, 4, 3))
    with pytest.raises(RequestError) as error:
        check_batch_fits("global_batch_size", 12, fake_mesh(2, 4, 1))
    assert str(error.value).startswith("global_batch_size 12 is not divisible by the 8 devices that share a batch")
    assert "a multiple of 8" in str(error.value)
