"""The log of one attempt: to the terminal and to `logs/<attempt>.log` of the artifact.

A log that cannot be written, for example on a full disk, stops with one loud line; the work goes on.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from marin_build.artifact.store import disk_error, make_folder
from marin_build.foreign import printable

FORMAT = "%(asctime)s %(levelname)s %(message)s"
TAIL_BYTES = 64 << 10
"""Of a log, at most this much is read to show its end."""


class _Printable(logging.Formatter):
    """Writes what a terminal would obey, and credentials, as `printable` does."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _LogFile(logging.FileHandler):
    """A file that gives up once, and says so, when it cannot be written."""

    broken = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not self.broken:
                super().emit(record)
        except OSError as error:  # opened anew, which `emit` does outside of its own care
            self._give_up(error)

    def handleError(self, record: logging.LogRecord) -> None:
        self._give_up(sys.exc_info()[1])

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:  # what it still held in memory does not fit either
            self._give_up(error)

    def _give_up(self, error: BaseException | None) -> None:
        if not self.broken:
            print(printable(f"the log {self.baseFilename} stops here, the work goes on: {error}"), file=sys.stderr)
        self.broken = True


class AttemptLog:
    """The logger of one attempt, and the file behind it."""

    sealed = False
    """Set when a record may list the file as it is: nothing more is written to it."""

    def __init__(self, folder: Path, attempt: str) -> None:
        self.path = folder / f"{attempt}.log"
        try:
            make_folder(self.path.parent)
            self._file = _LogFile(self.path, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise disk_error(error, self.path) from error
        formatter = _Printable(FORMAT, "%Y-%m-%dT%H:%M:%SZ")
        formatter.converter = time.gmtime
        self._file.setFormatter(formatter)
        self.logger = terminal_logger()
        self.logger.addHandler(self._file)

    def failed(self, error: BaseException, *, expected: bool) -> None:
        """Write the error to the file, with its traceback unless it was `expected`; others tell the terminal."""
        if self.sealed:
            return
        info = None if expected else (type(error), error, error.__traceback__)
        self._file.handle(self.logger.makeRecord("marin_build", logging.ERROR, "", 0, str(error), (), info))

    def close(self) -> None:
        """No more goes to the file; the terminal is still told."""
        self.logger.removeHandler(self._file)
        self._file.close()


def terminal_logger() -> logging.Logger:
    """A logger that writes to the terminal; nobody else's settings touch it."""
    logger = logging.Logger("marin_build", logging.INFO)
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable("%(asctime)s %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    return logger


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a log, without more of it than TAIL_BYTES; none where there is no plain file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return []
        end = os.pread(descriptor, TAIL_BYTES, max(0, status.st_size - TAIL_BYTES))
    finally:
        os.close(descriptor)
    return end.decode(errors="replace").splitlines()[-count:]


@contextmanager
def attempt_log(folder: Path, attempt: str) -> Iterator[AttemptLog]:
    log = AttemptLog(folder, attempt)
    try:
        yield log
    finally:
        log.close()
