"""Builds one target whose dependencies are finished: finds the builder of its kind and hands it to the protocol."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from marin_build.artifact.context import BuildContext, BuildResult
from marin_build.artifact.proof import Remaker, whole

BUILDERS = {
    "raw": "marin_build.data.raw",
    "tokenizers": "marin_build.data.tokenizer",
    "tokenized": "marin_build.data.tokenize",
    "parts": "marin_build.data.tokenize_part",
    "checks": "marin_build.data.encoder_check",
    "checkpoints": "marin_build.training.build",
}
"""The module of each kind, with a function `build`; imported when it is needed, since some take seconds to load."""

REMAKERS = {"tokenized": "marin_build.data.retokenize", "checkpoints": "marin_build.training.replay"}
"""The modules that make a part of an artifact again, with a function `remake`; others are made again as a whole."""

MALLOC_TUNABLES = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=17179869184:glibc.malloc.trim_threshold=17179869184"
)
"""Huge pages, and freed memory stays with the process: XLA on CPU allocates its buffers anew in each step, and without
this glibc hands every large one back to the kernel (measured: 8 to 19% of a training step)."""


def builder_of(kind: str) -> Callable[[BuildContext], BuildResult]:
    def build(context: BuildContext) -> BuildResult:
        return import_module(BUILDERS[kind]).build(context)

    return build


def remaker_of(kind: str) -> Remaker:
    """The function that makes a sample of an artifact again, for `proof.prove`."""
    return import_module(REMAKERS[kind]).remake if kind in REMAKERS else whole(builder_of(kind))


def accelerator_present(devices: Path = Path("/dev")) -> bool:
    """True when this machine shows a GPU or TPU device file."""
    return any(next(devices.glob(pattern), None) for pattern in ("nvidia[0-9]*", "kfd", "accel*", "vfio/[0-9]*"))


def tune_malloc(arguments: list[str]) -> None:
    """On a CPU, start this process again with MALLOC_TUNABLES, which glibc reads at program start only."""
    on_cpu = os.environ.get("JAX_PLATFORMS", "").startswith("cpu") or not accelerator_present()
    if not sys.platform.startswith("linux") or "GLIBC_TUNABLES" in os.environ or not on_cpu:
        return
    os.environ["GLIBC_TUNABLES"] = MALLOC_TUNABLES
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "marin_build", *arguments])
