"""A bucket in memory that actors share: every request is a step.

With preconditions a put or a delete of a version is one step. Without them it compares in one step and writes in the
next, as plain fsspec does. A request may also lose its answer: the explorer decides whether what was written comes
back as an error. The tries after that are those of production: the write is sent again and finds what it did.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path

from explorer import Actor, Process, current_actor, violate

from marin_build.artifact.bucket import ABSENT, Bucket, Version
from marin_build.artifact.digest import hash_bytes
from marin_build.artifact.store import BUILDS, LEASE, RECORD


class SimulatedBucket(Bucket):
    """Objects by key, with their versions."""

    shown = "simulated://bucket"

    def __init__(self, *, conditional: bool = True) -> None:
        self.conditional = conditional
        self.initial: dict[str, bytes] = {}
        self.objects: dict[str, tuple[bytes, Version]] = {}

    # ---- what the explorer asks ----------------------------------------------------------------------------------

    def reset(self) -> None:
        self.objects = {key: (data, f"start {hash_bytes(data)}") for key, data in self.initial.items()}

    def state(self) -> bytes:
        return hashlib.blake2b(repr(sorted(self.objects.items())).encode(), digest_size=16).digest()

    def crash(self, process: Process) -> None:
        """A machine holds nothing in the store."""

    def wake(self, actor: Actor) -> Callable[[], bool]:
        leases, living = self._leases(), self._living(actor)
        return lambda: (leases, living) != (self._leases(), self._living(actor))

    def _living(self, actor: Actor) -> list[str]:
        return [process.name for process in actor.run.processes.values() if process.alive]

    def _leases(self) -> list[tuple[str, bytes]]:
        return sorted((key, data) for key, (data, _) in self.objects.items() if key.endswith(LEASE))

    # ---- requests ------------------------------------------------------------------------------------------------

    def get(self, key: str) -> tuple[bytes | None, Version]:
        _step("get", key)
        data, version = self.objects.get(key, (None, ABSENT))
        _note("get", key, data, version)
        return data, version

    def put(self, key: str, data: bytes, version: Version | None = None) -> bool:
        return self._change("put", key, data, version)

    def delete(self, key: str, version: Version | None = None) -> bool:
        return self._change("delete", key, None, version)

    def _change(self, call: str, key: str, data: bytes | None, version: Version | None) -> bool:
        """The request, again and again until an answer to it arrives; an unconditional store compares each time."""
        while True:
            if version is not None and not self.conditional:
                _step("compare for", f"{call} {key}")
                same = self._version(key) == version
                _note("compared", same)
                if not same:
                    return False
            is_lost = _step(call, key, may_lose_its_answer=True)
            same = version is None or not self.conditional or self._version(key) == version
            if same:
                self._write(key, data)
            _note(call, key, is_lost or same)
            if not is_lost:
                return same

    def _version(self, key: str) -> Version:
        return self.objects[key][1] if key in self.objects else ABSENT

    def _write(self, key: str, data: bytes | None) -> None:
        if data is None:
            self.objects.pop(key, None)
            return
        if self.conditional and key.endswith(RECORD) and f"/{BUILDS}/" not in key:
            old, new = _token(self.objects.get(key, (b"", ABSENT))[0]), _token(data)
            if new < old:
                violate(f"a record of token {new} replaces one of token {old}")
        self.objects[key] = (data, f"{_writer()} {hash_bytes(data)}" if self.conditional else hash_bytes(data))

    def size(self, key: str) -> int | None:
        _step("size of", key)
        found = len(self.objects[key][0]) if key in self.objects else None
        _note("size", key, found)
        return found

    def read(self, key: str, start: int, length: int) -> bytes:
        _step("read", key)
        found = self.objects.get(key)
        _note("read", key, found)
        if found is None:
            raise FileNotFoundError(key)
        return found[0][start : start + length]

    def upload(self, path: Path, key: str) -> None:
        data = path.read_bytes()
        _step("upload", key)
        self._write(key, data)
        _note("upload", key)

    def copy(self, source: str, key: str) -> None:
        _step("copy", f"{source} -> {key}")
        found = self.objects.get(source)
        _note("copy", source, found is not None)
        if found is None:
            raise FileNotFoundError(source)
        self._write(key, found[0])

    def listing(self, front: str) -> dict[str, int]:
        _step("list", front)
        found = {k.removeprefix(f"{front}/"): len(d) for k, (d, _) in self.objects.items() if k.startswith(f"{front}/")}
        _note("list", sorted(found.items()))
        return found

    def folders(self, front: str) -> list[str]:
        names = {name.partition("/")[0] for name in self.listing(front) if "/" in name}
        return sorted(names)


_numbers = itertools.count()


def _step(call: str, key: str, *, may_lose_its_answer: bool = False) -> bool:
    """Let others go first; True when this request will be carried out and its answer will be lost."""
    actor = current_actor()
    return actor is not None and actor.pause(f"{call} {key}", may_lose_its_answer=may_lose_its_answer)


def _note(*observations: object) -> None:
    if actor := current_actor():
        actor.note(*observations)


def _writer() -> str:
    """A version is new with every write, and the same in every schedule."""
    actor = current_actor()
    if actor is None:
        return f"rerun {next(_numbers)}"
    actor.writes += 1
    return f"{actor.name} {actor.writes}"


def _token(record: bytes) -> int:
    return int(json.loads(record)["provenance"]["token"]) if record else 0
