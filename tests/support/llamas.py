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


def on_virtual_devices(script: Path, devices: int, *arguments: str) -> tuple[Any, str]:
    """Run a script with this many CPU devices; returns (the JSON of its last line of output, its stderr)."""
    # Compiled without effort: the time of such a test is that of its compilation.
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr
