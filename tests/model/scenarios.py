"""What is walked: a world of one target, the actors at it, and the invariant that every state must keep."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from artifact_world import RAW
from artifact_world import World as Tree
from bucket import SimulatedBucket
from disk import Disk
from explorer import Actor, Bounds, Run, current_actor, current_run, outside
from machine import modelled

from marin_build.artifact.accept import accept
from marin_build.artifact.context import BuildContext, BuildResult
from marin_build.artifact.digest import hash_bytes, root_digest
from marin_build.artifact.lease import Lease, parse_lease
from marin_build.artifact.local_store import LocalStore
from marin_build.artifact.object_files import ObjectFiles
from marin_build.artifact.object_store import ObjectStore
from marin_build.artifact.publish import build
from marin_build.artifact.record import Record, parse_record, read_record
from marin_build.artifact.store import ASIDE, LEASE, RECORD, Store
from marin_build.artifact.verify import verify
from marin_build.errors import DriftError
from marin_build.recipe.target import parse_target
from marin_build.settings import Settings

TARGET = parse_target(RAW)
LEASE_SECONDS = 100.0
PARTS = 2


def part(number: int, salt: str) -> bytes:
    """The bytes of one file that a builder makes."""
    return f"{number} {salt}\n".encode()


def digest(salt: str) -> str:
    """The digest of what a builder makes."""
    files = {f"part-{number}": part(number, salt) for number in range(PARTS)}
    return root_digest({"path": name, "bytes": len(b), "xxh3_128": hash_bytes(b)} for name, b in files.items())


OLD, NEW = digest("old"), digest("new")

HURT = "part-0"
"""The file that is damaged, where one is."""
COMMITS = re.compile(r"replace .*/\.artifact\.json")

Work = Callable[[], str]
Cast = Callable[["World", Run], None]


class World:
    """One target, which may be finished already, and the actors that `cast` adds."""

    shared: Disk | SimulatedBucket
    is_fenced = True
    """Whether the store lets only one builder at a time work, and commit in order."""

    def __init__(self, folder: Path, cast: Cast) -> None:
        self.tree = Tree.make(folder)
        self.folder, self._cast = folder, cast
        self.book = self.tree.book
        self.hurt: str | None = None
        """Digest of the artifact one of whose files is damaged from the start."""
        self.repaired = ""
        """What its bytes are made from: a repair makes the same ones."""
        self.shares = False
        """Whether builders bring their files to where other artifacts can take them over."""
        self._whole: set[bytes] = set()

    def store(self) -> Store:
        """The store, as whoever asks sees it."""
        raise NotImplementedError

    def judge_commit(self, actor: Actor) -> None:
        """Raise unless a builder may take the step that it is about to take."""

    # ---- before the first step ---------------------------------------------------------------------------------------

    def finished(self, salt: str = "old") -> None:
        """Start from a finished artifact."""
        self.building: dict[str, Lease] = {}
        with modelled(self.book), outside(Run(self, lambda run, choices: None, Bounds())):
            self.builder(salt)()
        self.begin_here()

    def begin_here(self) -> None:
        """Every schedule starts with the artifact as it is now."""
        raise NotImplementedError

    def damage(self, name: str, data: bytes | None) -> None:
        """Give a file of the artifact other bytes, or none, before the first step."""
        raise NotImplementedError

    def edited(self) -> None:
        """The recipe is another one from here on."""
        self.tree.edit(RAW, "quickstart", "dclm_smoke")
        self.book = self.tree.book

    @contextmanager
    def installed(self) -> Iterator[None]:
        with modelled(self.book):
            yield

    def start(self, run: Run) -> None:
        self.building = {}
        self._cast(self, run)

    # ---- actors ------------------------------------------------------------------------------------------------------

    def builder(self, salt: str = "new", *, force: str | None = None, wait: bool = False) -> Work:
        """A build, from its question to its end."""
        settings = Settings(prefix=str(self.folder / "artifacts"), lease_seconds=LEASE_SECONDS, wait=wait)

        def work() -> str:
            outcome = build(
                TARGET,
                self.book,
                self.store(),
                settings,
                self._parts(salt),
                forced_run=force,
                run=None,
                command=[],
            )
            return "built" if outcome.built else "reused"

        return work

    def _parts(self, salt: str) -> Callable[[BuildContext], BuildResult]:
        def make(context: BuildContext) -> BuildResult:
            with self._only_builder(context):
                kept = self.repaired if context.must_resume else salt
                for number in range(PARTS):
                    path = context.folder / f"part-{number}"
                    if not path.exists():
                        context.check_lease()
                        temporary = path.with_name(f"{path.name}.{_me()}.tmp")
                        temporary.write_bytes(part(number, kept))
                        os.replace(temporary, path)
                        context.keep([path.name], shared=self.shares)
            return BuildResult()

        return make

    @contextmanager
    def _only_builder(self, context: BuildContext) -> Iterator[None]:
        """Nobody else may be inside whose lease was renewed within the lease time."""
        run, me = current_run(), _me()
        for name, lease in self.building.items():
            silent = run.clock - lease._beaten > LEASE_SECONDS
            assert silent or not run.processes[name].alive or not self.is_fenced, (
                f"{me} and {name} build at the same time"
            )
        self.building[me] = context.check_lease.__self__  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self.building.pop(me, None)

    def reader(self) -> str:
        """Reads the record, every file, and the record again: where that is the same, the files were its own."""
        store = self.store()
        before = store.read(TARGET, RECORD)
        if before is None:
            return "saw nothing"
        record = parse_record(before, TARGET, RECORD)
        found = [self._hash(record, entry["path"]) for entry in record.content]
        if store.read(TARGET, RECORD) != before:
            return "saw a change"
        assert found == [entry["xxh3_128"] for entry in record.content], f"a reader read other bytes: {found}"
        return f"saw {record.digest[:4]}"

    def verifier(self) -> str:
        return "ok" if verify(self.store(), TARGET, True).ok else "damaged"

    def accepter(self) -> str:
        accept(self.store(), self.book, TARGET, "the same text")
        return "accepted"

    # ---- the invariant -----------------------------------------------------------------------------------------------

    def check(self, run: Run) -> None:
        """A reader sees nothing, or a whole artifact that may be there."""
        if run.shared_state not in self._whole:
            self._judge()
            self._whole.add(run.shared_state)
        for actor in run.actors.values():
            if actor.can_step() and COMMITS.fullmatch(actor.label):
                self.judge_commit(actor)

    def _judge(self) -> None:
        record = read_record(self.store(), TARGET)
        if record is None:
            return
        assert record.digest in (OLD, NEW), f"a mixture: {[entry['path'] for entry in record.content]}"
        problems = [entry["path"] for entry in record.content if self._hash(record, entry["path"]) != entry["xxh3_128"]]
        if record.digest == self.hurt:
            assert problems in ([], [HURT]), f"not what the record of {record.digest} says: {problems}"
            return
        assert not problems, f"not what the record of {record.digest} says: {problems}"
        assert not record.damage, f"marked as damaged without a reason: {record.damage}"

    def _hash(self, record: Record, name: str) -> str | None:
        """Hash of a file of an artifact; None where it is gone."""
        try:
            with self.store().files(record).open(name) as file:
                return hash_bytes(file.read())
        except FileNotFoundError:
            return None

    def finish(self, run: Run) -> None:
        """One plain run converges, whatever happened; only a drift that nobody forced or accepted stays."""
        self.building = {}
        try:
            self.builder(wait=True)()
        except DriftError:
            assert self.book.fingerprint(TARGET) != self._record().fingerprint
            self.builder(wait=True, force="once more")()
        self._judge()
        report = verify(self.store(), TARGET, True)
        assert report.ok, f"not whole after a plain run: {report.problems}"
        left = [path for path in report.foreign if not path.startswith(ASIDE)]
        assert left == [], f"left over: {left}"

    def _record(self) -> Record:
        record = read_record(self.store(), TARGET)
        assert record is not None
        return record


def _me() -> str:
    actor = current_actor()
    return actor.process.name if actor else "rerun"


class LocalWorld(World):
    """A local disk."""

    def __init__(self, folder: Path, cast: Cast) -> None:
        super().__init__(folder, cast)
        self._initial = folder / "initial"
        self._initial.mkdir()
        self._store = LocalStore(folder / "artifacts")
        self.shared: Disk = Disk(folder / "artifacts", self._initial)

    def store(self) -> Store:
        return self._store

    def begin_here(self) -> None:
        shutil.copytree(self.folder / "artifacts", self._initial, dirs_exist_ok=True)

    def damage(self, name: str, data: bytes | None) -> None:
        path = self._initial / RAW / name
        path.unlink()
        if data is not None:
            path.write_bytes(data)

    @contextmanager
    def installed(self) -> Iterator[None]:
        with super().installed(), self.shared.intercepted():
            yield

    def judge_commit(self, actor: Actor) -> None:
        """Whoever is about to write a record as a builder holds the lease."""
        lease = parse_lease(self._store.read(TARGET, LEASE))
        holder = lease.owner.user if lease else "nobody"
        name = actor.process.name
        assert not name.isupper() or holder == name, f"{name} commits, and the lease is that of {holder}"


class ObjectWorld(World):
    """A bucket; each actor has a scratch folder of its own."""

    def __init__(self, folder: Path, cast: Cast, *, conditional: bool = True, shares: bool = False) -> None:
        super().__init__(folder, cast)
        self.shares = shares
        self.shared: SimulatedBucket = SimulatedBucket(conditional=conditional)
        self.is_fenced = conditional

    def store(self) -> Store:
        return ObjectStore(self.shared, self.folder / "cache" / _me())

    def start(self, run: Run) -> None:
        shutil.rmtree(self.folder / "cache", ignore_errors=True)
        super().start(run)

    def begin_here(self) -> None:
        self.shared.initial = {key: data for key, (data, _) in self.shared.objects.items()}

    def damage(self, name: str, data: bytes | None) -> None:
        record = parse_record(self.shared.initial[f"{RAW}/{RECORD}"], TARGET, RECORD)
        key = ObjectFiles(self.shared, f"{RAW}/{record.folder}", record.files).key(name)
        if data is None:
            del self.shared.initial[key]
        else:
            self.shared.initial[key] = data


# ---- the scenarios -------------------------------------------------------------------------------------------------


def _builders(force: tuple[str | None, ...], *, wait: bool = False, beats: int = 0, hosts: bool = False) -> Cast:
    def cast(world: World, run: Run) -> None:
        run.are_alike = len(set(force)) == 1
        for number, (name, forced_run) in enumerate(zip("AB", force, strict=False)):
            work = world.builder(force=forced_run, wait=wait)
            run.add(name, work, host=f"host {number}" if hosts else "here", beats=beats)

    return cast


def _with_reader(world: World, run: Run) -> None:
    run.add("A", world.builder(force="r1"))
    run.add("reader", world.reader)


def _with_verifier(world: World, run: Run) -> None:
    run.add("A", world.builder(force="r1"))
    run.add("verifier", world.verifier)


def _with_accepter(world: World, run: Run) -> None:
    run.add("A", world.builder(force="r1"))
    run.add("accepter", world.accepter)


def _finished(world: World) -> None:
    world.finished()


def _flipped(world: World) -> None:
    world.finished()
    world.damage(HURT, b"X old\n")
    world.hurt, world.repaired = OLD, "old"


def _one_part_lost(world: World) -> None:
    world.finished("new")
    world.damage(HURT, None)
    world.hurt, world.repaired = NEW, "new"


def _drifted(world: World) -> None:
    world.finished()
    world.edited()


CRASH = Bounds(preemptions=0, crashes=1, jumps=0)
"""One crash, at every step of everybody."""
PAUSE = Bounds(preemptions=1, crashes=0, jumps=1, only_pauses=True)
"""One pause, short or longer than the lease, at every step of everybody."""
EVERYTHING = Bounds(preemptions=None, crashes=0, jumps=0)
"""Every interleaving, while nothing goes wrong."""


@dataclass(frozen=True)
class Scenario:
    """One world to walk."""

    name: str
    cast: Cast
    prepare: Callable[[World], None] = lambda world: None
    make: Callable[..., World] = LocalWorld
    quick: tuple[Bounds, ...] = (CRASH, PAUSE)
    """What is walked each time; every interleaving is walked by name."""

    def __str__(self) -> str:
        return self.name

    @contextmanager
    def world(self, folder: Path) -> Iterator[World]:
        world = self.make(folder, self.cast)
        self.prepare(world)
        with world.installed():
            yield world


LOST = Bounds(preemptions=0, crashes=0, jumps=0, lost_answers=1)
"""One lost answer, at every write of everybody."""

LOCAL = (
    Scenario("two builders from nothing", _builders((None, None))),
    Scenario("two builders that wait, with heartbeats", _builders((None, None), wait=True, beats=1), quick=()),
    Scenario("two builders on two machines", _builders((None, None), wait=True, hosts=True), quick=()),
    Scenario("a rebuild and a reader", _with_reader, _finished, quick=(PAUSE,)),
    Scenario("two rebuilds", _builders(("r1", "r2")), _finished, quick=(PAUSE,)),
    Scenario("a rebuild and a plain build", _builders(("r1", None)), _finished, quick=()),
    Scenario("a rebuild and verify --full", _with_verifier, _flipped, quick=()),
    Scenario("a rebuild and accept", _with_accepter, _drifted, quick=()),
    Scenario("two repairs", _builders((None, None)), _one_part_lost, quick=(CRASH,)),
)


def _unconditional(folder: Path, cast: Cast) -> World:
    return ObjectWorld(folder, cast, conditional=False)


def _shared(folder: Path, cast: Cast) -> World:
    return ObjectWorld(folder, cast, shares=True)


QUICK_ON_OBJECTS = {
    "two builders from nothing": (CRASH, PAUSE),
    "a rebuild and a reader": (PAUSE,),
    "two rebuilds": (PAUSE, LOST),
    "a rebuild and accept": (PAUSE, LOST),
    "two repairs": (CRASH,),
}
OBJECTS = tuple(
    replace(scenario, name=f"{scenario.name}, {kind}", make=make, quick=quick.get(scenario.name, ()))
    for kind, make, quick in (
        ("preconditions", ObjectWorld, QUICK_ON_OBJECTS),
        ("no preconditions", _unconditional, {"two builders from nothing": (PAUSE,)}),
        ("shared files", _shared, {"two builders from nothing": (CRASH,), "two repairs": (CRASH,)}),
    )
    for scenario in LOCAL
)
