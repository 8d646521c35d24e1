"""Claims: which run of a working directory makes what: `.marin/runs/<run>.json`, under a kernel lock while it lives.

Snakemake removes the output of a job before it starts and after it fails, so two runs of one working directory that
make one target take each other's mirrors away. Leases guard artifacts; claims guard the mirrors, from the plan to the
end of the run. A claim ends with its process.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from marin_build.artifact.owner import this_process
from marin_build.artifact.store import disk_error
from marin_build.recipe.target import Target

FOLDER = Path(".marin/runs")


class Claims:
    """What one run has claimed."""

    def __init__(self, run: str, folder: Path = FOLDER) -> None:
        self._folder, self._path = folder, folder / f"{run}.json"
        self._file: IO[bytes] | None = None
        self.targets: frozenset[Target] = frozenset()

    def add(self, targets: Collection[Target]) -> dict[Target, str]:
        """Claim more targets, all or none; those that another living run has, and who that is.

        Raises:
            MarinError: the working directory cannot be written to.
        """
        try:
            with self._alone():
                others = {name: who for path in self._folder.glob("*.json") for name, who in self._claimed(path)}
                taken = {target: others[str(target)] for target in targets if str(target) in others}
                if not taken:
                    self._write(self.targets | set(targets))
                return taken
        except OSError as error:
            raise disk_error(error, self._path) from error

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other run of this working directory claims meanwhile."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with open(self._folder / "lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _claimed(self, path: Path) -> Iterator[tuple[str, str]]:
        """The targets of another run, and who it is; the file of a run that has ended is removed."""
        if path == self._path:
            return
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                body = json.load(file)
                if body["owner"] != str(this_process()):  # an earlier run in this process has ended
                    yield from ((name, body["owner"]) for name in body["targets"])
            else:
                path.unlink()

    def _write(self, targets: frozenset[Target]) -> None:
        if self._file is None:
            self._file = open(self._path, "wb")  # noqa: SIM115  its lock is held until this process ends
            fcntl.flock(self._file, fcntl.LOCK_EX)
        body = {"owner": str(this_process()), "targets": sorted(map(str, targets))}
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps(body).encode())
        self._file.flush()
        self.targets = targets
