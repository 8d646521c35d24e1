"""The train step of this package against an equivalent Llama in torch (transformers, eager), on CPU in float32.

    python benchmarks/train_step.py [--size 30m] [--rounds 5] [--steps 3] [--write]

Both do forward, backward, global-norm clip and AdamW on the same shapes; both with the same malloc settings, without
which either measures page faults. Needs the `parity` extra.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
from pathlib import Path

from interleaved import compare, serve

SIZES = {
    "3m": {"vocab_size": 4096, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4,
           "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 32, "batch": 16, "tokens": 256},
    "30m": {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "batch": 2, "tokens": 512},
}  # fmt: skip


def shape(size: str) -> tuple[dict[str, int], int, int]:
    """Fields of the model, sequences a batch, tokens a sequence."""
    fields = dict(SIZES[size])
    return fields, fields.pop("batch"), fields.pop("tokens")


def ours(size: str, scan_layers: bool) -> None:
    import jax
    import numpy as np

    from marin_build.model.transformer import initialize
    from marin_build.recipe.schema import AdamW, LlamaModel, Mesh
    from marin_build.training.mesh import make_mesh
    from marin_build.training.optimizer import make_optimizer
    from marin_build.training.state import TrainState
    from marin_build.training.step import make_train_step

    fields, batch, tokens = shape(size)
    model = LlamaModel(
        architecture="llama", rope_theta=10000.0, rope_scaling=None, rms_norm_eps=1e-5, initializer_range=0.02,
        tie_word_embeddings=False, **fields,
    )  # fmt: skip
    optimizer = make_optimizer(adamw_recipe(AdamW), 1000)
    jax.set_mesh(make_mesh(Mesh(), jax.devices()))
    graph, parameters = initialize(model, seed=0, compute_dtype="float32", scan_layers=scan_layers)
    state = TrainState(parameters, optimizer.init(parameters))
    step = make_train_step(graph, optimizer, z_loss=1e-4, micro_batches=1)
    data = {"tokens": np.random.default_rng(0).integers(0, model.vocab_size, (batch, tokens + 1), dtype=np.int32)}

    def one() -> None:
        nonlocal state
        state, measured = step(state, data)
        float(measured.loss)

    serve(one, batch * tokens)


def adamw_recipe(schema):
    return schema.model_validate(
        {"type": "adamw", "learning_rate": 3e-3, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.033,
         "no_weight_decay": ["norms", "embeddings"], "max_grad_norm": 1.0,
         "schedule": {"type": "cosine", "warmup_steps": 50, "min_lr_ratio": 0.1}}
    )  # fmt: skip


def torch_eager(size: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    fields, batch, tokens = shape(size)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = LlamaForCausalLM(LlamaConfig(**fields, tie_word_embeddings=False, attn_implementation="sdpa"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.033, fused=True)
    data = torch.randint(0, fields["vocab_size"], (batch, tokens + 1), generator=torch.Generator().manual_seed(0))

    def one() -> None:
        logits = model(input_ids=data[:, :-1], use_cache=False).logits.float()
        logsumexp = torch.logsumexp(logits, -1)
        target = logits.gather(-1, data[:, 1:, None])[..., 0]
        (logsumexp - target + 1e-4 * logsumexp**2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    serve(one, batch * tokens)


WORKERS = {
    "marin_build, unrolled layers": lambda size: ours(size, scan_layers=False),
    "marin_build, scanned layers": lambda size: ours(size, scan_layers=True),
    "torch eager (transformers, sdpa)": torch_eager,
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--size", choices=SIZES, default="30m")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--worker", choices=WORKERS)
    options.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-train-step-<size>.md")
    chosen = options.parse_args()
    if chosen.worker:
        return WORKERS[chosen.worker](chosen.size)

    from marin_build.build import MALLOC_TUNABLES

    commands = {name: [sys.executable, __file__, "--size", chosen.size, "--worker", name] for name in WORKERS}
    environment = {"GLIBC_TUNABLES": MALLOC_TUNABLES, "JAX_PLATFORMS": "cpu"}
    found = compare(commands, rounds=chosen.rounds, steps=chosen.steps, environment=environment)
    base = found["torch eager (transformers, sdpa)"]
    lines = [
        f"# Train step at {chosen.size}, {datetime.date.today()}",
        "",
        f"    python benchmarks/train_step.py --size {chosen.size} --rounds {chosen.rounds} --steps {chosen.steps}",
        "",
        f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores (shared), float32, medians of {chosen.rounds} "
        f"interleaved rounds, `GLIBC_TUNABLES={MALLOC_TUNABLES}` for all.",
        "",
        "| implementation | tokens / CPU-second | ratio | tokens / second | ratio |",
        "|---|---|---|---|---|",
    ]
    for name, m in found.items():
        ratios = m.tokens_per_cpu_second / base.tokens_per_cpu_second, m.tokens_per_second / base.tokens_per_second
        lines.append(
            f"| {name} | {m.tokens_per_cpu_second:.0f} | {ratios[0]:.2f} "
            f"| {m.tokens_per_second:.0f} | {ratios[1]:.2f} |"
        )
    print("\n".join(lines))
    if chosen.write:
        path = Path(__file__).parent / "results" / f"{datetime.date.today()}-train-step-{chosen.size}.md"
        path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
