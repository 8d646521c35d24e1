"""The model's promises: names, first values, one result whatever the options, and what rematerialisation keeps."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from llamas import TIED, TINY

from marin_build.model.layers import RMSNorm, rotary_tables, rotate
from marin_build.model.parameters import LLAMA, huggingface_tensors, parameter_at, path_text
from marin_build.model.transformer import abstract, initialize
from marin_build.recipe.schema import Mesh
from marin_build.training.loss import cross_entropy
from marin_build.training.mesh import make_mesh

WIDER = TINY.model_copy(update={"hidden_size": 128, "vocab_size": 512, "initializer_range": 0.02})
ROWS = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, 49))
SEGMENTS = np.cumsum(np.random.default_rng(1).random((2, 48)) < 0.1, axis=1)


@functools.cache
def initialized(config=TINY, seed=0, **options):
    with jax.set_mesh(make_mesh(Mesh(), jax.devices()[:1])):
        return initialize(config, seed=seed, **{"compute_dtype": "float32", **options})


def hidden(graph, parameters, tokens=ROWS[:, :-1], segment_ids=None):
    return jax.jit(lambda parameters: nnx.merge(graph, parameters)(tokens, segment_ids))(parameters)


def loss(graph, parameters):
    model = nnx.merge(graph, parameters)
    states = model(ROWS[:, :-1], SEGMENTS)
    return cross_entropy(states, model.output_embedding(), ROWS[:, 1:], z_loss=1e-4)[0] / SEGMENTS.size


@functools.cache
def loss_and_gradients(**options):
    graph, _ = abstract(TINY, **{"compute_dtype": "float32", **options})
    return jax.jit(jax.value_and_grad(functools.partial(loss, graph)))(initialized()[1])


def paths_and_arrays(tree):
    return {path_text(path): array for path, array in jax.tree_util.tree_leaves_with_path(tree)}


# ---- names and first values ------------------------------------------------------------------------------------------


def test_the_table_of_parameters_is_the_tree_of_the_model():
    for config, expected in ((TINY, LLAMA.keys()), (TIED, LLAMA.keys() - {"lm_head"})):
        _, shapes = abstract(config, compute_dtype="float32")
        assert paths_and_arrays(shapes).keys() == expected


def test_parameters_are_float32_and_of_the_rank_that_the_table_names():
    _, shapes = abstract(TINY, compute_dtype="bfloat16")
    for path, array in paths_and_arrays(shapes).items():
        assert array.dtype == jnp.float32
        assert array.ndim == len(LLAMA[path].logical_axes), path


def test_a_parameter_is_found_in_the_state_of_an_optimizer_and_a_counter_is_none():
    import optax

    state = optax.adamw(1e-3).init(initialized()[1])
    found = {path_text(p): parameter_at(p) for p, _ in jax.tree_util.tree_leaves_with_path(state)}
    assert sum(parameter is not None for parameter in found.values()) == 2 * len(LLAMA)
    assert found["0/mu/layers/attention/value"] is LLAMA["layers/attention/value"]
    assert found["0/count"] is None


def test_every_huggingface_name_is_given_once_a_layer():
    names = [name for name, _ in huggingface_tensors(initialized()[1])]
    assert len(names) == len(set(names)) == 9 * TINY.num_hidden_layers + 3
    assert "model.layers.1.self_attn.q_proj.weight" in names


def test_matrices_start_normal_and_norms_start_at_one():
    for path, array in paths_and_arrays(initialized(WIDER)[1]).items():
        if LLAMA[path].group == "norms":
            np.testing.assert_array_equal(array, 1)
        else:
            # The smallest matrix has 4,096 entries: its spread is known to 1.1% (one sigma), its mean to 0.0003.
            assert float(array.std()) == pytest.approx(0.02, rel=0.05), path
            assert abs(float(array.mean())) < 0.0015, path
            assert 3 < float(jnp.abs(array).max() / 0.02) < 6, path  # neither uniform nor cut off


def test_no_two_matrices_and_no_two_layers_start_equal():
    tensors = [np.asarray(tensor) for _, tensor in huggingface_tensors(initialized()[1]) if tensor.ndim == 2]
    assert len({tensor[:8, :8].tobytes() for tensor in tensors}) == len(tensors)


def test_first_values_depend_on_the_seed_and_on_no_option():
    _, parameters = initialized()
    _, same = initialized(compute_dtype="bfloat16", rematerialization="full", scan_layers=False)
    _, other = initialized(seed=1)
    assert jax.tree.all(jax.tree.map(np.array_equal, parameters, same))
    assert not np.array_equal(parameters["embedding"], other["embedding"])


def test_the_first_loss_is_that_of_an_even_guess():
    graph, parameters = initialized(WIDER)
    assert float(jax.jit(functools.partial(loss, graph))(parameters)) == pytest.approx(np.log(512), abs=0.05)


# ---- one result whatever the options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"scan_layers": False},
        {"rematerialization": "full"},
        {"rematerialization": "dots"},
        {"scan_layers": False, "rematerialization": "full"},
        {"attention_backend": "reference"},
    ],
    ids=str,
)
def test_how_it_is_computed_changes_neither_loss_nor_gradients(options):
    """float32; the compiler fuses other operations, so that last bits differ."""
    expected, gradients = loss_and_gradients()
    seen, others = loss_and_gradients(**options)
    np.testing.assert_allclose(seen, expected, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()), others, gradients)


def test_bfloat16_computes_in_16_bits_near_float32_and_keeps_gradients_in_float32():
    graph, parameters = abstract(TINY, compute_dtype="bfloat16")
    assert jax.eval_shape(functools.partial(hidden, graph), parameters).dtype == jnp.bfloat16
    expected, gradients = loss_and_gradients()
    seen, others = loss_and_gradients(compute_dtype="bfloat16")
    assert seen.dtype == jnp.float32
    assert float(seen) == pytest.approx(float(expected), rel=3e-3)
    for mine, exact in zip(jax.tree.leaves(others), jax.tree.leaves(gradients), strict=True):
        assert mine.dtype == jnp.float32
        assert np.linalg.norm(mine - exact) < 0.05 * np.linalg.norm(exact)


@pytest.mark.parametrize(("compute_dtype", "expected"), [("float32", {"HIGHEST"}), ("bfloat16", {"None"})])
def test_float32_means_float32_in_every_matrix_product_of_a_step(compute_dtype, expected):
    """On accelerators only this keeps float32 from being rounded to 8 to 11 bits; a CPU would not show it."""
    graph, shapes = abstract(TINY, compute_dtype=compute_dtype)
    written = str(jax.make_jaxpr(jax.grad(functools.partial(loss, graph)))(shapes))
    products = written.count("dot_general[")
    assert products > 20
    precisions = re.findall(r"precision=\(?(?:Precision\.)?(\w+)", written)
    assert (len(precisions) or products, set(precisions) or {"None"}) == (products, expected)


def test_rematerialisation_trades_memory_for_work():
    def temporary_bytes(rematerialization):
        config = TINY.model_copy(update={"num_hidden_layers": 6})
        graph, shapes = abstract(config, compute_dtype="float32", rematerialization=rematerialization)
        compiled = jax.jit(jax.grad(functools.partial(loss, graph))).lower(shapes).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes("full") < temporary_bytes("dots") < temporary_bytes("none")


# ---- what the tokens can know ----------------------------------------------------------------------------------------


def test_no_token_knows_a_later_one():
    changed = ROWS[:, :-1].copy()
    changed[:, 30] += 1
    changed %= TINY.vocab_size
    before, after = hidden(*initialized()), hidden(*initialized(), tokens=changed)
    np.testing.assert_array_equal(before[:, :30], after[:, :30])
    assert not np.allclose(before[:, 30:], after[:, 30:])


def test_a_document_in_a_packed_row_is_as_it_is_alone():
    document = slice(20, 40)
    segments = np.repeat([5, 2, 9], [20, 20, 8])[None]
    packed = hidden(*initialized(), tokens=ROWS[:1, :48], segment_ids=segments)[:, document]
    np.testing.assert_allclose(packed, hidden(*initialized(), tokens=ROWS[:1, document]), atol=2e-5)
    mixed = hidden(*initialized(), tokens=ROWS[:1, :48])[:, document]
    assert not np.allclose(packed, mixed, atol=1e-2)


def test_rotations_keep_lengths_and_scores_depend_on_distance_alone():
    tables = rotary_tables(TINY, 64)
    x = jax.random.normal(jax.random.key(0), (1, 1, 1, TINY.head_dim))
    turned = rotate(jnp.broadcast_to(x, (1, 64, 1, TINY.head_dim)), tables)[0, :, 0]
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x), rtol=1e-5)
    scores = turned @ turned.T
    np.testing.assert_allclose(jnp.diagonal(scores, 5), scores[0, 5], rtol=1e-4)


def test_the_norm_is_computed_in_float32_whatever_the_compute_type():
    x = jnp.full((1, 512), 300.0, jnp.bfloat16)  # the sum of squares needs more than 8 bits
    np.testing.assert_array_equal(RMSNorm(512, 1e-5)(x), jnp.ones_like(x))
