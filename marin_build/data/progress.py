"""Progress for people: one line at least every two seconds, also while a library works without giving news."""

from __future__ import annotations

import logging
import threading
import time

INTERVAL_SECONDS = 2.0


class Progress:
    """Counts what was done and logs a line every INTERVAL_SECONDS from a thread of its own, until the block ends.

    Percent are of `total_bytes`, or of `total_tokens` where a token budget decides. What an earlier attempt had made is
    counted as done and left out of the speed.
    """

    def __init__(self, logger: logging.Logger, verb: str, total_bytes: int, total_tokens: int | None = None) -> None:
        self._logger, self._verb = logger, verb
        self._total_bytes, self._total_tokens = total_bytes, total_tokens
        self._bytes = self._kept_bytes = self._tokens = 0
        self._start = time.monotonic()
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._report, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finished.set()
        self._thread.join()

    def add(self, done_bytes: int, tokens: int = 0, kept: bool = False) -> None:
        self._bytes += done_bytes
        self._tokens += tokens
        self._kept_bytes += done_bytes if kept else 0

    def line(self) -> str:
        """Such as `tokenizing: 42%, 12.3 of 29.1 MB, 2.1 MB/s, 3,012,345 tokens`."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        done, total = (self._tokens, self._total_tokens) if self._total_tokens else (self._bytes, self._total_bytes)
        percent = min(100, 100 * done // total) if total else 100
        of_total = "" if self._total_tokens else f" of {self._total_bytes / 1e6:,.1f}"
        line = f"{self._verb}: {percent}%, {self._bytes / 1e6:,.1f}{of_total} MB"
        line += f", {(self._bytes - self._kept_bytes) / seconds / 1e6:,.1f} MB/s"
        if self._tokens:
            line += f", {self._tokens:,} tokens"
        if self._total_tokens:
            line += f" of {self._total_tokens:,}"
        return line

    def _report(self) -> None:
        while not self._finished.wait(INTERVAL_SECONDS):
            self._logger.info(self.line())
