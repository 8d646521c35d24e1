"""A finished prefix made by the real builders, harms of every kind to every kind of its files, and an oracle that says
what was hurt without asking the code under test.

A `TornWorld` is a working directory: recipes, a prefix, mirrors. `Template` builds it once and copies it for each case.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from artifact_world import World
from llamas import llama_yaml

from marin_build import refusals
from marin_build.artifact import mirror
from marin_build.artifact.examine import Status, examine_all
from marin_build.artifact.publish import Outcome
from marin_build.build import builder_of
from marin_build.errors import DriftError
from marin_build.recipe.dependencies import closure
from marin_build.recipe.target import parse_target
from marin_build.runs import decide

RAW = "raw/smoke/2026.06.28"
BYTES = "tokenizers/bytes/2026.06.28"
TRAIN = "tokenized/train/2026.06.28"
HELD_OUT = "tokenized/held_out/2026.06.28"
MODEL = "checkpoints/tiny/2026.06.28"
DATA = (RAW, BYTES, TRAIN, HELD_OUT)
ALL = (*DATA, MODEL)
STEPS, KEEP = 6, 2

_TOKENS = """
tokenizer: tokenizers/bytes/2026.06.28
source: {{type: artifact, target: raw/smoke/2026.06.28, files: [{files}]}}
format: {{type: jsonl, text_key: text}}
add_bos: false
add_eos: true
shard_bytes: 8000
token_budget: null
max_bad_documents: 0
"""
_RECIPES = {
    RAW: "source: {type: embedded, corpus: dclm_smoke, digest: dc67ce356cdf3299ba6f876c5522633e}\n",
    BYTES: "tokenizer: {method: bytes, special_tokens: {bos: null, eos: <|eos|>, pad: null}}\n",
    TRAIN: _TOKENS.format(files='"dclm_baseline/**/*.zst"'),
    HELD_OUT: _TOKENS.format(files="paloma/ptb/val/val.jsonl.gz"),
    MODEL: f"""
data:
  tokenizer: tokenizers/bytes/2026.06.28
  train:
    smoke: {{target: tokenized/train/2026.06.28, weight: 1}}
  sequence_length: 16
  mixture_block: 4
  attention_across_documents: true
{llama_yaml(257, 16)}
steps: {STEPS}
global_batch_size: 2
measure:
  validation: {{every_steps: {STEPS}, sets: {{held_out: {HELD_OUT}}}}}
  keep_every_steps: {KEEP}
