"""Parameters and floating-point operations of a Llama in closed form, without making any array.

L layers   D model   F MLP   H query heads   G key/value heads   K head dimension   V vocabulary   T tokens a row
"""

from __future__ import annotations

from marin_build.recipe.schema import LlamaModel


def layer_matrix_parameters(config: LlamaModel) -> int:
    """Entries of the matrices of all layers: D K (2 H + 2 G) + 3 D F in each."""
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    one = config.hidden_size * (config.head_dim * heads + 3 * config.intermediate_size)
    return config.num_hidden_layers * one


def parameter_count(config: LlamaModel) -> int:
    """All parameters: layers with their two norms, the final norm, the embedding, and the head where it is untied."""
    norms = (2 * config.num_hidden_layers + 1) * config.hidden_size
    tables = (1 if config.tie_word_embeddings else 2) * config.vocab_size * config.hidden_size
    return layer_matrix_parameters(config) + norms + tables


def matmul_parameter_count(config: LlamaModel) -> int:
    """Entries of the matrices that multiply every token: those of the layers and the head, once, tied or not."""
    return layer_matrix_parameters(config) + config.vocab_size * config.hidden_size


def flops_per_token(config: LlamaModel, sequence_length: int) -> int:
    """Model FLOPs a trained token by the usual convention: 6 a matrix entry, and 12 L H K T of attention.

    Forward and backward pass, without rematerialisation, and as if each token attended to all T: the number to compare
    utilisation with others. `causal_flops_per_token` counts what a causal model needs.

    Source: Chowdhery et al. 2022 (PaLM), appendix B.
    """
    return 6 * matmul_parameter_count(config) + _attention_flops(config, 2 * sequence_length)


def causal_flops_per_token(config: LlamaModel, sequence_length: int) -> int:
    """As `flops_per_token`, with each token attending to itself and the tokens before it: (T + 1) / 2 on average."""
    return 6 * matmul_parameter_count(config) + _attention_flops(config, sequence_length + 1)


def forward_flops_per_token(config: LlamaModel, sequence_length: int) -> int:
    """A third of `flops_per_token`: what evaluating costs."""
    return flops_per_token(config, sequence_length) // 3


def _attention_flops(config: LlamaModel, twice_attended: int) -> int:
    """12 L H K a token attended to: a score and a weighted value take 2 K each, and the backward pass twice as much."""
    width = config.num_attention_heads * config.head_dim
    return 6 * config.num_hidden_layers * width * twice_attended
