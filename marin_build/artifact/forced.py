"""What a Snakemake run was told to force (`-f`, `-F`, `-R`): `.marin/forced/<target>.json` in the working directory.

A job cannot see by itself that it was forced, so the adapter writes it down before any job starts. The note names the
run; a build that was forced by a run is done once, whatever is retried.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from marin_build.artifact.store import disk_error
from marin_build.recipe.target import Target

FOLDER = Path(".marin/forced")


def path(target: Target, folder: Path = FOLDER) -> Path:
    return folder / f"{target}.json"


def read(target: Target, folder: Path = FOLDER) -> str | None:
    """Id of the run that forced `target`, or None."""
    try:
        body = json.loads(path(target, folder).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    run = body.get("run") if isinstance(body, dict) else None
    return run if isinstance(run, str) else None


def write(target: Target, run: str, folder: Path = FOLDER) -> None:
    """Note that `run` forces `target`.

    Raises:
        MarinError: the working directory cannot be written to.
    """
    note = path(target, folder)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps({"run": run}) + "\n")
    except OSError as error:
        raise disk_error(error, note) from error


def clear(target: Target, run: str | None = None, folder: Path = FOLDER) -> None:
    """Remove the note; with `run`, only when that run wrote it."""
    if run is None or read(target, folder) == run:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path(target, folder).unlink()
