"""A small world of recipes, artifacts and a builder, for tests of the truth; also a program, to be killed for real.

    python artifact_world.py FOLDER TARGET [--parts N] [--part-seconds S] [--lease-seconds S] [--force RUN] [--wait] …

builds one target below FOLDER and exits with the code of the error, if any.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from llamas import llama_yaml

from marin_build.artifact.context import BuildContext, BuildResult
from marin_build.artifact.examine import Status, examine
from marin_build.artifact.publish import Builder, Outcome, build
from marin_build.artifact.record import Record, read_record
from marin_build.artifact.store import open_store
from marin_build.artifact.verify import Report, verify
from marin_build.errors import MarinError, Stopped
from marin_build.recipe.load import RecipeBook
from marin_build.recipe.target import parse_target
from marin_build.settings import Settings

RAW = "raw/a/2026.06.28"
TOKENIZER = "tokenizers/t/2026.06.28"
TOKENS = "tokenized/x/2026.06.28"
RAW_DEV = "raw/a/dev"
TOKENS_DEV = "tokenized/x/dev"
CHECKPOINT = "checkpoints/c/2026.06.28"

_RAW = "source: {type: embedded, corpus: quickstart, digest: 0123456789abcdef0123456789abcdef}\n"
_TOKENIZER = "tokenizer: {method: bytes, special_tokens: {bos: null, eos: <eos>, pad: null}}\n"
_TOKENS = """\
tokenizer: tokenizers/t/2026.06.28
source: {{type: artifact, target: {raw}, files: [part-0]}}
format: {{type: text, document: file}}
add_bos: false
add_eos: true
shard_bytes: 1000
token_budget: null
max_bad_documents: 0
"""
_CHECKPOINT = f"""\
data:
  tokenizer: tokenizers/t/2026.06.28
  train:
    x: {{target: tokenized/x/2026.06.28, weight: 1}}
  sequence_length: 8
  mixture_block: 1
  attention_across_documents: true
{llama_yaml(257)}
steps: 10
global_batch_size: 1
measure:
  validation: {{every_steps: 10, sets: {{v: tokenized/v/2026.06.28}}}}
