"""Other finished artifacts, as far as a build may look at their files and take them over.

What is equal needs not be made twice: a builder finds, by the small files of another artifact, which of its files
would come out the same, and its work takes those over (`Work.take`) without copying their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from marin_build.artifact.digest import hash_bytes
from marin_build.artifact.record import Record, read_record
from marin_build.artifact.store import LOGS, Store
from marin_build.artifact.verify import check_sizes
from marin_build.errors import DamageError, MarinError
from marin_build.recipe.target import Target

MAX_READ_BYTES = 256 << 20
"""Of a small file: the ledger of 50,000 shards has a tenth of it."""


def finished(store: Store, kind: str, target: Target) -> Iterator[Record]:
    """The records of all finished artifacts of a kind but `target`, by name; unreadable ones are passed over."""
    for other in store.named(kind):
        if other == target:
            continue
        try:
            record = read_record(store, other)
        except MarinError:
            continue
        if record is not None:
            yield record


def read_small(store: Store, record: Record, name: str) -> bytes:
    """The bytes of a small file of a finished artifact, wherever it lies.

    Raises:
        DamageError: it is not as the record says, or the record names no such file.
    """

    def damaged(problem: object) -> DamageError:
        return DamageError(f"{record.target} is damaged: {name}: {problem}\n  snakemake {record.target}")

    entry = next((entry for entry in record.files if entry["path"] == name), None)
    if entry is None:
        raise DamageError(f"{record.target}: its record names no file {name!r}")
    if entry["bytes"] > MAX_READ_BYTES:
        raise DamageError(f"{record.target}: {name} has {entry['bytes']:,} bytes; at most {MAX_READ_BYTES:,} are read")
    files = store.files(record)
    if problems := check_sizes(files, [entry]):
        raise damaged(problems[0].problem)
    data = bytearray()
    try:
        with files.open(name) as file:
            while len(data) <= entry["bytes"] and (chunk := file.read(entry["bytes"] + 1 - len(data))):
                data += chunk
    except OSError as error:
        raise damaged(f"cannot be read: {error.strerror or error}") from None
    if (digest := hash_bytes(bytes(data))) != entry["xxh3_128"]:
        raise damaged(f"other bytes: xxh3_128 {digest} instead of {entry['xxh3_128']}")
    return bytes(data)


def takeable(record: Record, names: Sequence[str]) -> list[Mapping[str, Any]]:
    """Entries of those of `names` that are content of the artifact and not known to be damaged, each once.

    What only tells of the making, such as logs and metrics, is never taken over: it may be written on in place.
    """
    bad = {entry["path"] for entry in record.damage}
    content = record.content_by_path
    wanted = [name for name in dict.fromkeys(names) if name in content and name not in bad]
    return [content[name] for name in wanted if not name.startswith(f"{LOGS}/")]


def none_is_there(record: Record, name: str) -> bytes:
    """Stands for `read_small` where a build has to make everything itself."""
    raise DamageError(f"{record.target}: {name}: no other artifact is used here")
