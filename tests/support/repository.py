"""A small repository of its own for each test: this one's Snakefile, rules and profiles, with tiny recipes.

Fixtures are imported by the `conftest.py` of the folders that run Snakemake.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from marin_build.artifact import mirror
from marin_build.artifact.digest import file_entry, root_digest
from marin_build.artifact.local_store import LocalStore
from marin_build.artifact.record import Record, read_record, write_record
from marin_build.recipe.dependencies import identity_dependencies
from marin_build.recipe.load import RecipeBook
from marin_build.recipe.target import parse_target

ROOT = Path(__file__).resolve().parents[2]

TOKENIZED = """
tokenizer: {tokenizer}
source: {{type: artifact, target: {raw}, files: [validation.jsonl]}}
format: {{type: jsonl, text_key: text}}
add_bos: true
add_eos: true
shard_bytes: 50000
token_budget: null
max_bad_documents: 0
"""

CHECKPOINT = """
data:
  tokenizer: tokenizers/bytes/2026.01.01
  train:
    play: {{target: {tokens}, weight: 1}}
  sequence_length: 32
  mixture_block: 8
  attention_across_documents: false
model:
  architecture: llama
  vocab_size: 258
  hidden_size: 16
  intermediate_size: 32
  num_hidden_layers: 2
  num_attention_heads: 2
  num_key_value_heads: 2
  head_dim: 8
  rope_theta: 10000
  rope_scaling: null
  rms_norm_eps: 1e-5
  initializer_range: 0.02
  tie_word_embeddings: false
optimizer:
  type: adamw
  learning_rate: 3e-3
  beta1: 0.9
  beta2: 0.95
  epsilon: 1e-8
  weight_decay: 0.1
  no_weight_decay: [norms, embeddings]
  max_grad_norm: 1.0
  schedule: {{type: cosine, warmup_steps: 2, min_lr_ratio: 0.1}}
steps: 20
global_batch_size: 4
z_loss: 0
precision: {{parameters: float32, compute: float32}}
seed: 0
measure:
  validation:
    every_steps: 10
    sets: {{play: {validation}}}
