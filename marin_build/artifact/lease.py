"""The lease `.lease.json`: one builder at a time, whoever shares the prefix.

The holder changes the file three times per lease time (the heartbeat). A dead owner of this machine is replaced at
once; a silent one after the lease time, measured without its clock: on the same boot by the monotonic clock both
share, otherwise by watching that the file does not change. Each new lease has a higher fencing token; a builder that
lost its lease finds a lease that is not its own before it commits, and stops.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from marin_build.artifact.bodies import check, lease_body
from marin_build.artifact.owner import Owner, this_process
from marin_build.artifact.store import LEASE, Store
from marin_build.artifact.strict_json import parse_object
from marin_build.errors import DamageError, LeasedError, MarinError, Stopped
from marin_build.recipe.target import Target

POLL_SECONDS = 0.5


class Sign(Enum):
    """What one look at a lease says of its owner."""

    alive = "alive"
    dead = "dead"
    unknown = "unknown"
    """On another machine and not plainly fresh: watch whether it changes."""


@dataclass(frozen=True)
class LeaseFile:
    """The content of `.lease.json`."""

    owner: Owner
    token: int
    """Fencing token: higher than that of every earlier lease of the target."""
    nonce: str
    """Tells this lease from every other one."""
    lease_seconds: float
    beat: int
    """Heartbeats so far."""
    wall_seconds: float
    """Time of the last heartbeat by the owner's clock; it says whether to watch, never that the owner is dead."""
    boot_seconds: float
    """Time of the last heartbeat since the owner's machine started."""
    sealed: str | None = None
    """Id of the attempt that the owner has decided to commit: whoever takes over finishes that first."""

    def to_bytes(self) -> bytes:
        body = dataclasses.asdict(self)
        if self.sealed is None:
            del body["sealed"]
        return json.dumps(body, indent=1, sort_keys=True).encode() + b"\n"

    def sign(self) -> Sign:
        if self.owner.is_on_this_machine():
            silent = time.monotonic() - self.boot_seconds > self.lease_seconds
            return Sign.dead if self.owner.is_gone() or silent else Sign.alive
        if self.owner.was_before_boot(self.wall_seconds):
            return Sign.dead
        age = time.time() - self.wall_seconds
        return Sign.alive if abs(age) < self.lease_seconds else Sign.unknown


def parse_lease(data: bytes | None) -> LeaseFile | None:
    """The lease in `data`; None where there is none, or where it is unreadable (then its silence is watched)."""
    try:
        body = parse_object(data or b"null")
        check(lease_body, body)
        return LeaseFile(**{**body, "owner": Owner.from_dict(body["owner"])})
    except (ValueError, TypeError, KeyError):
        return None


def holder(store: Store, target: Target) -> Owner | None:
    """Who is building `target` now, as far as one look can tell."""
    try:
        lease = parse_lease(store.read(target, LEASE))
    except DamageError:  # its folder leads elsewhere
        return None
    return lease.owner if lease and lease.sign() is Sign.alive else None


class _Watch:
    """How long the lease file has not changed, by this process's own clock."""

    def __init__(self) -> None:
        self._seen: bytes | None = None
        self._since = 0.0

    def silent_seconds(self, data: bytes) -> float:
        if data != self._seen:
            self._seen, self._since = data, time.monotonic()
        return time.monotonic() - self._since


@dataclass
class Lease:
    """A lease that this process holds. The heartbeat runs in a thread of its own."""

    store: Store
    target: Target
    file: LeaseFile
    logger: logging.Logger
    lost: threading.Event = field(default_factory=threading.Event)
    _ended: threading.Event = field(default_factory=threading.Event)
    _beaten: float = field(default_factory=time.monotonic)
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def check(self) -> None:
        """Look whether the lease is still ours.

        Raises:
            LeasedError: another builder has taken over.
        """
        is_fresh = time.monotonic() - self._beaten < self.file.lease_seconds / 2 and not self.lost.is_set()
        if is_fresh and not self.store.fences_by_lock:
            return  # nobody may have taken it in so short a time, and each look is a request
        found = parse_lease(self.store.read(self.target, LEASE))
        if self.lost.is_set() or found is None or found.nonce != self.file.nonce:
            raise self._loss(found)

    def _loss(self, found: LeaseFile | None) -> LeasedError:
        self.lost.set()
        taker = f"taken over by {found.owner}" if found and found.nonce != self.file.nonce else "removed"
        return LeasedError(
            f"{self.target}: this builder was silent for too long and lost its lease, which was {taker}\n"
            "  nothing of it was committed"
        )

    @contextmanager
    def committing(self) -> Iterator[None]:
        """The lease is known to be ours; where the store has a lock, it is held and nobody can take over inside.

        Raises:
            LeasedError: another builder has taken over.
        """
        with self.store.lock(self.target):
            self.check()
            yield

    def is_lost(self) -> bool:
        """True once another builder has taken over. Looks again after a pause that may have cost the lease."""
        if not self.lost.is_set() and time.monotonic() - self._beaten > self.file.lease_seconds:
            try:
                self.check()
            except LeasedError:
                self.lost.set()
        return self.lost.is_set()

    def release(self) -> None:
        """Stop the heartbeat and drop the lease, if it is still ours."""
        self._ended.set()
        with self.store.lock(self.target), self._changing:
            self.store.exchange(self.target, LEASE, self.file.to_bytes(), None)

    def seal(self, attempt: str) -> None:
        """Decide that `attempt` is to be committed, by whoever holds or takes this lease.

        Raises:
            LeasedError: another builder has taken over.
        """
        with self.store.lock(self.target), self._changing:
            self._change(dataclasses.replace(self.file, sealed=attempt))

    def _change(self, new: LeaseFile) -> None:
        if not self.store.exchange(self.target, LEASE, self.file.to_bytes(), new.to_bytes()):
            raise self._loss(parse_lease(self.store.read(self.target, LEASE)))
        self.file, self._beaten = new, time.monotonic()

    def start(self) -> None:
        threading.Thread(target=self._beat_until_ended, name=f"lease of {self.target}", daemon=True).start()

    def _beat_until_ended(self) -> None:
        complained = False
        while not self._ended.wait(self.file.lease_seconds / 3):
            try:
                self._beat()
                complained = False
            except LeasedError as error:
                if self.lost.is_set():
                    self.logger.error("%s", error)
                    return  # else: only the lock was busy; the next beat comes soon
            except MarinError as error:
                if not complained:
                    self.logger.warning("the heartbeat of %s cannot be written: %s", self.target, error)
                complained = True

    def _beat(self) -> None:
        with self.store.lock(self.target), self._changing:
            if not self._ended.is_set():
                beat, wall, boot = self.file.beat + 1, time.time(), time.monotonic()
                self._change(dataclasses.replace(self.file, beat=beat, wall_seconds=wall, boot_seconds=boot))


@dataclass(frozen=True)
class Terms:
    """How a lease is asked for."""

    lease_seconds: float
    wait: bool = False
    """Wait for an owner that lives, instead of refusing."""
    run: str | None = None
    token_above: int = 0
    """The new token is higher than this and than that of any lease found."""
    stop_requested: Callable[[], bool] = lambda: False


def acquire(store: Store, target: Target, terms: Terms, logger: logging.Logger) -> Lease:
    """Take the lease of `target`; one whose owner may have died on another machine is watched for its time first.

    Raises:
        LeasedError: somebody else is building it, and `terms.wait` is false.
        Stopped: a stop was requested while waiting.
        RequestError: the folder cannot be written to.
    """
    watch, told = _Watch(), ""
    while True:
        busy, seconds = "somebody who commits just now", terms.lease_seconds
        with _tolerated(LeasedError, terms.wait), store.lock(target):
            data = store.read(target, LEASE)
            found = parse_lease(data)
            sign = found.sign() if found else Sign.unknown
            seconds = found.lease_seconds if found else seconds
            if data is None or sign is Sign.dead or watch.silent_seconds(data) > seconds:
                store.settle(target, found.sealed if found else None)
                return _take(store, target, terms, data, logger)
            busy = str(found.owner) if found else "an unreadable lease"
            if sign is Sign.alive and not terms.wait:
                raise LeasedError(f"{target} is being built by {busy}\n  to wait for it: --config wait=true")
        if terms.stop_requested():
            raise Stopped(f"{target}: stopped while waiting for {busy}")
        if told != busy:
            logger.info("%s: waiting for %s", target, busy)
            told = busy
        time.sleep(min(POLL_SECONDS, seconds / 10))


@contextmanager
def _tolerated(error: type[Exception], tolerate: bool) -> Iterator[None]:
    try:
        yield
    except error:
        if not tolerate:
            raise


def _take(store: Store, target: Target, terms: Terms, data: bytes | None, logger: logging.Logger) -> Lease:
    found = parse_lease(data)
    if found:
        logger.info("%s: replacing the lease of %s, which is gone or silent", target, found.owner)
    token = max(terms.token_above, found.token if found else 0) + 1
    owner, nonce = this_process(terms.run), secrets.token_hex(8)
    mine = LeaseFile(owner, token, nonce, terms.lease_seconds, 0, time.time(), time.monotonic())
    if not store.exchange(target, LEASE, data, mine.to_bytes()):
        raise LeasedError(f"{target} was taken by another builder just now")
    lease = Lease(store, target, mine, logger)
    lease.start()
    return lease
