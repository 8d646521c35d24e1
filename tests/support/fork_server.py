"""Builds that are started often and killed: one process imports what they need, and forks for each build.

    python fork_server.py FOLDER

reads targets, a line each; builds each in a process group of its own with FOLDER as working directory; writes the id
of the group when it begins, and its wait status when it has ended. Workers are forked too, which costs nothing.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

PROCESSES = 2


class ForkServer:
    """The other end."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self, target: str) -> int:
        """Start a build; its process group."""
        assert self._process.stdin is not None
        print(target, file=self._process.stdin, flush=True)
        return self._number()

    def end(self) -> int:
        """Wait for it: 0, an exit code, or minus the signal that killed it."""
        return os.waitstatus_to_exitcode(self._number())

    def _number(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def serve() -> None:
    import pyarrow  # noqa: F401
    import tokenizers  # noqa: F401

    import marin_build.cli
    import marin_build.data.raw
    import marin_build.data.tokenize
    import marin_build.data.tokenizer

    real = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: real("fork")  # type: ignore[assignment]
    marin_build.data.tokenize.BYTES_WORTH_A_PROCESS = 1
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setsid()
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                code = marin_build.cli.main(["build", line.strip(), "--config", f"processes={PROCESSES}"])
            finally:
                os._exit(code)
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    os.chdir(sys.argv[1])
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    serve()
