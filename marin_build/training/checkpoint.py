"""Checkpoints: saved in the background, and believed at a restart only after they were read back whole.

    checkpoints/<step>/parameters, optimizer      written by Orbax, which renames the folder when all of it is there
    checkpoints/<step>/_CHECKPOINT_METADATA       Orbax's; in it ours: digest of the state, whose state it is, notes
    checkpoints/<step>/manifest.json              ours, written last: size and hash of every file

A checkpoint is *kept* (at multiples of `keep_every_steps`, and the last) or *rolling*: then it goes once a newer one is
committed. At a restart the newest whole one counts: files as in its manifest, and the state's digest as it was in the
memory that was saved (Orbax alone loads a flipped bit without a word). Falling back to an older one is said loudly, and
where there are committed checkpoints but none is whole the run stops: it never starts again at step 0 by itself.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as orbax
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from marin_build.artifact.bodies import Conditions, Count, Hash, check, manifest_body
from marin_build.artifact.digest import file_entries, list_files
from marin_build.artifact.files import first_link
from marin_build.artifact.store import disk_error, make_folder, sync_folder
from marin_build.artifact.strict_json import parse_object
from marin_build.data.durable import json_bytes, write_whole
from marin_build.errors import DamageError, DriftError, MarinError
from marin_build.training.state import TrainState, state_digest

MANIFEST = "manifest.json"
_STEP = re.compile(r"0|[1-9][0-9]{0,17}")
GOING = "going-"
DAMAGED = "damaged-"
"""Fronts of folder names that are no checkpoints any more: being removed, or set aside."""


class _Notes(TypedDict, total=False):
    resumed_at: list[Count]
    seconds: float
    problems: list[str]
    scored: Any
    conditions: list[Conditions]


class _Saved(TypedDict):
    identity: dict[str, str]
    state_digest: Hash
    notes: _Notes


_saved_body = TypeAdapter(_Saved)


@dataclass(frozen=True)
class Restored:
    """A state read back from disk."""

    step: int
    state: TrainState
    notes: Mapping[str, Any]
    """What was written down beside it."""
    problems: tuple[str, ...]
    """What was wrong with newer checkpoints, which were set aside."""


class Checkpoints:
    """The checkpoints of one training, in one folder. Use as a context: leaving it waits for the save under way.

    With several processes all call the same methods together; files are written by Orbax and by process 0.

    Args:
        folder: made if it is missing.
        identity: whose states these are (fingerprint, plan of the data); those of something else are refused.
        is_kept: whether the checkpoint of a step stays for good.
        check_lease: raises when the target is no longer ours; called before anything is committed.
        keep: called with the names of what is committed, and of what was removed since; see `BuildContext.keep`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        identity: Mapping[str, str],
        is_kept: Callable[[int], bool],
        check_lease: Callable[[], None],
        keep: Callable[[list[str], list[str]], None] = lambda names, dropped: None,
        logger: logging.Logger,
        must_resume: bool = False,
    ):
        self.folder = folder.absolute()
        self._identity = dict(identity)
        self._is_kept = is_kept
        self._check_lease = check_lease
        self._keep = keep
        self._logger = logger
        self._must_resume = must_resume
        self._saver: orbax.training.Checkpointer | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        logging.getLogger("absl").addFilter(_is_not_of_orbax)
        make_folder(self.folder)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps of the checkpoints on disk, whole or not, rising."""
        return sorted(int(path.name) for path in self.folder.iterdir() if _STEP.fullmatch(path.name) and path.is_dir())

    def restore(self, placed: TrainState) -> Restored | None:
        """The newest whole checkpoint, on the devices; None where none was committed. Those that are not are set aside.

        Args:
            placed: shapes and shardings to restore to; the mesh may differ from the one that was saved.

        Raises:
            DamageError: checkpoints were committed and none is whole.
            DriftError: it belongs to another recipe or to other data.
        """
        problems: dict[int, str] = {}
        committed = False
        found: Restored | None = None
        for step in reversed(self.steps()):
            committed |= self._is_committed(step)
            state = self._read(step, placed)
            if isinstance(state, TrainState):
                found = Restored(step, state, self._saved_with(step)["notes"], tuple(problems.values()))
                break
            problems[step] = f"step {step}: {state}"
            self._logger.warning("checkpoint of step %d is not whole: %s", step, state)
        if found is None and (committed or self._must_resume):
            lines = [f"no checkpoint in {self.folder} is whole, and training from nothing is never begun unasked"]
            lines += problems.values() or ["no checkpoint is there at all"]
            raise DamageError("\n  ".join([*lines, "restore the files from a copy, or train from nothing with -f"]))
        self._clear(problems)
        if problems:
            where = f"the one of step {found.step}" if found else "the start: none was ever committed"
            self._logger.warning("FALLING BACK to %s", where)
        return found

    def _read(self, step: int, placed: TrainState) -> TrainState | str:
        """The state, or what is wrong with it."""
        folder, committed = self.folder / str(step), self._is_committed(step)
        if committed and (problem := first_problem(folder)):
            return problem
        try:
            saved = self._saved_with(step)
            state = load_state(folder, placed)
        except Exception as error:
            # Orbax raises many kinds. Where the files are as they were written, the cause is no damage.
            if committed:
                raise MarinError(f"{folder}: whole, but cannot be loaded: {_first_line(error)}") from error
            return f"it was never committed and cannot be loaded: {_first_line(error)}"
        if saved["identity"] != self._identity:
            changed = [key for key in self._identity if saved["identity"].get(key) != self._identity[key]]
            raise DriftError(
                f"{folder}: belongs to another training ({', '.join(changed)} changed)\n"
                "  make a new version with marin-build bump, or train this one from nothing with -f"
            )
        if state_digest(state) != saved["state_digest"]:
            return "the state read back is not the state that was saved"
        if not committed and jax.process_index() == 0:
            self._write_manifest(step)  # its writer was killed just before, or it was lost since
        return state

    def _is_committed(self, step: int) -> bool:
        return (self.folder / str(step) / MANIFEST).exists()

    def _saved_with(self, step: int) -> dict[str, Any]:
        return saved_with(self.folder / str(step))

    def _clear(self, problems: Mapping[int, str]) -> None:
        """Set damaged checkpoints aside, and finish removals that a crash interrupted."""
        _wait_for_all("checkpoints read")
        if jax.process_index() == 0:
            for path in self.folder.glob(f"{GOING}*"):
                shutil.rmtree(path)
            for step in problems:
                taken = len(list(self.folder.glob(f"{DAMAGED}{step}*")))  # one that was set aside before stays
                place = f"{DAMAGED}{step}" + (f".{taken + 1}" if taken else "")
                os.rename(self.folder / str(step), self.folder / place)
        _wait_for_all("checkpoints cleared")

    # ---- writing -----------------------------------------------------------------------------------------------------

    def save(self, step: int, state: TrainState, notes: Mapping[str, Any]) -> None:
        """Begin to save; the arrays may be donated as soon as this returns. Waits for the save before it.

        Raises:
            MarinError: the disk is full, or the save before it failed.
        """
        self.wait()
        self._check_lease()
        with_it = {"identity": self._identity, "state_digest": state_digest(state), "notes": dict(notes)}
        if self._saver is None:
            always = orbax.training.save_decision_policies.FixedIntervalPolicy(1)
            self._saver = orbax.training.Checkpointer(
                self.folder, save_decision_policy=always, cleanup_tmp_directories=True
            )
        parts = {"parameters": state.parameters, "optimizer": state.optimizer}
        with self._explained(step, state_bytes(state)):
            response = self._saver.save_checkpointables_async(step, parts, force=True, custom_metadata=with_it)
        self._pending = self._worker.submit(self._commit, step, state_bytes(state), response)

    @property
    def busy(self) -> bool:
        """Whether a save is under way. Raises what went wrong with the last one."""
        if self._pending is not None and self._pending.done():
            self.wait()
        return self._pending is not None

    def wait(self) -> None:
        """Wait until the save under way is committed.

        Raises:
            MarinError: it failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _commit(self, step: int, size: int, response: orbax.AsyncResponse) -> None:
        """Runs in the worker thread: when Orbax is done, make everything durable, write the manifest, tidy."""
        with self._explained(step, size):
            response.result()
            self._make_durable(step)

    def _make_durable(self, step: int) -> None:
        """Sync the step, write its manifest, and remove the rolling checkpoints before it."""
        if jax.process_index() != 0:
            return
        self._write_manifest(step)
        gone = [older for older in self.steps() if older < step and not self._is_kept(older)]
        for older in gone:
            self._remove(older)
        self._keep([str(step)], [str(older) for older in gone])

    def _write_manifest(self, step: int) -> None:
        """Commit a step: everything in it is durable before its manifest is there."""
        self._check_lease()
        folder = self.folder / str(step)
        entries = file_entries(folder, list_files(folder), sync=True)
        for path in {(folder / entry["path"]).parent for entry in entries} | {folder, self.folder}:
            sync_folder(path)
        write_whole(folder / MANIFEST, json_bytes({"step": step, "files": entries}, indent=1))

    def _remove(self, step: int) -> None:
        """Rename first: no crash leaves a half-removed folder under the name of a checkpoint."""
        going = self.folder / f"{GOING}{step}"
        os.rename(self.folder / str(step), going)
        shutil.rmtree(going)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def check(self, step: int, state: TrainState) -> None:
        """Read the committed checkpoint of `step` back from disk and compare it with the state in memory.

        Raises:
            DamageError: it is not the same.
        """
        _wait_for_all("last checkpoint committed")
        if jax.process_index() != 0:
            return
        folder = self.folder / str(step)
        problem = first_problem(folder)
        # Tensors split over hosts are not gathered for this: each host would read all of them.
        if problem is None and jax.process_count() == 1:
            read_back = load_state(folder, _on_host(state))
            if state_digest(read_back) != self._saved_with(step)["state_digest"]:
                problem = "the state read back is not the state that was saved"
        if problem:
            raise DamageError(f"{folder}: {problem}\n  the disk cannot be trusted; run the same command to resume")

    def set_damaged_aside(self, last: int, state: TrainState) -> tuple[str, ...]:
        """Set kept checkpoints before `last` aside that are not as they were saved; what was wrong with each.

        Nothing read them while the training ran, and a record must not vouch for bytes that were never saved.
        """
        found: dict[int, str] = {}
        if jax.process_index() == 0:
            for step in self.steps():
                if step < last and self._is_kept(step) and (problem := self._problem(step, state)):
                    found[step] = f"step {step}: {problem}"
                    self._logger.warning("checkpoint of step %d is not whole and is dropped: %s", step, problem)
        self._clear(found)
        return tuple(found.values())

    def _problem(self, step: int, state: TrainState) -> str | None:
        """What is wrong with a step, every byte read. One whose manifest is lost is judged by its state."""
        if self._is_committed(step) or jax.process_count() > 1:
            return first_problem(self.folder / str(step))
        seen = self._read(step, _on_host(state))
        return None if isinstance(seen, TrainState) else seen

    def not_kept(self) -> tuple[str, ...]:
        """Names in the folder that do not stay: rolling checkpoints, and what was set aside. Folders end in '/'."""
        kept = {str(step) for step in self.steps() if self._is_kept(step)}
        return tuple(sorted(f"{path.name}/" for path in self.folder.iterdir() if path.name not in kept))

    def remove_not_kept(self) -> None:
        for name in self.not_kept():
            shutil.rmtree(self.folder / name)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self.wait()
        except MarinError as failed:
            if error is None:
                raise
            self._logger.error("%s", failed)  # the first error is the one that is raised
        finally:
            self._worker.shutdown()
            with contextlib.suppress(Exception):  # repeats the error of the last save, which was raised or logged
                if self._saver is not None:
                    self._saver.close()

    @contextlib.contextmanager
    def _explained(self, step: int, size: int) -> Iterator[None]:
        try:
            yield
        except MarinError:
            raise
        except OSError as error:
            raise disk_error(error, self.folder, size) from error
        except Exception as error:
            # TensorStore reports what the system said as text in a ValueError.
            if "No space left on device" in str(error):
                full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
                raise disk_error(full, self.folder, size) from error
            raise MarinError(f"the checkpoint of step {step} could not be saved: {_first_line(error)}") from error


