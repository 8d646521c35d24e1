"""An fsspec file system in memory that behaves badly, as `flaky://`: errors, lost answers, short reads, old listings.

It has no rename, and no preconditions. What it does is drawn from a seed.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Trouble:
    """How bad it is."""

    def __init__(self) -> None:
        self.be_good()

    def be_good(self) -> None:
        self.errors = self.lost_answers = self.short_reads = self.old_listings = self.latency_seconds = 0.0
        self.down = False
        self.calls = self.failures = 0

    def start(self, seed: int, **rates: float) -> None:
        self.be_good()
        self._random, self._lock = random.Random(seed), threading.Lock()
        for name, rate in rates.items():
            assert hasattr(self, name)
            setattr(self, name, rate)

    def happens(self, rate: float) -> bool:
        if not rate:
            return False
        with self._lock:
            self.failures += (drawn := self._random.random() < rate)
            return drawn

    def before(self) -> None:
        self.calls += 1
        time.sleep(self.latency_seconds)
        if self.down or self.happens(self.errors):
            kinds = (TimeoutError("timed out"), ConnectionResetError("reset"), OSError(errno.EIO, "server error 503"))
            raise kinds[self.calls % len(kinds)]

    def after(self) -> None:
        if self.happens(self.lost_answers):
            raise TimeoutError("the answer was lost")


TROUBLE = Trouble()


class FlakyFileSystem(MemoryFileSystem):
    protocol = "flaky"
    store: dict[str, Any] = {}  # noqa: RUF012 (as in its base class)
    pseudo_dirs = [""]  # noqa: RUF012
    listings: dict[str, Any] = {}  # noqa: RUF012

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        TROUBLE.before()
        data = super().cat_file(path, start, end, **options)
        return data[: len(data) // 2] if TROUBLE.happens(TROUBLE.short_reads) else data

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        TROUBLE.before()
        super().pipe_file(path, value, mode, **options)
        TROUBLE.after()

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        TROUBLE.before()
        with open(lpath, "rb") as file:
            data = file.read()
        super().pipe_file(rpath, data[: len(data) // 2] if TROUBLE.happens(TROUBLE.short_reads) else data)
        TROUBLE.after()

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        TROUBLE.before()
        super().cp_file(path1, path2, **options)
        TROUBLE.after()

    def rm_file(self, path: str) -> None:
        TROUBLE.before()
        super()._rm(path)
        TROUBLE.after()

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        TROUBLE.before()
        return super().info(path, **options)

    def find(self, path: str, **options: Any) -> Any:
        """What is there, or what was there when this was last told."""
        TROUBLE.before()
        found = super().find(path, **options)
        if TROUBLE.happens(TROUBLE.old_listings):
            return self.listings.get(path, {})
        self.listings[path] = found
        return found

    def mv(self, *paths: str, **options: Any) -> None:
        raise AssertionError("an object store has no rename")

    rename = move = mv


fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)