"""

RAW = "raw/play/2026.01.01"
BYTES = "tokenizers/bytes/2026.01.01"
TOKENS = "tokenized/play/2026.01.01"
HELD_OUT = "tokenized/held_out/2026.01.01"
MODEL = "checkpoints/tiny/2026.01.01"
TOKENS_DEV = "tokenized/play/dev"
MODEL_DEV = "checkpoints/tiny/dev"
QUICKSTART = "checkpoints/quickstart/2026.06.28"


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err

    @property
    def is_idle(self) -> bool:
        return self.code == 0 and "Nothing to be done" in self.text

    @property
    def table(self) -> dict[str, str]:
        """The plan that `-n` prints on stderr: target → why."""
        rows = [line[2:].split("  ", 1) for line in self.err.splitlines() if line.startswith("  ") and "/" in line]
        return {target: why.strip() for target, why in rows}


class Repository:
    """A working directory with recipes, and what is run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = LocalStore(folder / "artifacts")

    # ---- recipes -----------------------------------------------------------------------------------------------------

    def path(self, target: str) -> Path:
        return self.folder / "config" / f"{target}.yaml"

    def write(self, target: str, text: str) -> None:
        self.path(target).parent.mkdir(parents=True, exist_ok=True)
        self.path(target).write_text(text)

    def edit(self, target: str, old: str, new: str) -> None:
        text = self.path(target).read_text()
        assert text.count(old) == 1, f"{target} does not hold {old!r} once"
        self.path(target).write_text(text.replace(old, new))

    @property
    def book(self) -> RecipeBook:
        return RecipeBook(self.folder / "config")

    # ---- artifacts ---------------------------------------------------------------------------------------------------

    def artifact(self, target: str) -> Path:
        return self.folder / "artifacts" / target

    def record(self, target: str) -> Record | None:
        return read_record(self.store, parse_target(target))

    def mirror(self, target: str) -> Path:
        return self.folder / mirror.FOLDER / f"{target}.json"

    def finish(self, *targets: str, content: str = "content") -> None:
        """Make targets finished without a builder: one file each, with a true record."""
        for target in map(parse_target, targets):
            book, folder = self.book, self.artifact(str(target))
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "data.txt").write_text(f"{target} {content}")
            files = (file_entry(folder / "data.txt"),)
            needs = [self.record(text) for text in identity_dependencies(book.load(target))]
            dependencies = tuple(
                {"name": r.name, "version": r.version, "fingerprint": r.fingerprint, "digest": r.digest} for r in needs
            )
            body = {"recipe": book.identity(target), "dependencies": dependencies, "files": files}
            identity = {"fingerprint": book.fingerprint(target), "digest": root_digest(files)}
            write_record(self.store, Record(target.name, target.version, target.kind, **identity, **body))

    def finish_all(self) -> None:
        self.finish(RAW, BYTES, TOKENS, HELD_OUT, MODEL)

    # ---- commands ----------------------------------------------------------------------------------------------------

    def command(self, *arguments: str, **environment: str) -> Finished:
        run = subprocess.run(
            arguments, cwd=self.folder, env=self.environment(**environment), capture_output=True, text=True, timeout=600
        )
        return Finished(run.returncode, run.stdout, run.stderr)

    def environment(self, **more: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("MARIN_", "SNAKEMAKE_"))}
        return {**kept, "PATH": f"{Path(sys.executable).parent}:{kept['PATH']}", **more}

    def snakemake(self, *arguments: str, **environment: str) -> Finished:
        """In a process of its own, as a user types it."""
        return self.command(sys.executable, "-m", "snakemake", *arguments, **environment)

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        """In the background, at the head of a process group of its own."""
        return subprocess.Popen(
            [sys.executable, "-m", "snakemake", *arguments],
            cwd=self.folder,
            env=self.environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return make_repository(tmp_path / "repository")


@pytest.fixture(scope="session")
def new_repository() -> Callable[[Path], Repository]:
    return make_repository


def make_repository(folder: Path) -> Repository:
    folder.mkdir()
    for name in ("rules", "profiles"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("tpu", "gpu", "local", "slurm"):
        (folder / name).symlink_to(f"profiles/{name}")
    shutil.copy(ROOT / "Snakefile", folder)
    made = Repository(folder)
    (folder / "config").mkdir()
    shutil.copy(ROOT / "config/config.yaml", folder / "config")
    for target in ("raw", "tokenizers", "tokenized", "checkpoints"):
        shutil.copytree(ROOT / "config" / target / "quickstart", folder / "config" / target / "quickstart")
    made.write(RAW, (ROOT / "config/raw/quickstart/2026.06.28.yaml").read_text())
    made.write(BYTES, (ROOT / "config/tokenizers/bytes/2026.06.28.yaml").read_text())
    for tokens in (TOKENS, HELD_OUT, TOKENS_DEV):
        made.write(tokens, TOKENIZED.format(tokenizer=BYTES, raw=RAW))
    made.write(MODEL, CHECKPOINT.format(tokens=TOKENS, validation=HELD_OUT))
    made.write(MODEL_DEV, CHECKPOINT.format(tokens=TOKENS_DEV, validation=HELD_OUT))
    return made


@pytest.fixture
def snakemake(repository: Repository, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Snakemake's command line in this process: fast, but only for what starts no jobs."""
    from snakemake import cli

    for name in [name for name in os.environ if name.startswith(("MARIN_", "SNAKEMAKE_"))]:
        monkeypatch.delenv(name)

    def run(*arguments: str) -> Finished:
        monkeypatch.chdir(repository.folder)
        monkeypatch.setattr(sys, "argv", ["snakemake", *arguments])
        monkeypatch.setattr(sys, "path", list(sys.path))
        capfd.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main(list(arguments))
        return Finished(end.value.code or 0, *capfd.readouterr())

    return run


# ---- builders that wait ----------------------------------------------------------------------------------------------

GATE = '''
"""Makes builders wait, once they hold the lease, until a file is there; or be stopped once."""

import os, sys, time
from pathlib import Path

if "build" in sys.argv[1:2]:
    import marin_build.build as table
    from marin_build.errors import Stopped

    builder_of = table.builder_of
    gate = Path(os.environ["GATE"])

    def gated(kind):
        def build(context):
            (gate / f"begun-{context.target.kind}").touch()
            if os.environ.get("STOP_ONCE") == context.target.kind and not (gate / "stopped").exists():
                (gate / "stopped").touch()
                raise Stopped(f"{context.target}: pretended pre-emption")
            while not (gate / "open").exists() and context.target.kind == os.environ.get("WAIT_IN"):
                if context.stop_requested():
                    raise Stopped(f"{context.target}: stopped")
                time.sleep(0.02)
            return builder_of(kind)(context)

        return build

    table.builder_of = gated
'''


class Gate:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "python").mkdir(parents=True)
        (folder / "python/sitecustomize.py").write_text(GATE)

    def environment(self, **more: str) -> dict[str, str]:
        return {"GATE": str(self.folder), "PYTHONPATH": str(self.folder / "python"), **more}

    def open(self) -> None:
        (self.folder / "open").touch()

    def wait_for(self, kind: str, run: subprocess.Popen[str]) -> None:
        until = time.monotonic() + 120
        while not (self.folder / f"begun-{kind}").exists():
            assert run.poll() is None, run.communicate()[0]
            assert time.monotonic() < until, f"no builder of {kind} began"
            time.sleep(0.05)


@pytest.fixture
def gate(tmp_path):
    made = Gate(tmp_path / "gate")
    yield made
    made.open()
