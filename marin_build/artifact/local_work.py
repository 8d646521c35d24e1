"""An attempt on a disk: it works in the artifact's own folder, or in `.rebuild` in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marin_build.artifact.attempt import Attempt
from marin_build.artifact.digest import file_entries
from marin_build.artifact.donors import takeable
from marin_build.artifact.files import ADOPT, links_below
from marin_build.artifact.lease import Lease
from marin_build.artifact.record import STAGED, Record, write_record
from marin_build.artifact.store import ASIDE, LOGS, REBUILD, RECORD, sync_folder
from marin_build.artifact.taking import take_files
from marin_build.artifact.work import Work
from marin_build.artifact.workspace import put_in_place, work_names
from marin_build.errors import DamageError

if TYPE_CHECKING:
    from marin_build.artifact.local_store import LocalStore


class LocalWork(Work):
    """Work in the artifact's folder, or in `.rebuild` in it."""

    def __init__(self, store: LocalStore, attempt: Attempt) -> None:
        self._store, self.attempt = store, attempt
        self._main = store.folder(attempt.target)
        self.folder, self.logs = self._main / attempt.folder, self._main / LOGS

    def keep(self, names: Iterable[str], dropped: Iterable[str] = (), shared: bool = False) -> None:
        """Nothing is to do: the builder made it durable, and whoever resumes finds it here."""

    def take(self, donor: Record, names: Sequence[str], go_on: Callable[[], None]) -> set[str]:
        """By hard links; what was adopted lies where others may write to it, and is copied."""
        entries, files = takeable(donor, names), self._store.files(donor)
        return take_files(files, entries, self.folder, go_on, link=donor.external is None)

    def collect(self, names: Sequence[str], log: str) -> list[dict[str, Any]]:
        entries = file_entries(self.folder, names, sync=True)
        for name in work_names(self.folder):
            _sync_folders(self.folder / name)
        sync_folder(self.folder)
        entries += file_entries(self._main, [f"{LOGS}/{log}"], sync=True)
        _sync_folders(self.logs)
        return entries

    def commit(self, lease: Lease, record: Record, tidy: Callable[[], None]) -> None:
        """The record is written last; that of a rebuild is staged, which decides it, and the swap follows."""
        in_rebuild = self.attempt.folder == REBUILD
        with lease.committing():
            write_record(self._store, record, STAGED if in_rebuild else RECORD)
        tidy()
        if in_rebuild:
            with lease.committing():
                put_in_place(self._store, record.target)

    def close(self) -> None:
        pass


def _sync_folders(top: Path) -> None:
    for base, _, _ in os.walk(top):
        sync_folder(Path(base))


def without_links(work: LocalWork) -> LocalWork:
    """The work, once no link is in its way: a builder would write, and later delete, where it leads.

    Raises:
        DamageError: there is one.
    """
    main = work.logs.parent
    found = [name for name in (LOGS, REBUILD) if os.path.islink(main / name)]
    if found := found or list(islice(links_below(work.folder, frozenset({ASIDE})), 1)):
        place = (main if found[0] in (LOGS, REBUILD) else work.folder) / found[0]
        raise DamageError(
            f"{work.attempt.target}: {place} is a link, and a build writes through none\n"
            f"  put the files themselves there, or remove the link; {ADOPT}"
        )
    return work