"""
RECIPES = {
    RAW: _RAW,
    RAW_DEV: _RAW,
    TOKENIZER: _TOKENIZER,
    TOKENS: _TOKENS.format(raw=RAW),
    TOKENS_DEV: _TOKENS.format(raw=RAW_DEV),
    "tokenized/v/2026.06.28": _TOKENS.format(raw=RAW),
    CHECKPOINT: _CHECKPOINT,
}


@dataclass
class Parts:
    """A builder that makes `count` files, one after the other, and skips those that an earlier attempt made whole.

    Their bytes follow from the fingerprint, the digests of the dependencies and `salt`.
    """

    count: int = 3
    seconds: float = 0
    salt: str = ""
    careful: bool = False
    """Whether the bytes of what an earlier attempt made are checked before they are believed, as real builders do."""
    made: list[str] = field(default_factory=list)
    """Names of the files that this builder really made."""
    before_part: Callable[[BuildContext, int], None] = lambda context, number: None

    def __call__(self, context: BuildContext) -> BuildResult:
        inputs = "".join(str(d.record["digest"]) for d in context.dependencies.values())
        for number in range(self.count):
            if context.stop_requested():
                raise Stopped(f"{context.target}: stopped before part {number}")
            self.before_part(context, number)
            path = context.folder / f"part-{number}"
            data = f"{number} {context.fingerprint} {inputs} {self.salt}\n".encode() * 5
            if self.careful and path.is_dir():
                path.rmdir()
            if not path.exists() or (self.careful and path.read_bytes() != data):
                time.sleep(self.seconds)
                context.check_lease()
                write_whole(path, data)
                context.keep([path.name])
                self.made.append(path.name)
                context.logger.info("made %s", path.name)
        return BuildResult(metrics={"parts": self.count}, details={"devices": ["none"]})


def write_whole(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    os.replace(temporary, path)


@dataclass(frozen=True)
class World:
    """A working directory with recipes in `config` and artifacts in `artifacts`."""

    folder: Path
    prefix: str = ""
    """URL of an object store; none: `artifacts` in the folder."""
    machine: str = "cache"
    """Name of the folder for what a machine keeps of an object store: another name is another machine."""

    @classmethod
    def make(cls, folder: Path, prefix: str = "") -> World:
        world = cls(folder, prefix)
        for target, text in RECIPES.items():
            world.write(target, text)
        return world

    @property
    def store(self) -> Any:
        return open_store(self.prefix or self.folder / "artifacts", self.folder / self.machine)

    def on_another_machine(self) -> World:
        return replace(self, machine=f"{self.machine}-other")

    @property
    def book(self) -> RecipeBook:
        """A new one, so that edits are seen."""
        return RecipeBook(self.folder / "config")

    def write(self, target: str, text: str) -> None:
        path = self.folder / "config" / f"{target}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def edit(self, target: str, old: str, new: str) -> None:
        path = self.folder / "config" / f"{target}.yaml"
        text = path.read_text()
        assert old in text, text
        path.write_text(text.replace(old, new, 1))

    def path(self, target: str, name: str = "") -> Path:
        return self.store.folder(parse_target(target)) / name

    def build(
        self,
        target: str,
        builder: Builder | None = None,
        *,
        force: str | None = None,
        run: str | None = None,
        **settings: Any,
    ) -> Outcome:
        merged = Settings(**{"prefix": self.prefix or str(self.folder / "artifacts"), "lease_seconds": 30, **settings})
        return build(
            parse_target(target),
            self.book,
            self.store,
            merged,
            builder or Parts(),
            forced_run=force,
            run=run,
            command=["marin-build", "build", target],
        )

    def build_all(self, *targets: str) -> None:
        for target in targets:
            self.build(target)

    def status(self, target: str) -> Status:
        return examine(self.store, self.book, parse_target(target))

    def record(self, target: str) -> Record | None:
        return read_record(self.store, parse_target(target))

    def verify(self, target: str, *, full: bool = True) -> Report:
        return verify(self.store, parse_target(target), full)

    def files(self, target: str) -> set[str]:
        """Every file and folder at the top of an artifact's folder, the protocol's own included."""
        return set(os.listdir(self.path(target)))

    def command(self, target: str, *options: str) -> list[str]:
        """The command line of another process that builds `target`."""
        return [sys.executable, __file__, str(self.folder), target, *options]


# ---- crashes ---------------------------------------------------------------------------------------------------------

WATCHED = ("open", "write", "fsync", "link", "replace", "rename", "unlink", "mkdir", "rmdir")


@contextmanager
def watched(see: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Call `see(name, arguments)` before each call of the file functions of `os` that change something."""
    real = {name: getattr(os, name) for name in WATCHED}

    def watching(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            see(name, arguments)
            return real[name](*arguments, **options)

        return call

    for name in WATCHED:
        setattr(os, name, watching(name))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def in_child(work: Callable[[], Any]) -> int:
    """Run `work` in a forked child; its wait status: 0, an exit code, or minus the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except MarinError as error:
            code = error.exit_code
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at(call: int, work: Callable[[], Any]) -> int:
    """Run `work` in a child that is killed at its `call`-th watched call; half of a write is written first."""
    seen = 0

    def see(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        seen += 1
        if seen == call:
            if name == "write":
                descriptor, data = arguments
                with open(f"/proc/self/fd/{descriptor}", "ab", buffering=0) as file:
                    file.write(bytes(data)[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    def watched_work() -> None:
        with watched(see):
            work()

    return in_child(watched_work)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("target")
    parser.add_argument("--parts", type=int, default=3)
    parser.add_argument("--part-seconds", type=float, default=0)
    parser.add_argument("--lease-seconds", type=float, default=30)
    parser.add_argument("--salt", default="")
    parser.add_argument("--force")
    parser.add_argument("--run")
    parser.add_argument("--wait", action="store_true")
    options = parser.parse_args()
    os.chdir(options.folder)
    builder = Parts(options.parts, options.part_seconds, options.salt)
    try:
        outcome = World(options.folder).build(
            options.target,
            builder,
            force=options.force,
            run=options.run,
            lease_seconds=options.lease_seconds,
            wait=options.wait,
        )
    except MarinError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print("built" if outcome.built else "reused", *builder.made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