""",
}
_EARLIER = {
    BYTES: ("<|eos|>", "<|end|>"),
    TRAIN: ("8000", "9000"),
    HELD_OUT: ("8000", "9000"),
    MODEL: ("seed: 0", "seed: 1"),
}
"""An edit that makes each recipe an earlier one; that of the raw text is the same, and drifts nowhere."""


class TornWorld(World):
    """A world whose artifacts are made by the real builders."""

    def build(self, target: str, *arguments: Any, **options: Any) -> Outcome:
        usual = {"processes": 1, "wandb": "disabled", "log_every_steps": 1, "rolling_checkpoint_minutes": None}
        usual |= {"compilation_cache": None, "lease_seconds": 0.5}
        return super().build(target, builder_of(parse_target(target).kind), **{**usual, **options})

    def run(self, *typed: str, force: str | None = None) -> list[str]:
        """What `snakemake TARGET…` does, without its seconds of start: plan, mirrors, jobs. Returns what was built."""
        book = self.book
        meant = [parse_target(text) for text in typed]
        order = closure(book, meant)
        statuses = examine_all(self.store, book, order)
        for status in statuses:
            mirror.refresh(self.store, status.target, status.record)
        if text := refusals.drift(book, statuses, meant if force else ()):
            raise DriftError(text)
        plan = decide(statuses, {t: [parse_target(n) for n in book.needs(t)] for t in order}, meant)
        for target in plan.runs:
            self.build(str(target), run=f"run-{os.urandom(4).hex()}")
        return [str(target) for target in plan.runs]

    def statuses(self, *targets: str) -> dict[str, Status]:
        found = examine_all(self.store, self.book, [parse_target(text) for text in targets])
        return {str(status.target): status for status in found}


# ---- what was hurt: an oracle of its own -----------------------------------------------------------------------------

Seen = tuple[int, bytes | None]
"""(inode, bytes) of a file; a folder has no bytes."""


def snapshot(folder: Path) -> dict[str, Seen]:
    """Every file and folder below `folder`."""
    found: dict[str, Seen] = {}
    for path in folder.rglob("*"):
        found[path.relative_to(folder).as_posix()] = (path.stat().st_ino, path.read_bytes() if path.is_file() else None)
    return found


def plain_record(data: bytes | None) -> dict[str, Any] | None:
    """A record that is whole, read with nothing but the standard library and xxh3."""
    try:
        body = json.loads(data or b"null")
        stated = body.pop("checksum")
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return body if stated == xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass")) else None
    except (ValueError, KeyError, AttributeError, TypeError):
        return None


def wrong_files(folder: Path, body: dict[str, Any]) -> set[str]:
    """The files that a record names and that are not as it says."""

    def is_right(entry: dict[str, Any]) -> bool:
        path = folder / entry["path"]
        if not path.is_file():
            return False
        data = path.read_bytes()
        return (len(data), xxhash.xxh3_128_hexdigest(data)) == (entry["bytes"], entry["xxh3_128"])

    return {entry["path"] for entry in body["files"] if not is_right(entry)}


def whole_steps(model: Path) -> list[int]:
    """Steps of a checkpoint whose files are as their manifest says."""

    def is_whole(folder: Path) -> bool:
        try:
            listed = json.loads((folder / "manifest.json").read_bytes())
            return not wrong_files(folder, listed)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    folders = (model / "checkpoints").glob("[0-9]*")
    return sorted(int(folder.name) for folder in folders if folder.is_dir() and is_whole(folder))


# ---- harms -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Torn:
    """A world to be hurt, with the dice and the old records that may be put in place."""

    world: TornWorld
    dice: random.Random
    targets: tuple[str, ...]
    """Those that are hurt."""
    old_records: dict[str, list[bytes]]

    def file(self, *targets: str) -> Path:
        """Some file; each group is as likely as another, however many files it has."""
        groups = [group for target in targets or self.targets for group in self.groups(target)]
        return self.dice.choice(self.dice.choice(groups))

    def target(self) -> str:
        return self.dice.choice(self.targets)

    def groups(self, target: str) -> list[list[Path]]:
        folder = self.world.path(target)
        kinds: dict[str, list[Path]] = {}
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            kinds.setdefault(_group(path.relative_to(folder)), []).append(path)
        kinds["mirror"] = [path for path in [mirror.path(parse_target(target))] if path.is_file()]
        return [paths for paths in kinds.values() if paths]


def _group(path: Path) -> str:
    first, name = path.parts[0], path.name
    if first == "checkpoints" and len(path.parts) > 2:
        return f"{path.parts[1]} {name if name in ('manifest.json', '_CHECKPOINT_METADATA') else 'tensors'}"
    return first if len(path.parts) > 1 else name if name.startswith(".") else path.suffix


def truncate(torn: Torn) -> None:
    path = torn.file()
    os.truncate(path, torn.dice.randrange(max(path.stat().st_size, 1)))


def empty(torn: Torn) -> None:
    os.truncate(torn.file(), 0)


def flip(torn: Torn) -> None:
    path = torn.file()
    data = bytearray(path.read_bytes())
    if data:
        data[torn.dice.randrange(len(data))] ^= 1 << torn.dice.randrange(8)
        path.write_bytes(data)


def delete(torn: Torn) -> None:
    torn.file().unlink()


def delete_folder(torn: Torn) -> None:
    """A folder inside of an artifact; a whole artifact that is gone was never there, as far as anybody can tell."""
    folder = torn.world.path(torn.target())
    if inner := sorted(path for path in folder.rglob("*") if path.is_dir()):
        shutil.rmtree(torn.dice.choice(inner))


def grow(torn: Torn) -> None:
    with open(torn.file(), "ab") as file:
        file.write(torn.dice.randbytes(torn.dice.randrange(1, 5000)))


def swap(torn: Torn) -> None:
    """Two files of one artifact, shards above all."""
    target = torn.target()
    group = torn.dice.choice(torn.groups(target))
    one, two = torn.dice.choice(group), torn.dice.choice(group)
    _swap(one, two)


def swap_targets(torn: Torn) -> None:
    """The records, or any other small file, of two artifacts."""
    one, two = torn.dice.sample(torn.targets, 2)
    name = torn.dice.choice([".artifact.json", ".artifact.json", ".attempt.json"])
    if torn.world.path(one, name).is_file() and torn.world.path(two, name).is_file():
        _swap(torn.world.path(one, name), torn.world.path(two, name))


def _swap(one: Path, two: Path) -> None:
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def another(torn: Torn) -> None:
    """One file gets the bytes of another, whatever the two are."""
    source, path = torn.file(), torn.file()
    path.write_bytes(source.read_bytes())


def old_record(torn: Torn) -> None:
    target = torn.target()
    torn.world.path(target, ".artifact.json").write_bytes(torn.dice.choice(torn.old_records[target]))


def half_record(torn: Torn) -> None:
    path = torn.world.path(torn.target(), ".artifact.json")
    if path.is_file():
        os.truncate(path, path.stat().st_size // 2)


def lose_record(torn: Torn) -> None:
    torn.world.path(torn.target(), ".artifact.json").unlink(missing_ok=True)


def foreign(torn: Torn) -> None:
    folder = torn.world.path(torn.target())
    inner = [folder, *sorted(path for path in folder.rglob("*") if path.is_dir())]
    name = torn.dice.choice(["notes.txt", "part-00000.arrow", "x.tmp", ".hidden", "core", "ünicode"])
    (torn.dice.choice(inner) / name).write_bytes(torn.dice.randbytes(100))


def to_folder(torn: Torn) -> None:
    path = torn.file()
    path.unlink()
    path.mkdir()
    if torn.dice.random() < 0.5:
        (path / "inside").write_text("x")


def lease(torn: Torn) -> None:
    """Of a builder that is gone, or garbage."""
    body: dict[str, Any] = {"owner": {"host": "h", "boot_id": "", "namespace": "", "pid": 1, "process_start": 0}}
    body["owner"] |= {"user": "u", "run": None}
    body |= {"token": 7, "nonce": "n", "lease_seconds": 0.5, "beat": 3, "wall_seconds": 0.0, "boot_seconds": 0.0}
    data = torn.dice.choice([json.dumps(body).encode(), b"", b"{}", torn.dice.randbytes(50)])
    torn.world.path(torn.target(), ".lease.json").write_bytes(data)


def caches(torn: Torn) -> None:
    """`.marin` is lost, or is full of something else."""
    shutil.rmtree(".marin", ignore_errors=True)
    if torn.dice.random() < 0.3:
        path = mirror.path(parse_target(torn.target()))
        path.mkdir(parents=True)


HARMS: tuple[Callable[[Torn], None], ...] = (
    truncate,
    empty,
    flip,
    flip,
    delete,
    delete_folder,
    grow,
    swap,
    swap_targets,
    another,
    old_record,
    half_record,
    lose_record,
    foreign,
    to_folder,
    lease,
    caches,
)
STAT_SEES = (truncate, empty, delete, delete_folder, grow, to_folder)
"""Harms that a plain run sees by itself, without a full verification before it."""


# ---- the world, once -------------------------------------------------------------------------------------------------


class Template:
    """A finished world; with three builds it has records of an earlier recipe and of an earlier build."""

    def __init__(self, folder: Path, builds: int = 3) -> None:
        self.world = TornWorld(folder)
        self.old_records: dict[str, list[bytes]] = {target: [] for target in ALL}
        for target, text in _RECIPES.items():
            self.world.write(target, text)
        if builds > 1:
            self._build_earlier()
        self._build(force="last build", keep=False)
        self.files = snapshot(folder)
        self.records = {target: self.world.record(target) for target in ALL}

    def _build_earlier(self) -> None:
        for target, (now, before) in _EARLIER.items():
            self.world.edit(target, now, before)
        self._build()
        for target, (now, before) in _EARLIER.items():
            self.world.edit(target, before, now)
        self._build(force="earlier build")

    def _build(self, force: str | None = None, keep: bool = True) -> None:
        for target in ALL:
            assert self.world.build(target, force=force).built
            if keep:
                self.old_records[target].append(self.world.path(target, ".artifact.json").read_bytes())

    def copy(self, folder: Path) -> TornWorld:
        shutil.copytree(self.world.folder, folder, dirs_exist_ok=True)
        return TornWorld(folder)
