"""Who builds: host, boot, process id and its start time, so that a number that was given out again is not mistaken.

Processes are looked up only on the machine, boot and process-id namespace that they belong to.
"""

from __future__ import annotations

import dataclasses
import getpass
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

PROC = Path("/proc")


@dataclass(frozen=True)
class Owner:
    """One process of one machine."""

    host: str
    boot_id: str
    """Changes when the machine starts; empty where the system has none."""
    namespace: str
    """Namespace of process ids: containers of one machine do not see each other's processes."""
    pid: int
    process_start: int
    """Clock ticks after boot when the process began; 0 where the system does not say."""
    user: str
    run: str | None = None
    """Id of the run (one Snakemake call) that the process belongs to."""

    def __str__(self) -> str:
        return f"{self.user}@{self.host} (process {self.pid})"

    @classmethod
    def from_dict(cls, body: Mapping[str, Any]) -> Owner:
        return cls(**{item.name: body[item.name] for item in dataclasses.fields(cls)})

    def is_on_this_machine(self) -> bool:
        return (self.host, self.boot_id, self.namespace) == (socket.gethostname(), boot_id(), _namespace())

    def is_gone(self) -> bool:
        """True when it is certain that the process has ended; for processes of this machine only."""
        start = process_start(self.pid)
        return start is None or start != self.process_start

    def was_before_boot(self, wall_seconds: float) -> bool:
        """True when this host was started anew after `wall_seconds`, a time that the owner was seen at."""
        return self.host == socket.gethostname() and self.boot_id != boot_id() and wall_seconds < _boot_seconds()


def this_process(run: str | None = None) -> Owner:
    pid = os.getpid()
    return Owner(socket.gethostname(), boot_id(), _namespace(), pid, process_start(pid) or 0, user(), run)


def process_start(pid: int) -> int | None:
    """Start time of a living process; None when there is none. A zombie does not live."""
    try:
        state, *rest = (PROC / str(pid) / "stat").read_bytes().rpartition(b") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0 if not PROC.is_dir() and _answers(pid) else None
    return None if state in (b"Z", b"X") else int(rest[18])


def user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user id has no name
        return str(os.getuid())


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@cache
def boot_id() -> str:
    """Tells one start of this machine from another; empty where the system does not say."""
    return _text(PROC / "sys/kernel/random/boot_id")


@cache
def _namespace() -> str:
    try:
        return os.readlink(PROC / "self/ns/pid")
    except OSError:
        return ""


def _boot_seconds() -> float:
    """Wall-clock time of this machine's start, by its own clock of now."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
