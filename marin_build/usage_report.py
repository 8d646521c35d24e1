"""What `marin-build du` says: the room that artifacts take, the largest first."""

from __future__ import annotations

import sys
import time

from marin_build.artifact.usage import Report, Usage
from marin_build.looks import console, make_table, readable_bytes, shown

COLUMNS = ("recorded", "shared", "freed if removed", "not in the record", "files")
SECONDS_BETWEEN_LINES = 2.0


class Progress:
    """A line on the terminal's error output every two seconds, none before."""

    def __init__(self) -> None:
        self._told = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._told > SECONDS_BETWEEN_LINES:
            self._told = time.monotonic()
            print(f"looked at {done:,} of {total:,} artifacts", file=sys.stderr)


def show_usage(report: Report) -> None:
    out = console()
    if not report.usages:
        out.print("nothing is there")
    else:
        table = make_table("name", "version", "bytes", "shared", "freed if removed", "not in the record", "files", "")
        for usage in report.usages:
            sizes = (usage.recorded, usage.shared, usage.freed, usage.other)
            row = (
                usage.target.name,
                usage.target.version,
                *map(readable_bytes, sizes),
                f"{usage.files:,}",
                _note(usage),
            )
            table.add_row(*map(shown, row))
        out.print(table)
        if len(report.usages) > 1:
            freed = f"{readable_bytes(report.freed)} freed if all are removed"
            out.print(f"{readable_bytes(report.size)} in all, what is shared counted once; {freed}")
    if report.unnamed:
        out.print(f"{readable_bytes(report.unnamed)} of shared files that nothing names any more; see marin-build gc")


def _note(usage: Usage) -> str:
    if usage.external:
        return f"adopted: it lies in {usage.external}"
    return usage.problem or ("" if usage.files else "unfinished")
