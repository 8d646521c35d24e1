"""The store below a URL: no renames, no kernel lock, and yet one builder at a time and no half artifact.

    {target}/.artifact.json, .attempt.json, .lease.json
    {target}/builds/<attempt>/…                 its files, each put once; nobody else ever writes there
    {target}/builds/<attempt>/.artifact.json    its record, staged
    .pool/…                                     files that several artifacts share

A commit: stage the record → seal the lease, which fails for who lost it, and decides → put the record in place, unless
one of a higher token is there → drop the lease. Killed after the seal, whoever takes the lease finishes it first. What
a record names is never overwritten, so a rebuild is one exchange of the record, and the replaced build stays until
`marin-build gc`. Where the bucket has no preconditions, leases only save work; a record still implies its files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from marin_build.artifact import kept
from marin_build.artifact.attempt import Attempt, parse_attempt
from marin_build.artifact.attempt_log import last_lines
from marin_build.artifact.bucket import THREADS, Bucket, at_once
from marin_build.artifact.digest import hash_bytes
from marin_build.artifact.files import Files, LocalFiles, external_files
from marin_build.artifact.lease import parse_lease
from marin_build.artifact.object_files import ObjectFiles, fetched
from marin_build.artifact.object_work import ObjectWork, Source
from marin_build.artifact.pool import POOL, Pool, pool_bytes, pool_names
from marin_build.artifact.record import Record, parse_record, read_record
from marin_build.artifact.store import (
    ATTEMPT,
    BUILDS,
    KEPT,
    LEASE,
    LOGS,
    OWN_NAMES,
    RECORD,
    Held,
    Store,
    disk_errors,
)
from marin_build.artifact.work import Work
from marin_build.errors import DamageError, LeasedError, MarinError
from marin_build.recipe.target import KINDS, Target, is_target, parse_target

FILES = "files"
"""In the scratch folder of an attempt, beside its logs: where the builder writes."""


class ObjectStore(Store):
    """The artifacts in a bucket. `cache` is a folder of this machine."""

    parallel = THREADS
    fences_by_lock = False

    def __init__(self, bucket: Bucket, cache: str | Path) -> None:
        self.bucket, self.pool, self.place = bucket, Pool(bucket), bucket.shown
        self._cache = Path(cache).expanduser().absolute() / hash_bytes(bucket.shown.encode())[:12]

    # ---- small files -------------------------------------------------------------------------------------------------

    def shown(self, target: Target, name: str = "") -> str:
        return f"{self.bucket.shown}/{target}/{name}".rstrip("/")

    def read(self, target: Target, name: str) -> bytes | None:
        return self.bucket.get(f"{target}/{name}")[0]

    def replace(self, target: Target, name: str, data: bytes) -> None:
        self.bucket.put(f"{target}/{name}", data)

    def exchange(self, target: Target, name: str, expected: bytes | None, data: bytes | None) -> bool:
        key = f"{target}/{name}"
        seen, version = self.bucket.get(key)
        if seen != expected:
            return False
        if self.bucket.delete(key, version) if data is None else self.bucket.put(key, data, version):
            return True
        # An answer may have been lost on the way, and the next try found what the one before had written.
        return self.bucket.get(key)[0] == data

    def delete(self, target: Target, name: str) -> None:
        self.bucket.delete(f"{target}/{name}")

    def lock(self, target: Target) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    # ---- finished artifacts ------------------------------------------------------------------------------------------

    def files(self, record: Record) -> Files:
        if record.external:
            return external_files(record.external)
        return ObjectFiles(self.bucket, f"{record.target}/{record.folder}".removesuffix("/."), record.files)

    def fetch(self, record: Record) -> Path:
        files = self.files(record)
        if isinstance(files, LocalFiles):
            return files.folder
        return fetched(files, record, self._cache / "read" / str(record.target))

    def foreign(self, record: Record) -> list[str]:
        own = f"{record.folder}/"
        recorded = [] if record.external else [e for e in (*record.files, *record.lost) if not e.get("pool")]
        known = {f"{own}{entry['path']}" for entry in recorded}
        protocol = (f"{own}{RECORD}", f"{own}{KEPT}/", f"{own}{LOGS}/")
        return sorted(
            name
            for name in self.listing(record.target)
            if name not in known
            and name not in OWN_NAMES
            and not name.startswith(protocol)
            and (name.startswith(own) or not name.startswith(f"{BUILDS}/"))
        )

    # ---- unfinished ones ---------------------------------------------------------------------------------------------

    def has_work(self, target: Target, attempt: Attempt | None) -> bool:
        if attempt is None:
            return bool(self.bucket.folders(f"{target}/{BUILDS}"))
        scratch = self._scratch(attempt) / FILES
        return any(scratch.glob("*")) or bool(kept.read_chain(self.bucket, self._folder(attempt)))

    def has_rebuild(self, record: Record, attempt: Attempt) -> bool:
        """An attempt that repairs is not beside: what it mends is the damage of this record."""
        is_later = attempt.token > record.provenance.get("token", 0)
        return is_later and attempt.repairs is None and kept.is_begun(self.bucket, self._folder(attempt))

    def is_decided(self, target: Target) -> bool:
        lease = parse_lease(self.read(target, LEASE))
        return lease is not None and lease.sealed is not None and self._token(target) < lease.token

    def is_untidy(self, target: Target) -> bool:
        return False

    def settle(self, target: Target, sealed: str | None) -> None:
        if sealed is not None:
            self.put_in_place(target, sealed)

    def put_in_place(self, target: Target, attempt: str) -> None:
        """Make the staged record of an attempt the artifact's, unless one of the same or a higher token is."""
        data = self.read(target, f"{BUILDS}/{attempt}/{RECORD}")
        staged = _readable(data, target)
        while data is not None and staged is not None:
            now = self.read(target, RECORD)
            if _token_of(_readable(now, target)) >= _token_of(staged) or self.exchange(target, RECORD, now, data):
                return

    def _token(self, target: Target) -> int:
        return _token_of(_readable(self.read(target, RECORD), target))

    def last_lines(self, attempt: Attempt, count: int) -> tuple[str, list[str]]:
        """Of the log on this machine, which is newer while there is one; else of what was brought to the store."""
        path = self._scratch(attempt) / LOGS / f"{attempt.id}.log"
        if path.is_file():
            return str(path), last_lines(path, count)
        name = f"{attempt.folder}/{LOGS}/{attempt.id}.log"
        data = self.read(attempt.target, name) or b""
        return self.shown(attempt.target, name), data.decode(errors="replace").splitlines()[-count:]

    # ---- attempts ----------------------------------------------------------------------------------------------------

    def resume(self, new: Attempt, there: Attempt) -> Work:
        return self._begin(new, there, [self._kept_by(there)])

    def rebuild(self, new: Attempt) -> Work:
        return self._begin(new, None, [])

    def start_anew(self, new: Attempt, logger: logging.Logger, *, keep: bool) -> Work:
        """Earlier work lies in builds of its own, where it stays."""
        return self._begin(new, None, [])

    def repair(self, new: Attempt, there: Attempt | None, record: Record | None, bad: Iterable[str]) -> Work:
        """Beside the damaged artifact, whose record stays; first with what an earlier repair has kept."""
        goes_on = there if there is not None and (record is None or there.repairs is not None) else None
        sources = [self._kept_by(goes_on)] if goes_on else []
        if record is not None:
            damaged = set(bad)
            whole = [e for e in record.files if e["path"] not in damaged and not e["path"].startswith(f"{LOGS}/")]
            files = self.files(record)
            if isinstance(files, ObjectFiles) and not record.external:
                sources.append(Source(files, {entry["path"]: entry for entry in whole}, believes=True))
        return self._begin(new, goes_on, sources)

    def _begin(self, new: Attempt, there: Attempt | None, sources: list[Source]) -> Work:
        """The attempt is written last: until then, the one before can still be resumed."""
        attempt = dataclasses.replace(new, folder=f"{BUILDS}/{new.id}")
        scratch = self._scratch(attempt)
        with disk_errors(scratch):
            (scratch / LOGS).mkdir(parents=True)
            if there is not None and (self._scratch(there) / FILES).is_dir():
                os.rename(self._scratch(there) / FILES, scratch / FILES)
            (scratch / FILES).mkdir(exist_ok=True)
            for other in scratch.parent.iterdir():  # of attempts that ended, or lost the lease
                if other != scratch:
                    shutil.rmtree(other, ignore_errors=True)
        work = ObjectWork(self, attempt, scratch / FILES, scratch / LOGS)
        work.carry(sources)
        self._write_attempt(attempt)
        return work

    def _write_attempt(self, attempt: Attempt) -> None:
        """Unless a later one is there: then the lease is another's."""
        while True:
            data = self.read(attempt.target, ATTEMPT)
            there = parse_attempt(data, attempt.target)
            if there is not None and there.token > attempt.token:
                raise LeasedError(f"{attempt.target} was taken over by another builder\n  nothing was committed")
            if self.exchange(attempt.target, ATTEMPT, data, attempt.to_bytes()):
                return

    def _kept_by(self, attempt: Attempt) -> Source:
        folder = self._folder(attempt)
        entries = kept.read_chain(self.bucket, folder)
        return Source(ObjectFiles(self.bucket, folder, entries.values()), entries)

    def _folder(self, attempt: Attempt) -> str:
        return f"{attempt.target}/{attempt.folder}"

    def _scratch(self, attempt: Attempt) -> Path:
        return self._cache / "work" / str(attempt.target) / attempt.id

    # ---- housekeeping ------------------------------------------------------------------------------------------------

    def named(self, kind: str | None = None) -> list[Target]:
        found: list[Target] = []
        level = [kind] if kind else list(KINDS)
        while level:
            found += [parse_target(name) for name in level if is_target(name)]
            names = [name for name in level if not is_target(name)]
            inside = at_once(self.bucket.folders, names)
            level = [f"{name}/{folder}" for name, folders in zip(names, inside, strict=True) for folder in folders]
        return sorted(found)

    def listing(self, target: Target) -> dict[str, int]:
        """Without the empty objects that stand for none."""
        found = self.bucket.listing(str(target))
        return {name: size for name, size in found.items() if size or name not in OWN_NAMES}

    def pool_names_of(self, target: Target) -> set[str]:
        record, attempt = read_record(self, target), parse_attempt(self.read(target, ATTEMPT), target)
        chains = {attempt.folder: 0} if attempt else {}  # a listing may be old
        for name in self.listing(target):
            front, is_chain, link = name.rpartition(f"/{KEPT}/")
            if is_chain and (number := link.partition(".")[0]).isdecimal():
                chains[front] = max(chains.get(front, 0), int(number) + 1)
        found = pool_names(record.files) if record else set()
        for folder, count in chains.items():
            found |= pool_names(kept.read_chain(self.bucket, f"{target}/{folder}", count).values())
        return found

    def held(self, target: Target) -> list[Held]:
        """An object of the pool is held once, however many files of a target have its bytes."""
        own = [Held(name, size, f"{target}/{name}") for name, size in self.listing(target).items()]
        try:
            names = self.pool_names_of(target)
        except MarinError:  # it cannot be known
            names = set()
        return own + [Held(f"{POOL}/{name}", pool_bytes(name), name) for name in sorted(names)]

    def remove(self, target: Target, names: Iterable[str]) -> None:
        at_once(lambda name: self.bucket.delete(f"{target}/{name}"), names)


def _readable(data: bytes | None, target: Target) -> Record | None:
    try:
        return None if data is None else parse_record(data, target, RECORD)
    except DamageError:
        return None


def _token_of(record: Record | None) -> int:
    return -1 if record is None else int(record.provenance.get("token", 0))
