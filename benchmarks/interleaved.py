"""Measure several implementations side by side: one long-lived process each, one timed block of each in turn.

A shared machine speeds up and slows down by the minute; blocks in turn see the same weather, and medians over rounds
and ratios within one run are what is reported.

A worker is a program that prints `ready` once it is warm, then for each line `N` on its standard input does N steps
and prints `tokens wall_seconds cpu_seconds`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Measurement:
    """Medians over rounds."""

    tokens_per_second: float
    tokens_per_cpu_second: float


def compare(
    commands: Mapping[str, list[str]], *, rounds: int, steps: int, environment: Mapping[str, str]
) -> dict[str, Measurement]:
    """Run every worker `rounds` times in turn, `steps` steps each."""
    workers = {name: _start(command, environment) for name, command in commands.items()}
    samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in workers}
    for number in range(rounds):
        for name, worker in workers.items():
            samples[name].append(_ask(worker, steps))
            print(
                f"round {number + 1}/{rounds}  {name}  {samples[name][-1][0] / samples[name][-1][1]:.0f} tokens/s",
                file=sys.stderr,
            )
    for worker in workers.values():
        worker.stdin.close()
        worker.wait(timeout=60)
    return {
        name: Measurement(
            statistics.median(tokens / wall for tokens, wall, _ in rows),
            statistics.median(tokens / cpu for tokens, _, cpu in rows),
        )
        for name, rows in samples.items()
    }


def serve(step: Callable[[], None], tokens_per_step: int) -> None:
    """The worker's side: warm up, then answer. `step` returns when its work is done."""
    step()
    step()
    print("ready", flush=True)
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            step()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        print(tokens_per_step * int(line), wall, cpu, flush=True)


def _start(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    worker = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    while (line := worker.stdout.readline()) and line.strip() != "ready":
        pass
    if not line:
        raise SystemExit(f"{' '.join(command)} ended before it was ready")
    return worker


def _ask(worker: subprocess.Popen[str], steps: int) -> tuple[float, float, float]:
    worker.stdin.write(f"{steps}\n")
    worker.stdin.flush()
    tokens, wall, cpu = worker.stdout.readline().split()
    return float(tokens), float(wall), float(cpu)
