"""A torn world: a finished prefix, made by the real builders, is hurt at random. A full verification names what was
hurt and nothing else; one plain run heals exactly that.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torn_world import (
    ALL,
    DATA,
    HARMS,
    MODEL,
    STAT_SEES,
    STEPS,
    TRAIN,
    Seen,
    Template,
    Torn,
    TornWorld,
    plain_record,
    snapshot,
    whole_steps,
    wrong_files,
)

from marin_build.artifact import provenance
from marin_build.artifact.examine import State
from marin_build.errors import DamageError, DriftError, MarinError

RECORD, ATTEMPT = ".artifact.json", ".attempt.json"
MADE_ANEW = {"ledger.json", "state.json", "dataset_info.json", "tokenizer.json", "tokenizer_config.json"}
"""Small files that a repair of their artifact writes again, with the same bytes."""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Template]:
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_compilation_cache_dir
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(provenance, "circumstances", lambda recipes, command: {})
        patch.setattr(provenance, "code_hashes", dict)
        folder = tmp_path_factory.mktemp("template")
        patch.chdir(folder)
        yield Template(folder)
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@dataclass(frozen=True)
class Case:
    """A world before and after it was hurt."""

    world: TornWorld
    template: Template
    before: dict[str, Seen]
    after: dict[str, Seen]

    @property
    def changed(self) -> set[str]:
        """Paths of files and folders that are gone, new or others."""
        nothing = (0, b"")
        both = self.before.keys() | self.after.keys()
        return {path for path in both if self.before.get(path, nothing)[1] != self.after.get(path, nothing)[1]}


def tear(template: Template, folder: Path, seed: int, targets: tuple[str, ...]) -> None:
    """One case: hurt, look, run, look again."""
    dice = random.Random(seed)
    world, before = template.copy(folder), snapshot(folder)
    looks = dice.random() < 0.75
    harms = dice.choices(HARMS if looks else STAT_SEES, k=dice.randrange(1, 4))
    for harm in harms:
        harm(Torn(world, dice, targets, template.old_records))
    case = Case(world, template, before, snapshot(folder))
    print(f"seed {seed}: {', '.join(harm.__name__ for harm in harms)}; looks: {looks}")
    print(*sorted(case.changed), sep="\n")
    for target in ALL if looks else ():
        to_be_named = expected(world, target)
        assert {problem.path for problem in world.verify(target).problems} == to_be_named, target
    steps = whole_steps(world.path(MODEL))
    try:
        ran = world.run(*ALL)
    except MarinError as error:
        print("refused:", error)
        refused(case, steps, error)
    else:
        print("ran:", *ran)
        healed(case, ran)


def expected(world: TornWorld, target: str) -> set[str]:
    """What a full verification has to name."""
    record, attempt = plain(world.path(target, RECORD)), plain(world.path(target, ATTEMPT))
    if record is None or name_of(record) != target:
        return {RECORD}
    wrong = wrong_files(world.path(target), record)
    content = {entry["path"] for entry in record["files"] if not entry.get("outside_digest")}
    later = attempt is not None and name_of(attempt) == target and attempt["fingerprint"] != record["fingerprint"]
    return {RECORD} if wrong & content and later else wrong


def plain(path: Path) -> dict[str, Any] | None:
    return plain_record(path.read_bytes()) if path.is_file() else None


def name_of(body: dict[str, Any]) -> str:
    return f"{body['name']}/{body['version']}"


def refused(case: Case, steps: list[int], error: MarinError) -> None:
    """A run may stop where nothing whole is left of a model, or nothing says what its files are, or what was made."""
    world = case.world
    assert "-f " in str(error)
    if isinstance(error, DamageError):
        assert not steps or not (plain(world.path(MODEL, RECORD)) or plain(world.path(MODEL, ATTEMPT)))
    else:
        assert isinstance(error, DriftError), "an old record, and the attempt that belies it is hurt as well"
        assert any("/.artifact.json" in path for path in case.changed)
        assert any("/.attempt.json" in path for path in case.changed)
    left = snapshot(world.folder)
    assert [p for p in case.after if f"{MODEL}/checkpoints/" in p and p not in left and not p.endswith("tmp")] == []
    for target in ALL:
        if world.statuses(target)[target].state is not State.finished:
            world.build(target, force="after the refusal")
    consistent(case)


def healed(case: Case, ran: list[str]) -> None:
    """Everything is finished and whole, and nothing was touched that was not hurt."""
    now = snapshot(case.world.folder)
    gone = case.changed | {path for path in case.before if any(path.startswith(f"{out}/") for out in case.changed)}
    for target in ALL:
        front = f"artifacts/{target}/"
        nothing_says = {f"{front}{RECORD}", f"{front}{ATTEMPT}"} <= gone  # what the files are: all is made again
        for path in (path for path, (_, data) in case.before.items() if path.startswith(front) and data is not None):
            name, was = path.removeprefix(front), case.before[path]
            if target not in ran:
                noted = name == RECORD  # by the full verification
                assert path in gone or noted or now.get(path) == was, f"{path} was touched"
            elif target in DATA and not name.startswith((".", "logs/")):
                assert now[path][1] == was[1], f"{path} is not what it was"
                pair = {path, *(path.rpartition(".")[0] + ending for ending in (".arrow", ".json"))}
                assert now[path] == was or pair & gone or name in MADE_ANEW or nothing_says, f"{path} was made again"
    consistent(case)


def consistent(case: Case) -> None:
    """All is finished, to the same digests, and says so; what tells of the making may be lost, and is noted then."""
    world = case.world
    statuses = world.statuses(*ALL)
    for target in ALL:
        record = world.record(target)
        assert statuses[target].state is State.finished, statuses[target]
        assert record is not None
        assert record.digest == case.template.records[target].digest
        assert {p.path for p in world.verify(target).problems} <= {e["path"] for e in record.files} - {
            e["path"] for e in record.content
        }
        assert world.verify(target).ok
        assert not wrong_files(world.path(target), world.record(target).to_dict())
    record = world.record(MODEL)
    listed = {int(entry["path"].split("/")[1]) for entry in record.files if entry["path"].startswith("checkpoints/")}
    assert sorted(listed) == whole_steps(world.path(MODEL)), "a record vouches for steps that are as they were saved"
    assert STEPS in listed
    if not {f"artifacts/{MODEL}/{RECORD}", f"artifacts/{MODEL}/metrics.jsonl"} <= case.changed:  # else nobody knows
        assert record.metrics.keys() >= {"eval/bpb", "train/loss"}
    now = snapshot(world.folder)
    assert world.run(*ALL) == []
    assert snapshot(world.folder) == now, "a run with nothing to do changes nothing"


def hurt_by_one_bit(path: Path, dice: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    path.write_bytes(data)


@pytest.mark.row(8)
@pytest.mark.parametrize("seed", range(3))
def test_one_flipped_bit_is_named_by_a_full_verification(template: Template, tmp_path: Path, monkeypatch, seed: int):
    monkeypatch.chdir(tmp_path)
    world, dice = template.copy(tmp_path), random.Random(seed)
    shards = sorted(world.path(TRAIN).glob("*.arrow"))
    tensors = sorted(path for path in world.path(MODEL, f"checkpoints/{STEPS}").rglob("*") if path.parent.name == "d")
    for target, path in ((TRAIN, dice.choice(shards)), (MODEL, dice.choice(tensors))):
        hurt_by_one_bit(path, dice)
        assert world.verify(target, full=False).ok, "a stat sees no bit"
        name = path.relative_to(world.path(target)).as_posix()
        assert [problem.path for problem in world.verify(target).problems] == [name]
        assert [problem.path for problem in world.verify(target, full=False).problems] == [name], "the record says so"
        assert world.status(target).state is State.damaged
        hurt_by_one_bit(world.path(target, RECORD), dice)
        assert [problem.path for problem in world.verify(target, full=False).problems] == [RECORD]


@pytest.mark.row(9)
def test_what_others_put_beside_the_files_never_becomes_part_of_an_artifact(template: Template, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    world = template.copy(tmp_path)
    for target in DATA:
        world.path(target, "notes.txt").write_text("of somebody else")
        world.path(target, RECORD).write_bytes(b"{")
    world.run(*ALL)
    for target in DATA:
        assert world.record(target).digest == template.records[target].digest
        assert "notes.txt" in world.verify(target).foreign


@pytest.mark.row(8)
@pytest.mark.row(9)
@pytest.mark.parametrize("seed", range(12))
def test_what_is_hurt_is_named_and_one_run_heals_it(template: Template, tmp_path: Path, monkeypatch, seed: int):
    monkeypatch.chdir(tmp_path)
    tear(template, tmp_path, seed, ALL)


@pytest.mark.row(8)
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_soak_of_data(template: Template, tmp_path: Path, monkeypatch, seed: int):
    monkeypatch.chdir(tmp_path)
    tear(template, tmp_path, seed, DATA)


@pytest.mark.row(8)
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2000, 2100))
def test_soak_of_all(template: Template, tmp_path: Path, monkeypatch, seed: int):
    monkeypatch.chdir(tmp_path)
    tear(template, tmp_path, seed, ALL)
