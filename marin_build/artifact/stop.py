"""Signals: the first SIGTERM or Ctrl-C asks the builder to save and stop, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAME_REQUEST_SECONDS = 0.3
"""Ctrl-C reaches a job twice, from the terminal and from Snakemake: within this time it is one request."""


class StopSignals:
    """While entered, the two signals set `requested` instead of ending the process. Only the main thread can do so."""

    def __init__(self) -> None:
        self._signal: int | None = None
        self._since = 0.0
        self._old: dict[int, Any] = {}

    def requested(self) -> bool:
        return self._signal is not None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self._signal is None:
            self._signal, self._since = number, time.monotonic()
            _say(f"{signal.Signals(number).name}: saving and stopping; once more stops at once")
        elif time.monotonic() - self._since > SAME_REQUEST_SECONDS:
            os._exit(128 + number)


def _say(text: str) -> None:
    """Straight to the terminal: a signal may arrive while Python's own streams or loggers are in use."""
    os.write(2, f"{text}\n".encode())
