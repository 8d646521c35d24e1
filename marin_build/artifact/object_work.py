"""An attempt on an object store: it works in a scratch folder of this machine, and its files are put into its build."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marin_build.artifact import kept
from marin_build.artifact.attempt import Attempt
from marin_build.artifact.attempt_log import terminal_logger
from marin_build.artifact.bucket import at_once
from marin_build.artifact.digest import file_entries, file_entry, list_files
from marin_build.artifact.donors import takeable
from marin_build.artifact.lease import Lease
from marin_build.artifact.object_files import ObjectFiles
from marin_build.artifact.pool import pool_key
from marin_build.artifact.record import Record
from marin_build.artifact.store import LOGS, RECORD
from marin_build.artifact.taking import take_files
from marin_build.artifact.verify import check_all, check_bytes, check_sizes
from marin_build.artifact.work import Work
from marin_build.artifact.workspace import remove
from marin_build.errors import MarinError
from marin_build.recipe.target import Target

if TYPE_CHECKING:
    from marin_build.artifact.object_store import ObjectStore

Entry = Mapping[str, Any]
COPIED_BYTES = 64 << 20
NOTED_FROM, NOTED_AFTER_SECONDS = 1000, 10.0
"""So many files are taken over, or for so long, before it is written down that they were: a killed attempt has only to
ask for them again."""
PASSES = 3
"""So often an upload is tried whose object has another size than the file."""


NOTED = ("path", "bytes", "xxh3_128", "pool", "taken")
"""What is noted of a file. `taken`: from another artifact, so that it does not lie in the scratch folder."""


@dataclass(frozen=True)
class Source:
    """Files of an earlier build that a new one goes on with."""

    files: ObjectFiles
    entries: Mapping[str, Entry]
    believes: bool = False
    """Whether the builder is given a file that is not as its entry says, to judge for itself."""


@dataclass(frozen=True)
class _Piece:
    """A local file that is to be brought to the store."""

    place: Path
    entry: Entry


def _of(entry: Entry | None, keys: Sequence[str] = NOTED[:3]) -> dict[str, Any]:
    """What an entry says of these; as it stands, which bytes a file has."""
    return {key: entry[key] for key in keys if key in entry} if entry else {}


def _of_their_size(files: ObjectFiles, entries: Sequence[Entry]) -> list[Entry]:
    """Those that are there."""
    bad = {problem.path for problem in check_sizes(files, entries)}
    return [entry for entry in entries if entry["path"] not in bad]


class ObjectWork(Work):
    """Only this attempt writes below its `place`."""

    def __init__(self, store: ObjectStore, attempt: Attempt, folder: Path, logs: Path) -> None:
        self._store, self._bucket = store, store.bucket
        self.attempt, self.folder, self.logs, self.place = attempt, folder, logs, attempt.folder
        self._files = ObjectFiles(self._bucket, f"{attempt.target}/{attempt.folder}")
        self._kept: dict[str, Entry] = {}
        self._copies = folder.parent / "copies"
        self._links = 0
        self._not_noted: list[Entry] = []
        """What was taken over since the last list of the chain."""
        self._noted = time.monotonic()
        self._seen: dict[str, bool] = {}
        """By key in the pool, whether the object is there: asked once for all that a donor has there."""
        self._donors: set[tuple[Target, str]] = set()
        self._keeping = threading.Lock()
        self._is_committed = False

    # ---- from earlier builds -----------------------------------------------------------------------------------------

    def carry(self, sources: Sequence[Source]) -> None:
        """Take over the files of `sources`, those of the first before those of the others, and begin the chain."""
        for source in sources:
            missing = [entry for path, entry in source.entries.items() if path not in self._kept]
            entries = [_of(entry, NOTED) for entry in missing]
            referred = [entry for entry in entries if entry.get("pool") and entry.get("taken")]
            self._kept |= {entry["path"]: entry for entry in _of_their_size(source.files, referred)}
            others = [entry for entry in entries if not (entry.get("pool") and entry.get("taken"))]
            found = at_once(lambda entry, source=source: self._carry(source, entry), others)  # type: ignore[misc]
            self._kept |= {entry["path"]: entry for entry, is_there in zip(others, found, strict=True) if is_there}
        self._write_link(self._kept.values(), ())

    def _carry(self, source: Source, entry: Entry) -> bool:
        """True when the file is in the scratch folder, unless it was taken over, and in the build. What this machine
        has is newer."""
        path, problem = self.folder / entry["path"], None
        if entry.get("taken"):
            pass
        elif path.exists():
            found = file_entry(path)
            problem = None if found["xxh3_128"] == entry["xxh3_128"] else "was changed since"
        else:
            problem = source.files.download(entry, path)
            if problem and not source.believes:
                terminal_logger().warning("%s/%s: %s; it is made again", source.files.shown, entry["path"], problem)
                path.unlink(missing_ok=True)
        return not problem and self._is_in_store(source.files, entry)

    def _is_in_store(self, source: ObjectFiles, entry: Entry) -> bool:
        """True when the file is in the pool, or now in the build: copied inside the store."""
        if not entry.get("pool"):
            try:
                self._bucket.copy(source.key(entry["path"]), self._key(entry))
            except FileNotFoundError:
                return False
        return bool(self._bucket.size(self._key(entry)) == entry["bytes"])

    def _key(self, entry: Entry) -> str:
        return pool_key(entry) if entry.get("pool") else self._files.key(entry["path"])

    # ---- from other artifacts ----------------------------------------------------------------------------------------

    def take(self, donor: Record, names: Sequence[str], go_on: Callable[[], None]) -> set[str]:
        """Inside the store: they are neither downloaded nor uploaded. What was adopted lies elsewhere, and is both."""
        entries, files = takeable(donor, names), self._store.files(donor)
        if not isinstance(files, ObjectFiles) or donor.external:
            taken = take_files(files, entries, self.folder, go_on, link=False)
            self.keep(sorted(taken), shared=True)
            return taken
        with self._keeping:
            self._look(donor, files)
            missing = [entry for entry in entries if not self._has(entry)]
            for start in range(0, len(missing), NOTED_FROM):
                go_on()
                self._take(files, missing[start : start + NOTED_FROM], self._believes(donor))
        return {entry["path"] for entry in entries if self._has(entry)}

    def _look(self, donor: Record, files: ObjectFiles) -> None:
        """Ask for the sizes of all that the donor has in the pool, unless that was done."""
        if (donor.target, donor.digest) in self._donors:
            return
        new = [entry for entry in donor.content if entry.get("pool") and pool_key(entry) not in self._seen]
        there = {pool_key(entry) for entry in _of_their_size(files, new)}
        self._seen |= {pool_key(entry): pool_key(entry) in there for entry in new}
        self._donors.add((donor.target, donor.digest))

    def _has(self, entry: Entry) -> bool:
        return _of(self._kept.get(entry["path"])) == _of(entry)

    def _believes(self, donor: Record) -> bool:
        """Whether sizes are enough. A repair, or a forced build, may be there because of damage that no record tells
        of: it reads every byte, unless the same run has forced the donor, too, which then did."""
        forced = self.attempt.forced
        return self.attempt.repairs is None and (forced is None or donor.provenance.get("forced") == forced)

    def _take(self, files: ObjectFiles, entries: Sequence[Entry], believes: bool) -> None:
        there = [entry for entry in entries if not entry.get("pool") or self._seen.get(pool_key(entry))]
        found = at_once(lambda entry: self._taken(files, entry, believes), there)
        new = [{**_of(e, NOTED), "taken": True} for e, is_there in zip(there, found, strict=True) if is_there]
        self._kept |= {entry["path"]: entry for entry in new}
        self._not_noted += new
        if len(self._not_noted) >= NOTED_FROM or time.monotonic() - self._noted > NOTED_AFTER_SECONDS:
            self._note_taken()

    def _note_taken(self) -> None:
        if self._not_noted:
            entries, self._not_noted = self._not_noted, []
            self._write_link(entries, ())
        self._noted = time.monotonic()

    def _taken(self, files: ObjectFiles, entry: Entry, believes: bool) -> bool:
        """True when the file is in the build, and nothing else lies under its name in the scratch folder."""
        if not believes and check_bytes(files, [entry]):
            return False
        if not entry.get("pool") and not self._is_in_store(files, entry):
            return False
        remove(self.folder / entry["path"])
        return True

    def elsewhere(self) -> set[str]:
        taken = [path for path, entry in self._kept.items() if entry.get("taken")]
        return {path for path in taken if not (self.folder / path).exists()}

    # ---- to the store ------------------------------------------------------------------------------------------------

    def keep(self, names: Iterable[str], dropped: Iterable[str] = (), shared: bool = False) -> None:
        paths = [path for name in names for path in self._expanded(name)]
        gone = [path for name in dropped for path in self._in(name)]
        with self._keeping:
            self._bring([self._settled(path, shared) for path in paths], gone)
            shutil.rmtree(self._copies, ignore_errors=True)
        self._bring_logs()

    def _settled(self, path: str, shared: bool) -> _Piece:
        """A file as it is now. A small one may be written on meanwhile, such as metrics: a copy of it is brought."""
        place = self.folder / path
        if place.stat().st_size <= COPIED_BYTES:
            (self._copies / path).parent.mkdir(parents=True, exist_ok=True)
            place = Path(shutil.copyfile(place, self._copies / path))
        return _Piece(place, {**file_entry(place), "path": path, **({"pool": True} if shared else {})})

    def _expanded(self, name: str) -> list[str]:
        folder = self.folder / name
        return [f"{name}/{inner}" for inner in list_files(folder)] if folder.is_dir() else [name]

    def _in(self, name: str) -> list[str]:
        return [path for path in self._kept if path == name or path.startswith(f"{name}/")]

    def _bring(self, pieces: Sequence[_Piece], gone: Sequence[str]) -> None:
        """Upload what is not there yet, say so, and only then remove what is let go."""
        missing = [piece for piece in pieces if not self._has(piece.entry)]
        new = [piece.entry for piece in missing]
        at_once(self._upload, missing)
        if new or gone:
            self._note_taken()
            self._write_link(new, gone)
        self._kept |= {entry["path"]: entry for entry in new}
        dropped = [self._kept.pop(path) for path in gone]
        at_once(self._bucket.delete, [self._key(entry) for entry in dropped if not entry.get("pool")])

    def _upload(self, piece: _Piece) -> None:
        """What is in the pool and whole stays: others read it. With other bytes it is damaged, and is replaced.

        Raises:
            MarinError: the object that came of it is not the file.
        """
        key, size = self._key(piece.entry), None
        if piece.entry.get("pool") and self._is_whole(piece.entry):
            return
        for _ in range(PASSES):
            self._bucket.upload(piece.place, key)
            size = self._bucket.size(key)
            if size == piece.entry["bytes"]:
                return
        raise MarinError(f"{self._bucket.shown}/{key}: has {size} bytes after an upload of {piece.entry['bytes']:,}")

    def _is_whole(self, entry: Entry) -> bool:
        return not check_all(ObjectFiles(self._bucket, "", [entry]), [entry])

    def _write_link(self, added: Iterable[Entry], gone: Iterable[str]) -> None:
        kept.write_link(self._bucket, f"{self.attempt.target}/{self.place}", self._links, added, gone)
        self._links += 1

    def _bring_logs(self) -> None:
        for name in list_files(self.logs):
            self._bucket.upload(self.logs / name, self._files.key(f"{LOGS}/{name}"))

    def collect(self, names: Sequence[str], log: str) -> list[dict[str, Any]]:
        elsewhere = self.elsewhere()
        here = {e["path"]: e for e in file_entries(self.folder, [name for name in names if name not in elsewhere])}
        log_entry = {**file_entry(self.logs / log), "path": f"{LOGS}/{log}"}
        with self._keeping:
            self._bring([_Piece(self.folder / path, entry) for path, entry in here.items()], ())
            self._note_taken()
        self._bring_logs()
        self._upload(_Piece(self.logs / log, log_entry))
        brought = {**here, **self._kept}
        return [*(_of(brought[name], NOTED[:4]) for name in names), log_entry]

    def commit(self, lease: Lease, record: Record, tidy: Callable[[], None]) -> None:
        """Stage, seal, put in place. The seal decides: it fails for a builder that has lost its lease."""
        if problems := check_sizes(self._store.files(record), record.files):
            raise MarinError(f"{record.target}: {self._files.shown}/{problems[0]} after it was brought there")
        self._store.replace(record.target, f"{self.place}/{RECORD}", record.to_bytes())
        lease.seal(self.attempt.id)
        self._store.put_in_place(record.target, self.attempt.id)
        self._is_committed = True
        tidy()
        listed = {entry["path"] for entry in record.files}
        with self._keeping:
            self._bring((), [path for path in self._kept if path not in listed])

    def close(self) -> None:
        try:
            if self._is_committed:
                shutil.rmtree(self.folder.parent)
            else:
                self._note_taken()
                self._bring_logs()
        except (MarinError, OSError) as error:
            terminal_logger().warning("%s: its logs stay in %s: %s", self.attempt.target, self.logs, error)
