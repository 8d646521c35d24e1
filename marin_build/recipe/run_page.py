"""The page of a new checkpoint: a preset's literals and some data, grouped as they are read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from marin_build.recipe.header import header, plain
from marin_build.recipe.presets import Preset
from marin_build.recipe.run_data import RunData, run_data
from marin_build.recipe.target import Target

if TYPE_CHECKING:
    from marin_build.recipe.load import RecipeBook

REFERENCE_VOCABULARY = 128_256
"""Of Llama 3: the presets' names count its embeddings, and it is good enough to guess the length of a run."""


def checkpoint_page(book: RecipeBook, target: Target, preset: Preset) -> str:
    data = run_data(book, target, _tokens(preset, preset.steps(REFERENCE_VOCABULARY)))
    steps = preset.steps(data.vocabulary_size)
    blocks = [
        _data_block(preset, data),
        _model_block(preset, data),
        _optimizer_block(preset, steps),
        _run_block(preset, data, steps),
        _measure_block(data, steps),
        _execution_block(preset),
    ]
    return _header(target, preset, data, steps) + "\n".join(blocks)


def _header(target: Target, preset: Preset, data: RunData, steps: int) -> str:
    parameters, tokens = preset.size.parameters(data.vocabulary_size), _tokens(preset, steps)
    flop = f"{6 * parameters * tokens:.1e}".replace("e+", "e")
    return header(
        target,
        f"A Llama of {_short(parameters)} parameters (preset {preset.name}), trained on {_short(tokens)} tokens.",
        f"{', '.join(component for component, _ in data.train.values())}.",
        f"Unknown yet: {flop} FLOP (6 × parameters × tokens).",
        "Unknown yet: the first run's scores belong here.",
    )


def _data_block(preset: Preset, data: RunData) -> str:
    lines = ["data:", f"  tokenizer: {data.tokenizer}", f"  # {data.origin}", "  train:"]
    for name, (target, weight) in sorted(data.train.items(), key=lambda item: -item[1][1]):
        lines += [f"    {plain(name)}:", f"      target: {target}", f"      weight: {weight:.15g}"]
    lines += [
        f"  sequence_length: {preset.size.sequence_length}",
        f"  mixture_block: {data.mixture_block} # sequences that hold every set in its exact share",
        f"  attention_across_documents: {'true' if data.attention_across_documents else 'false'}",
    ]
    return "\n".join([*lines, ""])


def _model_block(preset: Preset, data: RunData) -> str:
    size = preset.size
    scaling = """
    type: llama3
    factor: 8
    low_freq_factor: 1
    high_freq_factor: 4
    original_max_position_embeddings: 8192"""
    return f"""model:
  architecture: llama
  vocab_size: {data.vocabulary_size} # the tokenizer's ids
  hidden_size: {size.hidden_size}
  intermediate_size: {size.intermediate_size}
  num_hidden_layers: {size.num_hidden_layers}
  num_attention_heads: {size.num_attention_heads}
  num_key_value_heads: {size.num_key_value_heads}
  head_dim: {size.head_dim}
  rope_theta: {"500000 # as in Llama 3" if size.llama3_rope else "10000 # as in Llama 2"}
  rope_scaling:{scaling if size.llama3_rope else " null"}
  rms_norm_eps: 1e-5
  initializer_range: 0.02
  tie_word_embeddings: {"true" if size.tie_word_embeddings else "false"}
"""


def _optimizer_block(preset: Preset, steps: int) -> str:
    training = preset.training
    warmup_steps = min(steps, max(1, round(steps * training.warmup_fraction)))
    return f"""# Batch size, steps, learning rate and weight decay: {training.origin}.
optimizer:
  type: adamw
  learning_rate: {training.learning_rate}
  beta1: 0.9
  beta2: 0.95
  epsilon: 1e-8
  weight_decay: {training.weight_decay} # decoupled, and multiplied by the learning rate of the step
  no_weight_decay: [norms, embeddings]
  max_grad_norm: 1.0
  schedule:
    type: cosine
    warmup_steps: {warmup_steps} # {training.warmup_fraction:.0%} of the steps
    min_lr_ratio: 0.1
"""


def _run_block(preset: Preset, data: RunData, steps: int) -> str:
    size, training, tokens = preset.size, preset.training, _tokens(preset, steps)
    ratio = tokens / size.parameters(data.vocabulary_size)
    product = f"{steps:,} steps × {training.global_batch_size} × {size.sequence_length}"
    return f"""# {product} = {tokens:,} tokens, {ratio:.2g} for each parameter.
steps: {steps}
global_batch_size: {training.global_batch_size}
z_loss: {training.z_loss}
precision:
  parameters: float32
  compute: {training.compute}
seed: 0
"""


def _measure_block(data: RunData, steps: int) -> str:
    lines = ["measure:", '  description: ""', "  tags: []"]
    if data.validation:
        lines += ["  validation:", f"    every_steps: {min(1000, max(1, steps // 10))}", "    sets:"]
        lines += [f"      {plain(name)}: {target}" for name, target in data.validation.items()]
    else:
        lines.append("  validation: null # or {every_steps: 1000, sets: {name: tokenized/name/version}}")
    lines += ["  keep_every_steps: null # only the final checkpoint is kept", "  baselines: []"]
    return "\n".join([*lines, ""])


def _execution_block(preset: Preset) -> str:
    return f"""execution:
  default: # and one block a platform: local, gpu, tpu
    mesh: {{data: 1, fsdp: -1, tensor: 1}}
    micro_batch_size: null # all sequences of a step at once; a divisor of the batch size saves memory
    rematerialization: {"full" if preset.size.hidden_size >= 2048 else "none"} # none, dots or full: memory for work
    scan_layers: true
    validation_batch_size: null
"""


def _tokens(preset: Preset, steps: int) -> int:
    return steps * preset.training.global_batch_size * preset.size.sequence_length


def _short(number: float) -> str:
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {word}"
    return f"{number:,.0f}"
