"""Where one attempt works, and how what it made becomes a finished artifact.

A builder always writes into a local folder. On a disk that is the artifact's own folder, or `.rebuild` in it; on an
object store it is a scratch folder of this machine, from which files are brought to the store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from marin_build.artifact.attempt import Attempt
    from marin_build.artifact.lease import Lease
    from marin_build.artifact.record import Record


class Work(ABC):
    """The work of one attempt, which holds the lease."""

    attempt: Attempt
    """As it was written, with its folder."""
    folder: Path
    """Where the builder writes."""
    logs: Path
    """Where its log is, and what else helps to explain a failure."""
    place = "."
    """Where its files lie once it is finished, in the artifact's folder."""

    @abstractmethod
    def keep(self, names: Iterable[str], dropped: Iterable[str] = (), shared: bool = False) -> None:
        """Make finished files or folders last, so that another machine could go on from them; and let others go.

        Names are relative to `folder`; those of folders stand for all files in them. `shared` says that other artifacts
        may take these files over.
        """

    @abstractmethod
    def take(self, donor: Record, names: Sequence[str], go_on: Callable[[], None]) -> set[str]:
        """Make files of another finished artifact files of this build, under the same names, without copying bytes.

        Returns the names that now are. One that is missing, known to be damaged, or not as recorded is left out.
        `go_on` is called now and then, and may raise: a later call then finds what was taken until then.
        """

    def elsewhere(self) -> set[str]:
        """Names of files of this build that were taken over and do not lie in `folder`."""
        return set()

    @abstractmethod
    def collect(self, names: Sequence[str], log: str) -> list[dict[str, Any]]:
        """Entries of the files `names`, and of the log of that name; on return all of them are durable."""

    @abstractmethod
    def commit(self, lease: Lease, record: Record, tidy: Callable[[], None]) -> None:
        """Make `record` the truth, in one step that cannot be undone; then call `tidy`.

        Raises:
            LeasedError: another builder has taken over, and nothing was committed.
        """

    @abstractmethod
    def close(self) -> None:
        """Bring the logs to where others can read them. Never raises: that is said aloud."""
