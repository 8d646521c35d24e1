"""The parameters of the Llama family in one table: path, logical axes, decay group, name in Hugging Face.

Everything that needs to know a parameter by name reads this table: sharding, weight decay, counting, export. Paths
are stable, since checkpoints are written under them. Parameters of the layers are stacked on a leading axis `layers`,
whether the layers are scanned or unrolled, so that a checkpoint does not depend on that choice.

Mapping to `transformers.LlamaForCausalLM`: every weight matrix here is stored [input, output], so that it is applied
as `x @ weight`; Hugging Face stores [output, input]. `export_transpose` says which must be transposed; the embedding
and the scales of norms are the same in both. The order of the heads, and the half-split convention of the rotary
embedding, are those of Hugging Face: no permutation is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import jax

Group = Literal["norms", "embeddings", "lm_head", "matrices"]


@dataclass(frozen=True)
class Parameter:
    """What is known of one parameter, or of one in each layer."""

    logical_axes: tuple[str | None, ...]
    """Name of each dimension; `sharding.MESH_AXES` maps names to axes of the mesh."""
    group: Group
    """For weight decay: the recipe's `no_weight_decay` names groups."""
    huggingface_name: str
    """`{layer}` stands for the layer's number."""
    export_transpose: bool = False


def _matrix(first: str, second: str, name: str) -> Parameter:
    return Parameter(
        ("layers", first, second), "matrices", f"model.layers.{{layer}}.{name}.weight", export_transpose=True
    )


def _scale(name: str) -> Parameter:
    return Parameter(("layers", None), "norms", f"model.layers.{{layer}}.{name}.weight")


LLAMA: dict[str, Parameter] = {
    "embedding": Parameter(("table_vocab", "table_embed"), "embeddings", "model.embed_tokens.weight"),
    "layers/attention_norm/scale": _scale("input_layernorm"),
    "layers/attention/query": _matrix("embed", "heads", "self_attn.q_proj"),
    "layers/attention/key": _matrix("embed", "kv_heads", "self_attn.k_proj"),
    "layers/attention/value": _matrix("embed", "kv_heads", "self_attn.v_proj"),
    "layers/attention/output": _matrix("heads", "embed", "self_attn.o_proj"),
    "layers/mlp_norm/scale": _scale("post_attention_layernorm"),
    "layers/mlp/gate": _matrix("embed", "mlp", "mlp.gate_proj"),
    "layers/mlp/up": _matrix("embed", "mlp", "mlp.up_proj"),
    "layers/mlp/down": _matrix("mlp", "embed", "mlp.down_proj"),
    "final_norm/scale": Parameter((None,), "norms", "model.norm.weight"),
    "lm_head": Parameter(("embed", "vocab"), "lm_head", "lm_head.weight", export_transpose=True),
}
"""Absent in a model with tied embeddings: `lm_head`."""


def path_text(key_path: tuple[Any, ...]) -> str:
    """`layers/attention/query` for a key path of jax.tree_util."""
    return jax.tree_util.keystr(key_path, simple=True, separator="/")


def parameter_at(key_path: tuple[Any, ...]) -> Parameter | None:
    """The parameter whose path ends `key_path`, or None.

    The end counts, since optimizer states hold trees of the same form as the parameters (`0/mu/layers/…`).
    """
    parts = path_text(key_path).split("/")
    return next((found for start in range(len(parts)) if (found := LLAMA.get("/".join(parts[start:])))), None)


def huggingface_tensors(parameters: Any) -> Iterator[tuple[str, jax.Array]]:
    """Name and tensor of each weight of a `LlamaForCausalLM`, in its shape, layer by layer.

    Args:
        parameters: the nested dict of a model's parameters.
    """
    for key_path, array in jax.tree_util.tree_leaves_with_path(parameters):
        parameter = LLAMA[path_text(key_path)]
        layers = array if parameter.logical_axes[0] == "layers" else [array]
        for number, tensor in enumerate(layers):
            yield parameter.huggingface_name.format(layer=number), tensor.T if parameter.export_transpose else tensor
