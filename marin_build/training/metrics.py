"""metrics.jsonl, the truth about how a training went: one JSON object a line, each with its `step`, steps rising.

Step s means after s updates. No step appears twice: what is measured later at the same step joins its line. When a run
resumes at step r the file is cut back to the lines up to r, so that it reads as if the run had never stopped.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from marin_build.data.durable import explained, write_whole

Values = Mapping[str, float | int | str]


class MetricsFile:
    """An open metrics.jsonl. `last` is its last line, as a dictionary, or empty."""

    def __init__(self, path: Path, *, keep_through: int, logger: logging.Logger):
        """Open `path` for more lines, keeping those of steps up to `keep_through`."""
        self.path = path
        lines = _kept(path, keep_through, logger)
        self.last: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        write_whole(path, b"".join(lines))
        self._file = path.open("r+b")
        self._end = self._file.seek(0, os.SEEK_END)
        self._start_of_last = self._end - (len(lines[-1]) if lines else 0)

    def write(self, step: int, values: Values) -> None:
        """Add the line of `step`, or add `values` to the last line if it is that of `step`.

        Raises:
            MarinError: the file cannot be written.
        """
        last_step = self.last.get("step", -1)
        assert step >= last_step, f"step {step} after step {last_step}"
        start = self._start_of_last if step == last_step else self._end
        line = {**(self.last if step == last_step else {}), "step": step, **values}
        text = json.dumps(line, allow_nan=False).encode() + b"\n"
        with explained(self.path, len(text)):
            self._file.seek(start)
            self._file.write(text)
            self._file.truncate()
            self._file.flush()
        self.last, self._start_of_last, self._end = line, start, start + len(text)

    def sync(self) -> None:
        """Bring the lines to the disk, before a checkpoint that stands for them is committed."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self.sync()
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of a metrics.jsonl, as dictionaries."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def _kept(path: Path, keep_through: int, logger: logging.Logger) -> list[bytes]:
    """The whole lines of steps up to `keep_through`. A torn or foreign line ends them; said unless it is the last."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    kept: list[bytes] = []
    before = -1
    for number, line in enumerate(lines, 1):
        step = _step(line)
        if step is None or step <= before:
            if number < len(lines):
                logger.warning("%s:%d is no line of metrics; it and the lines after it are dropped", path, number)
            break
        if step > keep_through:
            break
        kept.append(line)
        before = step
    return kept


def _step(line: bytes) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None
    return step if isinstance(step, int) and line.endswith(b"\n") else None
