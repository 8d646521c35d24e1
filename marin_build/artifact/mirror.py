"""The mirror `.marin/records/<target>.json`: the file that Snakemake sees as the output of a rule.

It says no more than the record and is made from it before every plan and after every build, so nothing that Snakemake
deletes is ever the truth.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from pathlib import Path

from marin_build.artifact.record import Record, read_record
from marin_build.artifact.store import TEMPORARY, Store, disk_error
from marin_build.errors import DamageError
from marin_build.recipe.target import Target

FOLDER = Path(".marin/records")


def path(target: Target, folder: Path = FOLDER) -> Path:
    return folder / f"{target}.json"


def refresh(store: Store, target: Target, record: Record | None, folder: Path = FOLDER) -> None:
    """Bring the mirror of `target` in line with the record that was seen, or with that none was.

    Where none was seen it looks again afterwards: a build beside us may have ended and written its mirror meanwhile.
    """
    if record is None:
        remove(target, folder)
        record = _readable(store, target)
    if record is not None:
        write(record, folder)


def write(record: Record, folder: Path = FOLDER) -> None:
    """Write the mirror of one record; an equal one is left alone.

    Raises:
        MarinError: the working directory cannot be written to.
    """
    body = {key: getattr(record, key) for key in ("name", "version", "kind", "fingerprint", "digest")}
    data = json.dumps(body, indent=1).encode() + b"\n"
    mirror = path(record.target, folder)
    temporary = mirror.with_name(f"{mirror.name}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        if mirror.is_file() and mirror.read_bytes() == data:
            return
        _remove_folder(mirror)
        mirror.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, mirror)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise disk_error(error, mirror, len(data)) from error


def remove(target: Target, folder: Path = FOLDER) -> None:
    mirror = path(target, folder)
    _remove_folder(mirror)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        mirror.unlink()


def _remove_folder(mirror: Path) -> None:
    """Remove a folder that lies where a mirror belongs; nothing but mirrors is kept there."""
    if mirror.is_dir() and not mirror.is_symlink():
        shutil.rmtree(mirror)


def _readable(store: Store, target: Target) -> Record | None:
    try:
        return read_record(store, target)
    except DamageError:
        return None
