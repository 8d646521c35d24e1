"""Tiny models that tests share, and how to run a script on eight virtual devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from marin_build.recipe.schema import LlamaModel

TINY = LlamaModel(
    architecture="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=10000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    initializer_range=0.1,
    tie_word_embeddings=False,
)
TIED = TINY.model_copy(update={"tie_word_embeddings": True})


LLAMA_YAML = """\
model:
  architecture: llama
  vocab_size: {vocab_size}
  hidden_size: 8
  intermediate_size: {intermediate_size}
  num_hidden_layers: 1
  num_attention_heads: 1
  num_key_value_heads: 1
  head_dim: 8
  rope_theta: 10000
  rope_scaling: null
  rms_norm_eps: 1e-5
  initializer_range: 0.02
  tie_word_embeddings: true
optimizer:
  type: adamw
  learning_rate: 3e-3
  beta1: 0.9
  beta2: 0.95
  epsilon: 1e-8
  weight_decay: 0.1
  no_weight_decay: []
  max_grad_norm: null
  schedule: {{type: cosine, warmup_steps: 0, min_lr_ratio: 0}}
z_loss: 0
precision: {{parameters: float32, compute: float32}}
seed: 0"""


def llama_yaml(vocab_size: int, intermediate_size: int = 8) -> str:
    """What a recipe says of the smallest model that learns: all but its data, steps, batch and measurements."""
    return LLAMA_YAML.format(vocab_size=vocab_size, intermediate_size=intermediate_size)


def on_virtual_devices(script: Path, devices: int, *arguments: str) -> tuple[Any, str]:
    """Run a script with this many CPU devices; returns (the JSON of its last line of output, its stderr)."""
    # Compiled without effort: the time of such a test is that of its compilation.
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr
