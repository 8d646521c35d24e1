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
    def keep(self, names: Iterable[str], dropped: Iterable[str] = ()) -> None:
        """Make finished files or folders last, so that another machine could go on from them; and let others go.

        Names are relative to `folder`; those of folders stand for all files in them.
        """

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
