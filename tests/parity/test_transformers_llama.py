"""The model against `transformers.LlamaForCausalLM`, on equal weights: logits, loss, every gradient, segments.

Both sides compute in float32 and sum in different orders. Tensors are compared by their largest difference over the
largest value of theirs: 1e-4 is allowed, some 1e-6 is seen. The weights are drawn ten times as wide as for training, so
that attention is far from uniform and every nonlinearity shows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from marin_build.model.parameters import LLAMA, huggingface_tensors, path_text
from marin_build.model.transformer import abstract
from marin_build.recipe.schema import Llama3RopeScaling, LlamaModel
from marin_build.training.loss import cross_entropy

torch = pytest.importorskip("torch", reason="needs the parity extra")
transformers = pytest.importorskip("transformers", reason="needs the parity extra")
pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
Z_LOSS = 1e-3
SMALL = LlamaModel(
    architecture="llama",
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=12,
    rope_theta=10000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    initializer_range=0.2,
    tie_word_embeddings=False,
)
LLAMA3 = Llama3RopeScaling(
    type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
MODELS = {
    "as many key heads as query heads": SMALL,
    "grouped queries": SMALL.model_copy(update={"num_key_value_heads": 2}),
    "one key head, three layers": SMALL.model_copy(update={"num_key_value_heads": 1, "num_hidden_layers": 3}),
    "tied embeddings": SMALL.model_copy(update={"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "llama 3 rotary scaling": SMALL.model_copy(update={"rope_scaling": LLAMA3, "head_dim": 16, "rope_theta": 500000.0}),
    "heads wider than the model": SMALL.model_copy(update={"head_dim": 32, "num_key_value_heads": 2}),
    "another epsilon": SMALL.model_copy(update={"rms_norm_eps": 1e-2}),
}


def random_parameters(model: LlamaModel):
    """Parameters of the model's shapes; the scales of norms are not 1."""
    _, shapes = abstract(model, compute_dtype="float32")
    random = np.random.default_rng(0)

    def draw(key_path, shape):
        values = model.initializer_range * random.normal(size=shape.shape)
        return jnp.asarray(values + (LLAMA[path_text(key_path)].group == "norms"), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def huggingface_model(model: LlamaModel, parameters):
    """A LlamaForCausalLM that holds the same weights; loading is strict."""
    fields = model.model_dump(exclude={"architecture", "rope_scaling", "initializer_range"})
    if model.rope_scaling is not None:
        scaling = model.rope_scaling.model_dump()
        fields["rope_scaling"] = {"rope_type": scaling.pop("type"), "rope_theta": model.rope_theta, **scaling}
    config = transformers.LlamaConfig(**fields, attn_implementation="eager", max_position_embeddings=4096)
    theirs = transformers.LlamaForCausalLM(config).to(torch.float32)
    weights = {name: torch.from_numpy(np.array(array)) for name, array in huggingface_tensors(parameters)}
    if model.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    theirs.load_state_dict(weights, strict=True)
    return theirs


@functools.cache
def both(case: str, tokens: int = 150):
    """(ours, theirs): each a dict of the logits, the losses and the gradients by Hugging Face's names."""
    model = MODELS[case]
    parameters = random_parameters(model)
    rows = np.random.default_rng(1).integers(0, model.vocab_size, (3, tokens + 1))
    return our_results(model, parameters, rows), their_results(huggingface_model(model, parameters), rows)


def our_results(model: LlamaModel, parameters, rows):
    graph, _ = abstract(model, compute_dtype="float32")
    inputs, targets = rows[:, :-1], rows[:, 1:]

    @jax.jit
    def logits(parameters):
        module = nnx.merge(graph, parameters)
        return module(inputs) @ module.output_embedding()

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(parameters):
        module = nnx.merge(graph, parameters)
        total, nats = cross_entropy(module(inputs), module.output_embedding(), targets, z_loss=Z_LOSS, chunk=64)
        return total / targets.size, nats / targets.size

    (total, nats), gradients = jax.jit(loss)(parameters)
    return {
        "logits": logits(parameters),
        "loss with z-loss": total,
        "loss": nats,
        **dict(huggingface_tensors(gradients)),
    }


def their_results(theirs, rows):
    inputs, targets = torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, 1:])
    logits = theirs(input_ids=inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    total = loss + Z_LOSS * torch.logsumexp(logits, dim=-1).square().mean()
    total.backward()
    gradients = {name: weight.grad for name, weight in theirs.named_parameters()}
    return {"logits": logits.detach(), "loss with z-loss": total.detach(), "loss": loss.detach(), **gradients}


def relative_difference(ours, theirs) -> float:
    ours, theirs = np.asarray(ours), theirs.numpy()
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("case", MODELS)
def test_logits_and_losses_equal_those_of_transformers(case):
    ours, theirs = both(case)
    for name in ("logits", "loss", "loss with z-loss"):
        assert relative_difference(ours[name], theirs[name]) < TOLERANCE, name


@pytest.mark.parametrize("case", MODELS)
def test_the_gradient_of_every_parameter_equals_that_of_transformers(case):
    ours, theirs = both(case)
    assert ours.keys() == theirs.keys()
    differences = {name: relative_difference(ours[name], theirs[name]) for name in theirs}
    assert max(differences.values()) < TOLERANCE, differences


def test_a_row_longer_than_the_rotary_scaling_was_made_for_agrees():
    ours, theirs = both("llama 3 rotary scaling", tokens=600)
    assert relative_difference(ours["logits"], theirs["logits"]) < TOLERANCE


def test_a_document_in_a_packed_row_has_the_logits_it_has_alone():
    model = MODELS["grouped queries"]
    parameters = random_parameters(model)
    theirs = huggingface_model(model, parameters)
    graph, _ = abstract(model, compute_dtype="float32")
    lengths = [5, 90, 1, 54]
    row = np.random.default_rng(2).integers(0, model.vocab_size, (1, sum(lengths)))
    segments = np.repeat(np.arange(len(lengths)), lengths)[None]
    module = nnx.merge(graph, parameters)
    packed = np.asarray(module(row, segments) @ module.output_embedding())
    start = 0
    for length in lengths:
        document = slice(start, start + length)
        with torch.no_grad():
            alone = theirs(input_ids=torch.from_numpy(row[:, document])).logits
        assert relative_difference(packed[:, document], alone) < TOLERANCE
        start += length
