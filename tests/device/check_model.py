"""Check the model on whatever device is here: python tests/device/check_model.py

1. Every attention backend that can run against the plain formula: output and gradients, with and without segments.
2. One train step in float32 and in bfloat16, with each way to rematerialise: they must agree on loss and gradients.
3. The loss of a few steps must fall.
On an accelerator shapes are real ones and times are printed. What the hardware here cannot run is named and skipped.
Exit code 0 if nothing that ran failed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from marin_build.model import kernels
from marin_build.model.attention import PLATFORM_OF_KERNEL, attention, default_backend
from marin_build.model.counting import flops_per_token, parameter_count
from marin_build.model.sharding import batch_sharding, parameter_shardings
from marin_build.model.transformer import Options, abstract, initialize
from marin_build.recipe.schema import LlamaModel, Mesh
from marin_build.training.loss import cross_entropy
from marin_build.training.mesh import make_mesh

PLATFORM = jax.default_backend()
ON_ACCELERATOR = PLATFORM != "cpu"
# bfloat16 keeps 8 bits, 0.4% a rounding; float32 is multiplied in float32 by all backends.
ATTENTION_TOLERANCE = {"bfloat16": 2e-2, "float32": 1e-4}

MODEL = LlamaModel(
    architecture="llama",
    vocab_size=32768 if ON_ACCELERATOR else 256,
    hidden_size=1024 if ON_ACCELERATOR else 64,
    intermediate_size=4096 if ON_ACCELERATOR else 128,
    num_hidden_layers=8 if ON_ACCELERATOR else 2,
    num_attention_heads=8 if ON_ACCELERATOR else 4,
    num_key_value_heads=4 if ON_ACCELERATOR else 2,
    head_dim=128 if ON_ACCELERATOR else 16,
    rope_theta=10000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    initializer_range=0.02,
    tie_word_embeddings=False,
)
ROWS = 8 * jax.device_count() if ON_ACCELERATOR else 4 * jax.device_count()
TOKENS = 2048 if ON_ACCELERATOR else 64
STEPS = 5


@dataclass(frozen=True)
class Check:
    """One line of the report. `difference` is relative to the largest value; None: skipped."""

    name: str
    difference: float | None
    allowed: float = 0.0
    note: str = ""

    @property
    def failed(self) -> bool:
        return self.difference is not None and not self.difference <= self.allowed

    def __str__(self) -> str:
        if self.difference is None:
            return f"skipped  {self.name}: {self.note}"
        verdict = "FAILED" if self.failed else "ok"
        return f"{verdict:<8} {self.name}: difference {self.difference:.1e}, allowed {self.allowed:.0e}  {self.note}"


# ---- 1. attention ----------------------------------------------------------------------------------------------------


def check_attention() -> Iterator[Check]:
    for backend in ("block", "cudnn", "splash"):
        for dtype in ("float32", "bfloat16"):
            for has_segments in (False, True):
                yield check_backend(backend, dtype, has_segments)


def check_backend(backend: str, dtype: str, has_segments: bool) -> Check:
    name = f"attention {backend} {dtype}{' with segments' * has_segments}"
    head_dim = 128 if ON_ACCELERATOR else 64
    tokens = TOKENS if ON_ACCELERATOR else 150
    if backend == "splash" and PLATFORM == "cpu":
        function, note = partial(kernels.splash, interpret=True), "interpreted, not the real kernel"
    elif PLATFORM_OF_KERNEL.get(backend, PLATFORM) != PLATFORM:
        return Check(name, None, note=f"needs a {PLATFORM_OF_KERNEL[backend]}, these are {PLATFORM} devices")
    elif backend == "cudnn" and not kernels.cudnn_can_run(tokens, head_dim, jnp.dtype(dtype), has_segments):
        return Check(name, None, note="cuDNN has no such kernel")
    else:
        function, note = partial(attention, backend=backend), ""
    random = np.random.default_rng(0)
    query, key, value, weights = (random.normal(size=(2, tokens, heads, head_dim)) for heads in (8, 4, 4, 8))
    arrays = [jnp.asarray(array, dtype) for array in (query, key, value)]
    segment_ids = jnp.asarray(1 + np.cumsum(random.random((2, tokens)) < 0.01, axis=1), jnp.int32)
    differentiate = partial(attention_results, weights=weights, segment_ids=segment_ids if has_segments else None)
    with jax.default_matmul_precision("float32"):
        exact = jax.jit(partial(differentiate, partial(attention, backend="reference")))(
            *(array.astype(jnp.float32) for array in arrays)
        )
        seen, milliseconds = timed(jax.jit(partial(differentiate, function)), *arrays)
    difference = max(relative_difference(mine, theirs) for mine, theirs in zip(seen, exact, strict=True))
    return Check(name, difference, ATTENTION_TOLERANCE[dtype], f"{milliseconds}{note}")


def attention_results(function: Callable[..., jax.Array], *arrays: jax.Array, weights: Any, segment_ids: Any) -> Any:
    """Output and gradients of a weighted sum of it."""

    def scalar(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        mixed = function(*arrays, segment_ids)
        return (mixed.astype(jnp.float32) * weights).sum(), mixed

    (_, mixed), gradients = jax.value_and_grad(scalar, argnums=(0, 1, 2), has_aux=True)(*arrays)
    return mixed, *gradients


# ---- 2. and 3. the step ----------------------------------------------------------------------------------------------


def check_steps() -> Iterator[Check]:
    mesh = make_mesh(Mesh(), jax.devices())
    with jax.set_mesh(mesh):
        _, parameters = initialize(MODEL, seed=0, compute_dtype="float32")
        tokens = np.tile(np.random.default_rng(0).integers(0, MODEL.vocab_size, (ROWS, 17)), TOKENS // 17 + 1)
        tokens = jax.device_put(tokens[:, : TOKENS + 1].astype(np.int32), batch_sharding(mesh))
        exact = jax.jit(gradient_function(compute_dtype="float32", attention_backend="block"))(parameters, tokens)
        for dtype, allowed in (("float32", 1e-4), ("bfloat16", 5e-2)):
            for rematerialization in ("none", "dots", "full"):
                options = Options(compute_dtype=dtype, rematerialization=rematerialization)
                seen, milliseconds = timed(jax.jit(gradient_function(**options)), parameters, tokens)
                difference = max(jax.tree.leaves(jax.tree.map(norm_difference, seen, exact)))
                backend = default_backend(TOKENS, MODEL.head_dim, jnp.dtype(dtype), has_segments=False)
                name = f"loss and gradients {dtype}, rematerialisation {rematerialization}, attention {backend}"
                yield Check(name, difference, allowed, milliseconds)
        yield check_learning(parameters, tokens, mesh)


def gradient_function(**options: Any) -> Callable[..., Any]:
    graph, _ = abstract(MODEL, **options)

    def loss(parameters: Any, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graph, parameters)
        total, _ = cross_entropy(model(tokens[:, :-1]), model.output_embedding(), tokens[:, 1:], z_loss=1e-4)
        return total / (ROWS * TOKENS)

    return jax.value_and_grad(loss)


def check_learning(parameters: Any, tokens: jax.Array, mesh: jax.sharding.Mesh) -> Check:
    """A few AdamW steps in bfloat16 on one batch; the loss must fall by a twentieth at least."""
    gradient = gradient_function(compute_dtype="bfloat16")
    optimizer = optax.adamw(1e-3)

    @partial(jax.jit, donate_argnums=0)
    def step(state: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
        loss, gradients = gradient(state[0], tokens)
        updates, moments = optimizer.update(gradients, state[1], state[0])
        state = (optax.apply_updates(state[0], updates), moments)
        return jax.lax.with_sharding_constraint(state, parameter_shardings(state, mesh)), loss

    shardings = parameter_shardings(jax.eval_shape(optimizer.init, parameters), mesh)
    state = (parameters, jax.jit(optimizer.init, out_shardings=shardings)(parameters))
    losses, seconds = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        state, loss = step(state, tokens)
        losses.append(float(loss))
        seconds.append(time.perf_counter() - start)
    rate = ROWS * TOKENS / min(seconds)
    speed = f"{rate:,.0f} tokens/s, {rate * flops_per_token(MODEL, TOKENS) / 1e12:.2f} TFLOP/s"
    note = f"{parameter_count(MODEL) / 1e6:.0f} M parameters, losses {losses[0]:.3f} to {losses[-1]:.3f}, {speed}"
    return Check(f"{STEPS} steps learn (last loss over the first)", losses[-1] / losses[0], 0.95, note)


# ---- helpers ---------------------------------------------------------------------------------------------------------


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """The result, and on an accelerator the shortest of three times."""
    result = jax.block_until_ready(function(*arguments))
    if not ON_ACCELERATOR:
        return result, ""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return result, f"{1e3 * min(seconds):.2f} ms "


def relative_difference(mine: jax.Array, theirs: jax.Array) -> float:
    return float(jnp.abs(mine.astype(jnp.float32) - theirs).max() / jnp.abs(theirs).max())


def norm_difference(mine: jax.Array, theirs: jax.Array) -> float:
    return float(jnp.linalg.norm(mine - theirs) / jnp.linalg.norm(theirs))


def main() -> int:
    print(f"jax {jax.__version__}, {jax.device_count()} × {jax.devices()[0].device_kind} ({PLATFORM})", flush=True)
    checks = []
    for check in chain(check_attention(), check_steps()):
        print(check, flush=True)
        checks.append(check)
    failed = sum(check.failed for check in checks)
    skipped = sum(check.difference is None for check in checks)
    print(f"{len(checks) - failed - skipped} ok, {failed} failed, {skipped} skipped for want of hardware")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
