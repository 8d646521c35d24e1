"""A process that has imported all that training needs, and forks for each run it is asked for: runs start at once.

Each line of its input is a job {folder, options, environment, output}: the run's output goes to the file `output`, its
process id to `output`.pid, and at its end its exit code (minus the signal that ended it) and its CPU seconds to
`output`.end. No backend of JAX is touched before the fork, so each run has devices of its own.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn


def serve() -> None:
    import pandas  # noqa: F401, which pyarrow loads when it first makes an array
    import training_world  # noqa: F401

    import marin_build.training.build  # noqa: F401
    from marin_build.training import loop

    loop.find_peak = lambda devices: None  # measuring it takes a second, and no fault has to do with it
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the watchers
    for line in sys.stdin:
        if os.fork() == 0:
            watch(json.loads(line))


def watch(job: dict[str, Any]) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    run_pid = os.fork()
    if run_pid == 0:
        run(job)
    write(Path(f"{job['output']}.pid"), f"{run_pid}")
    _, status, used = os.wait4(run_pid, 0)
    write(Path(f"{job['output']}.end"), f"{os.waitstatus_to_exitcode(status)} {used.ru_utime + used.ru_stime:.2f}")
    os._exit(0)


def run(job: dict[str, Any]) -> NoReturn:
    import training_world

    os.environ.update(job["environment"])
    output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 1
    try:
        code = training_world.main(job["folder"], json.dumps(job["options"]))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def write(path: Path, text: str) -> None:
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.write_text(text)
    unfinished.rename(path)


if __name__ == "__main__":
    serve()
