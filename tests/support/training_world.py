"""A tiny world to train in: a byte tokenizer, token sets made by hand, two layers of width 32, a run of seconds.

As a script it trains in a process of its own, which a test may kill: `python training_world.py FOLDER '{"field": …}'`
prints its result as the last line. SIGTERM stops it, and it ends with the exit code of its error. With `distributed`
[process, processes, port] it is one of several that train together; with `pause` it waits for a signal at that point.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from marin_build.artifact.context import BuildContext, Dependency
from marin_build.artifact.stop import StopSignals
from marin_build.errors import MarinError
from marin_build.recipe.schema import CheckpointRecipe
from marin_build.recipe.target import parse_target
from marin_build.settings import Settings

TARGET = "checkpoints/tiny/dev"
TOKENIZER = "tokenizers/bytes/dev"
TRAIN, VALID = "tokenized/tiny_train/dev", "tokenized/tiny_valid/dev"
EOS, VOCABULARY = 256, 257
WORDS = ["the", "whale", "swims", "under", "a", "green", "ship", "and", "sings", "to", "nobody", "but", "itself"]

RECIPE: dict[str, Any] = {
    "data": {
        "tokenizer": TOKENIZER,
        "train": {"tiny": {"target": TRAIN, "weight": 1.0}},
        "sequence_length": 32,
        "mixture_block": 8,
        "attention_across_documents": False,
    },
    "model": {
        "architecture": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.05,
        "tie_word_embeddings": False,
    },
    "optimizer": {
        "type": "adamw",
        "learning_rate": 2e-2,
        "beta1": 0.9,
        "beta2": 0.95,
        "epsilon": 1e-8,
        "weight_decay": 0.1,
        "no_weight_decay": ["norms", "embeddings"],
        "max_grad_norm": 1.0,
        "schedule": {"type": "cosine", "warmup_steps": 3, "min_lr_ratio": 0.1},
    },
    "steps": 20,
    "global_batch_size": 8,
    "z_loss": 1e-4,
    "precision": {"parameters": "float32", "compute": "float32"},
    "seed": 0,
    "measure": {
        "validation": {"every_steps": 10, "sets": {"tiny/valid": VALID}},
        "keep_every_steps": 10,
        "baselines": ["byte_bigram"],
    },
}
SETTINGS = {"log_every_steps": 1, "rolling_checkpoint_steps": 3, "wandb": "disabled"}


def changed(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with some entries replaced, named by dotted paths: {"optimizer.learning_rate": 1.0}."""
    copy = json.loads(json.dumps(values))
    for path, value in changes.items():
        *parents, last = path.split(".")
        inner = copy
        for key in parents:
            inner = inner[key]
        inner[last] = value
    return copy


class TrainingWorld:
    """Dependencies and contexts below one folder; what is there already is used again."""

    def __init__(self, folder: Path, settings: Mapping[str, Any] = {}, **recipe_changes: Any):
        self.folder = folder
        self.settings = {**SETTINGS, "compilation_cache": None, **settings}
        self.recipe = CheckpointRecipe.model_validate(changed(RECIPE, recipe_changes))
        self.stop = threading.Event()
        self._tokenizer_digest = "7" * 32
        if not (folder / TOKENIZER).exists():
            self._make_tokenizer()
            self.make_set(TRAIN, documents=300, seed=1)
            self.make_set(VALID, documents=30, seed=2)

    @property
    def checkpoints(self) -> Path:
        return self.folder / TARGET / "checkpoints"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / TARGET / "metrics.jsonl").read_bytes().splitlines()]

    def context(self, **changes: Any) -> BuildContext:
        folder = self.folder / TARGET
        folder.mkdir(parents=True, exist_ok=True)
        sets = [component.target for component in self.recipe.data.train.values()]
        sets += self.recipe.measure.validation.sets.values() if self.recipe.measure.validation else []
        context = BuildContext(
            target=parse_target(TARGET),
            recipe=self.recipe,
            fingerprint="f" * 32,
            folder=folder,
            logs=folder / "logs",
            dependencies={TOKENIZER: self.tokenizer(), **{name: self.token_set(name) for name in sets}},
            settings=Settings(**self.settings),
            logger=logging.getLogger("tiny"),
            stop_requested=self.stop.is_set,
            check_lease=lambda: None,
        )
        return replace(context, **changes)

    def tokenizer(self) -> Dependency:
        record = {"name": "tokenizers/bytes", "version": "dev", "digest": self._tokenizer_digest}
        return Dependency(parse_target(TOKENIZER), self.folder / TOKENIZER, record)

    def token_set(self, target: str) -> Dependency:
        used = {"name": "tokenizers/bytes", "version": "dev", "fingerprint": "7" * 32, "digest": "7" * 32}
        return Dependency(parse_target(target), self.folder / target, {"digest": "8" * 32, "dependencies": [used]})

    def make_set(self, target: str, *, documents: int, seed: int) -> None:
        """Documents of a few random words each."""
        dice = random.Random(seed)
        texts = [" ".join(dice.choices(WORDS, k=dice.randint(3, 12))).encode() for _ in range(documents)]
        self.write_set(target, [np.array([*text, EOS], np.uint16) for text in texts])

    def write_set(
        self,
        target: str,
        documents: list[np.ndarray],
        vocabulary_size: int = VOCABULARY,
        loss_mask: np.ndarray | None = None,
    ) -> None:
        from marin_build.data.shards import FORMAT, LEDGER, write_shard

        folder = self.folder / target
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "part-00000.arrow"
        lengths = np.array([len(document) for document in documents], np.int64)
        write_shard(path, np.concatenate(documents), lengths, loss_mask)
        counts = {"tokens": int(lengths.sum()), "documents": len(documents)}
        ledger = {
            "format": FORMAT,
            "shards": [{"file": path.name, "bytes": path.stat().st_size, **counts}],
            "totals": counts,
            "tokenizer": {"vocabulary_size": vocabulary_size},
        }
        (folder / LEDGER).write_text(json.dumps(ledger))

    def _make_tokenizer(self) -> None:
        from marin_build.data import tokenizer
        from marin_build.recipe.schema import BytesTokenizer, SpecialTokens, TokenizerRecipe

        specials = SpecialTokens(bos=None, eos="<|eos|>", pad=None)
        recipe = TokenizerRecipe(tokenizer=BytesTokenizer(method="bytes", special_tokens=specials))
        folder = self.folder / TOKENIZER
        folder.mkdir(parents=True)
        tokenizer.build(replace(self.context(), target=parse_target(TOKENIZER), recipe=recipe, folder=folder))


