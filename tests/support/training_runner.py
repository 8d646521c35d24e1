"""Trains in processes of their own, which tests kill and stop, in worlds below one folder."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import training_forks
import training_world
from training_world import TrainingWorld

PATIENCE_SECONDS = 300
NAMES = ("step", "train/loss", "train/grad_norm", "eval/loss", "eval/bpb")
"""What must be equal to the bit; pace is not."""


@dataclass(frozen=True)
class Training:
    """One run."""

    output_path: Path
    pid: int

    @property
    def output(self) -> str:
        return self.output_path.read_text() if self.output_path.exists() else ""

    @property
    def code(self) -> int | None:
        """Exit code, or minus the signal that ended it; None while it runs."""
        return int(self._end[0]) if self._end else None

    @property
    def cpu_seconds(self) -> float:
        """Once it has ended."""
        return float(self._end[1])

    @property
    def _end(self) -> list[str]:
        path = Path(f"{self.output_path}.end")
        return path.read_text().split() if path.exists() else []

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; False where the run has ended."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once `condition` holds or the run has ended."""
        _wait(lambda: self.code is not None or condition())

    def finish(self, code: int = 0) -> str:
        """Wait for the end, which has this code; returns what was printed."""
        _wait(lambda: self.code is not None)
        assert self.code == code, f"exit code {self.code}\n{self.output}"
        return self.output

    def result(self) -> dict[str, Any]:
        """Wait for a good end; returns the result of the build."""
        return json.loads(self.finish().splitlines()[-1])


class Runner:
    """Starts trainings, with one cache of compiled programs for all. Use as a context."""

    def __init__(self, folder: Path):
        self.folder, self._numbers = folder, itertools.count()
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        command = [sys.executable, training_forks.__file__]
        self._server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(PATIENCE_SECONDS)

    def start(self, name: str, devices: int = 1, **options: Any) -> Training:
        """Start training in the world of this name; one that is not there gets its data first."""
        if not (self.folder / name).exists():
            inputs = self.folder / "inputs"
            TrainingWorld(inputs)
            shutil.copytree(inputs, self.folder / name)
        output = self.folder / f"{name}.{next(self._numbers)}.out"
        job = {
            "folder": str(self.folder / name),
            "options": self.options(options),
            "environment": {"XLA_FLAGS": xla_flags(devices)},
            "output": str(output),
        }
        assert self._server.stdin is not None
        print(json.dumps(job), file=self._server.stdin, flush=True)
        pid = Path(f"{output}.pid")
        _wait(pid.exists)
        return Training(output, int(pid.read_text()))

    def pause(self, name: str, at: str, **options: Any) -> Training:
        """Start a run that waits at a point of `training_world.PAUSES`, and return when it does."""
        reached = self.folder / name / training_world.PAUSED
        reached.unlink(missing_ok=True)
        run = self.start(name, pause=at, **options)
        run.wait_until(reached.exists)
        return run

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "settings": {"compilation_cache": str(self.folder / "cache"), **options.get("settings", {})}}

    def run(self, name: str, devices: int = 1, **options: Any) -> dict[str, Any]:
        """Train to the end and return the result."""
        return self.start(name, devices, **options).result()

    # ---- what is there ----

    def world(self, name: str) -> TrainingWorld:
        return TrainingWorld(self.folder / name)

    def losses(self, name: str) -> list[tuple]:
        return [tuple(line.get(key, 0.0) for key in NAMES) for line in self.world(name).metrics]

    def lines(self, name: str) -> int:
        path = self.folder / name / training_world.TARGET / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def checkpoints(self, name: str) -> list[str]:
        path = self.folder / name / training_world.TARGET / "checkpoints"
        return sorted(os.listdir(path)) if path.exists() else []


def xla_flags(devices: int) -> str:
    """So many CPU devices; compiled without effort, since the time of such a test is that of its compilation."""
    return f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.002)
