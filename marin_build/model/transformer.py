"""The Llama family as one module from tokens to hidden states; the loss applies the output embedding in chunks.

    B batch   T tokens   D model   V vocabulary

The trainer splits the module once (`initialize`) and keeps the parameters as a plain nested dict of arrays, stacked
over the layers. `nnx.merge(graph, parameters)` gives the module back inside a jitted function, at no cost in the
step.
"""

from __future__ import annotations

from typing import Any, Literal, Required, TypedDict, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from marin_build.model.attention import Backend
from marin_build.model.layers import Layer, RMSNorm, normal_matrix, rotary_tables, whole_precision
from marin_build.model.sharding import constrain, gathered, parameter_shardings
from marin_build.recipe.schema import LlamaModel

Rematerialization = Literal["none", "dots", "full"]
Parameters = dict[str, Any]

ACTIVATION_AXES = ("batch", "sequence", None)


class Llama(nnx.Module):
    """Embedding, layers, final norm.

    Args:
        compute_dtype: float32 or bfloat16; parameters are float32 whatever it is.
        rematerialization: what is kept of each layer for the backward pass: `none` rematerialised, so all is kept; the
            outputs of matrix products with weights (`dots`); only the layer's input (`full`).
        scan_layers: loop over the layers in compiled code, which compiles faster; else unroll them. Same results.
        attention_backend: see `attention`.
    """

    def __init__(
        self,
        config: LlamaModel,
        *,
        compute_dtype: str,
        rematerialization: Rematerialization = "none",
        scan_layers: bool = True,
        attention_backend: Backend = "auto",
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.rematerialization = rematerialization
        self.scan_layers = scan_layers
        table = (config.vocab_size, config.hidden_size)
        self.embedding = normal_matrix(rngs, table, config.initializer_range)
        self.layers = _stacked_layers(config, attention_backend, rngs)
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = normal_matrix(rngs, table[::-1], config.initializer_range)

    def __call__(self, tokens: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
        """Hidden states [B, T, D] of the tokens [B, T], after the final norm, in the compute type.

        Args:
            segment_ids: [B, T]; a token attends only to earlier tokens of its segment. None: to all earlier ones.
        """
        x = constrain(self._embed(tokens), ACTIVATION_AXES)
        rotary = rotary_tables(self.config, tokens.shape[1])
        graph, stacked = nnx.split(self.layers)

        def layer(x: jax.Array, parameters: nnx.State) -> tuple[jax.Array, None]:
            return constrain(nnx.merge(graph, parameters)(x, rotary, segment_ids), ACTIVATION_AXES), None

        layer = _rematerialize(layer, self.rematerialization)
        with whole_precision(self.compute_dtype):
            x, _ = jax.lax.scan(layer, x, stacked, unroll=not self.scan_layers)
        return self.final_norm(x)

    def output_embedding(self) -> jax.Array:
        """[D, V] in float32: logits are hidden states times it."""
        return self.embedding[...].T if self.config.tie_word_embeddings else self.lm_head[...]

    def _embed(self, tokens: jax.Array) -> jax.Array:
        # Gathered over fsdp before the lookup: XLA cannot look up in a table split along the embedding without first
        # repeating the activations on every device.
        return gathered(self.embedding[...], ("table_vocab", "table_embed"), self.compute_dtype)[tokens]


def _stacked_layers(config: LlamaModel, backend: Backend, rngs: nnx.Rngs) -> Layer:
    """A Layer each of whose parameters has a leading axis over the layers."""

    @nnx.split_rngs(splits=config.num_hidden_layers)
    @nnx.vmap
    def create(rngs: nnx.Rngs) -> Layer:
        return Layer(config, backend=backend, rngs=rngs)

    return create(rngs)


def _rematerialize(layer: Any, rematerialization: Rematerialization) -> Any:
    if rematerialization == "none":
        return layer
    policies = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}
    return jax.checkpoint(layer, policy=policies[rematerialization])


class Options(TypedDict, total=False):
    """How a Llama is computed; see there."""

    compute_dtype: Required[str]
    rematerialization: Rematerialization
    scan_layers: bool
    attention_backend: Backend


def initialize(config: LlamaModel, *, seed: int, **options: Unpack[Options]) -> tuple[nnx.GraphDef, Parameters]:
    """Make the module's graph and its parameters, each created in its place on the context's mesh (`jax.set_mesh`).

    The values depend on the seed alone: not on the mesh, nor on any option.
    """
    mesh = jax.sharding.get_mesh()
    assert not mesh.empty, "call it within jax.set_mesh(make_mesh(…))"
    graph, shapes = abstract(config, **options)
    shardings = parameter_shardings(shapes, mesh)

    def create() -> Parameters:
        return _split(Llama(config, **options, rngs=nnx.Rngs(params=seed)))[1]

    return graph, jax.jit(create, out_shardings=shardings)()


def abstract(config: LlamaModel, **options: Unpack[Options]) -> tuple[nnx.GraphDef, Parameters]:
    """The module's graph and the shapes of its parameters (ShapeDtypeStruct), without making any array."""
    return _split(nnx.eval_shape(lambda: Llama(config, **options, rngs=nnx.Rngs(params=0))))


def _split(model: Llama) -> tuple[nnx.GraphDef, Parameters]:
    graph, state = nnx.split(model, nnx.Param)
    return graph, nnx.to_pure_dict(state)
