"""Closed forms against the real parameter tree, against published numbers, and against XLA's own count."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from llamas import TIED, TINY

from marin_build.model import counting
from marin_build.model.transformer import abstract
from marin_build.recipe.schema import LlamaModel

DCLM_1B = LlamaModel(
    architecture="llama",
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=16,
    head_dim=128,
    rope_theta=10000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    initializer_range=0.02,
    tie_word_embeddings=False,
)
LLAMA_3_8B = DCLM_1B.model_copy(
    update={
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
)


@pytest.mark.parametrize("config", [TINY, TIED, DCLM_1B, LLAMA_3_8B])
def test_parameter_count_is_that_of_the_real_tree(config):
    _, shapes = abstract(config, compute_dtype="float32")
    assert counting.parameter_count(config) == sum(leaf.size for leaf in jax.tree.leaves(shapes))


def test_the_reference_model_has_2136_million_parameters():
    assert counting.parameter_count(DCLM_1B) == 2_136_049_664
    assert round(counting.parameter_count(DCLM_1B) / 1e6) == 2136


def test_llama_3_8b_has_its_published_number_of_parameters():
    assert counting.parameter_count(LLAMA_3_8B) == 8_030_261_248


def test_the_reference_model_costs_12_45_gigaflop_a_token():
    assert counting.flops_per_token(DCLM_1B, 2048) / 1e9 == pytest.approx(12.45, abs=0.005)


def test_causal_attention_costs_half_and_the_diagonal():
    matmuls = 6 * counting.matmul_parameter_count(DCLM_1B)
    attention = counting.flops_per_token(DCLM_1B, 2048) - matmuls
    causal = counting.causal_flops_per_token(DCLM_1B, 2048) - matmuls
    assert causal / attention == pytest.approx(0.5 * 2049 / 2048)


@pytest.mark.parametrize("config", [TINY, TIED])
def test_tying_the_embeddings_changes_no_flops(config):
    assert counting.flops_per_token(config, 16) == counting.flops_per_token(TINY, 16)


def test_the_forward_pass_is_what_xla_counts():
    """XLA also counts softmax, norms and rotations, some 4% at this width, and its matmuls are those of the formula."""
    config = TINY.model_copy(update={"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 512})
    graph, shapes = abstract(config, compute_dtype="float32", scan_layers=False, attention_backend="reference")

    def logits(parameters, tokens):
        model = nnx.merge(graph, parameters)
        return model(tokens) @ model.output_embedding()

    tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    counted = jax.jit(logits).lower(shapes, tokens).cost_analysis()["flops"] / tokens.size
    expected = counting.forward_flops_per_token(config, 128)
    assert expected < counted < 1.1 * expected