def _pause_in_step(world: TrainingWorld, signals: StopSignals) -> None:
    """Wait after the line of step 5."""
    from marin_build.training.journal import Journal

    usual = Journal.write

    def write(journal: Journal, step: int, metrics: dict[str, float]) -> None:
        usual(journal, step, metrics)
        if step == 5:
            _wait_for_signal(world, signals)

    Journal.write = write


def _pause_in_save(world: TrainingWorld, signals: StopSignals, more_seconds: float = 0.5) -> None:
    """Wait when the checkpoint of step 6 is written and not committed, and some seconds more."""
    from marin_build.training import checkpoint

    usual = checkpoint.file_entries

    def paused(folder: Path, *arguments: Any, **options: Any) -> Any:
        if folder.name == "6":
            _wait_for_signal(world, signals)
            time.sleep(more_seconds)
        return usual(folder, *arguments, **options)

    checkpoint.file_entries = paused


def _pause_in_compilation(world: TrainingWorld, signals: StopSignals) -> None:
    """Compile a program so long that nobody waits for its end."""
    import jax
    import jax.numpy as jnp

    from marin_build.training import loop

    def long_program(x: jax.Array) -> jax.Array:
        for number in range(1500):
            x = jnp.sin(x @ x) + number
        return x

    def compilation() -> None:
        (world.folder / PAUSED).touch()
        while True:
            long.compile()

    long = jax.jit(long_program).lower(jnp.ones((64, 64)))
    loop.make_train_step = lambda *_, **__: SimpleNamespace(lower=lambda *_: SimpleNamespace(compile=compilation))


def _wait_for_signal(world: TrainingWorld, signals: StopSignals) -> None:
    (world.folder / PAUSED).touch()
    while not signals.requested():
        time.sleep(0.01)


PAUSED = "paused"
"""A file that says that the point is reached."""
PAUSES = {
    "step": _pause_in_step,
    "save": _pause_in_save,
    "long save": partial(_pause_in_save, more_seconds=600),
    "compilation": _pause_in_compilation,
}


def _join(process: int, processes: int, port: int) -> None:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=processes, process_id=process)


def main(folder: str, options: str = "{}") -> int:
    from marin_build.training.build import build

    logging.getLogger("tiny").addHandler(logging.StreamHandler(sys.stdout))
    logging.getLogger("tiny").setLevel(logging.INFO)
    logging.getLogger("tiny").propagate = False
    given = json.loads(options)
    distributed = given.pop("distributed", None)
    if distributed:
        _join(*distributed)
    pause = given.pop("pause", None)
    world = TrainingWorld(Path(folder), given.pop("settings", {}), **given)
    try:
        with StopSignals() as signals:
            if pause:
                PAUSES[pause](world, signals)
            result = build(world.context(stop_requested=signals.requested))
    except MarinError as error:
        print(error)
        return error.exit_code
    if result.after_record and not (distributed and distributed[0]):
        result.after_record()
    print(json.dumps({"digest": result.digest, "metrics": dict(result.metrics), "details": dict(result.details)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