def _on_host(state: TrainState) -> TrainState:
    """Room in memory for such a state."""
    empty: TrainState = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), state)
    return empty


def load_state(folder: Path, like: TrainState) -> TrainState:
    """Read a step's folder: onto devices for ShapeDtypeStructs with shardings, into memory for numpy arrays."""
    parts = orbax.load_checkpointables(folder, {"parameters": like.parameters, "optimizer": like.optimizer})
    return TrainState(parts["parameters"], parts["optimizer"])


def saved_with(folder: Path) -> dict[str, Any]:
    """What was written down beside a state.

    Raises:
        ValueError: something else stands there.
    """
    saved = orbax.checkpointables_metadata(folder).custom_metadata
    check(_saved_body, saved)
    return dict(saved)


def first_problem(folder: Path) -> str | None:
    """The first difference between a step's files and its manifest, every byte read; None where all is well."""
    try:
        manifest = parse_object((folder / MANIFEST).read_bytes())
        check(manifest_body, manifest)
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read: {_first_line(error)}"
    listed = {entry["path"]: entry for entry in manifest["files"]}
    for name in listed:
        if first_link(folder, name) or not (folder / name).is_file():
            return f"{name} is missing, or a link"
    for entry in file_entries(folder, listed):
        if entry["bytes"] != listed[entry["path"]]["bytes"]:
            return f"{entry['path']} has {entry['bytes']} bytes instead of {listed[entry['path']]['bytes']}"
        if entry["xxh3_128"] != listed[entry["path"]]["xxh3_128"]:
            return f"{entry['path']} has other bytes than were written"
    return None


def state_bytes(state: TrainState) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    """Orbax logs the tracebacks of errors that it also raises, and that we tell in one line."""
    return "/orbax/" not in record.pathname


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]


def _wait_for_all(name: str) -> None:
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)
