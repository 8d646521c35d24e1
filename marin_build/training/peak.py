"""How fast the devices could be at best, for FLOP utilisation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

BFLOAT16_PEAK = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "GB200": 2500e12,
}
"""Dense bfloat16 FLOP/s of one device by a part of its JAX `device_kind`, earlier keys first. From the makers'
datasheets, SXM modules for A100, H100 and H200."""
MATRIX_SIZE = 2048
REPEATS = 5


@dataclass(frozen=True)
class Peak:
    """FLOP/s of all devices together, and where the number is from."""

    flops_per_second: float
    origin: str


def find_peak(devices: Sequence[jax.Device]) -> Peak | None:
    """The peak of these devices; None where they are not in the table.

    A CPU's peak is measured once: float32 matrix products on all cores of this machine, which also serve every virtual
    device.
    """
    kind = devices[0].device_kind
    if devices[0].platform == "cpu":
        peak = measure_matrix_product()
        return Peak(peak, f"{peak / 1e9:.0f} GFLOP/s, measured on this CPU (float32, {MATRIX_SIZE} × {MATRIX_SIZE})")
    for name, peak in BFLOAT16_PEAK.items():
        if name in kind:
            return Peak(
                peak * len(devices), f"{peak / 1e12:.0f} TFLOP/s a device, datasheet of {name} (dense bfloat16)"
            )
    return None


def measure_matrix_product() -> float:
    """FLOP/s of the best of a few float32 products of square matrices."""
    matrix = jnp.ones((MATRIX_SIZE, MATRIX_SIZE), jnp.float32)
    multiply = jax.jit(jnp.matmul)
    jax.block_until_ready(multiply(matrix, matrix))
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(multiply(matrix, matrix))
        seconds.append(time.perf_counter() - start)
    return 2 * MATRIX_SIZE**3 / min(seconds)
