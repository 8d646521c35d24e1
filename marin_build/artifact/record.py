"""The record `.artifact.json`: its presence and agreement mean "finished".

It is written last and atomically, carries a checksum of itself, and names every file with its size and hash, the
fingerprint of the recipe, and the fingerprints and digests of what it was made from. Fields are only ever added; a
record of a newer schema is refused, with the version that wrote it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from marin_build import __version__
from marin_build.artifact.bodies import check, record_body
from marin_build.artifact.digest import body_checksum
from marin_build.artifact.store import REBUILD, RECORD, Store
from marin_build.artifact.strict_json import parse_object
from marin_build.errors import DamageError, RequestError
from marin_build.foreign import shortened
from marin_build.recipe.target import Target

SCHEMA = 1
STAGED = f"{REBUILD}/{RECORD}"
"""Record of a forced rebuild that is finished and waits to take the old one's place."""

Entries = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Record:
    """What is known of a finished artifact."""

    name: str
    version: str
    kind: str
    fingerprint: str
    """32 hex digits: the recipe and everything upstream of it."""
    digest: str
    """32 hex digits: the content."""
    recipe: Mapping[str, Any]
    """The identity body of the recipe."""
    dependencies: Entries
    """{name, version, fingerprint, digest} of each artifact that this one was made from."""
    files: Entries
    """{path, bytes, xxh3_128} of each file, and `outside_digest: true` where its bytes are not content, as in logs;
    `pool: true` where it lies in the pool of an object store (`pool.py`) and not in `folder`."""
    measured: Entries = ()
    """As `dependencies`: the validation sets, which are no part of the identity."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """The final value of each metric."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    accepted: Entries = ()
    """Changes of the recipe that were accepted without a rebuild: what it was built from, the reason, who and when."""
    replaced: Entries = ()
    """{fingerprint, digest, recipe, dependencies} of builds of other recipes that this one replaced, newest last."""
    damage: Entries = ()
    """{path, problem}: what `verify --full` found wrong with the content, until it finds all well."""
    lost: Entries = ()
    """{path, bytes, xxh3_128, outside_digest, problem, noted}: logs and metrics, which nobody can make again, that were
    lost or damaged after they were written. They are no longer in `files`, unless they turn up again."""
    certificates: Entries = ()
    """What `verify --rebuild` made again, when, by whom and with what, and whether it was the same; newest last."""
    folder: str = "."
    """Where the files are, in the artifact's folder: on an object store `builds/<attempt>`."""
    external: str | None = None
    """Where the files are instead, outside of the prefix: an absolute folder or a URL. Nothing is written there."""
    schema: int = SCHEMA
    written_by: str = __version__

    @property
    def target(self) -> Target:
        return Target(self.name, self.version)

    @property
    def content(self) -> Entries:
        """The files whose bytes are the artifact: without logs and the like."""
        return tuple(entry for entry in self.files if not entry.get("outside_digest"))

    @cached_property
    def content_by_path(self) -> Mapping[str, Mapping[str, Any]]:
        """The same, for who asks for one after the other."""
        return {entry["path"]: entry for entry in self.content}

    def to_dict(self) -> dict[str, Any]:
        """As in the file, checksum included; containers are the record's own."""
        body = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        body = {name: value for name, value in body.items() if name not in _NEUTRAL or value != _NEUTRAL[name]}
        return {**body, "checksum": body_checksum(body)}

    def to_bytes(self) -> bytes:
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"


_NAMES = frozenset(item.name for item in dataclasses.fields(Record))
_NEUTRAL: dict[str, Any] = {"lost": (), "certificates": (), "folder": ".", "external": None}
"""Left out of the file: most records have no use for these."""
_NEEDED = frozenset({"schema", "name", "version", "kind", "fingerprint", "digest", "recipe", "dependencies", "files"})
_LISTS = ("dependencies", "measured", "files", "accepted", "replaced", "damage", "lost", "certificates")


def entry_target(entry: Mapping[str, Any]) -> Target:
    return Target(entry["name"], entry["version"])


def read_record(store: Store, target: Target, name: str = RECORD) -> Record | None:
    """The record of `target`, or None where it has none.

    Raises:
        DamageError: it is not JSON, fails its checksum, is of another target, or says what no record can say.
        RequestError: a newer version of the program wrote it.
    """
    data = store.read(target, name)
    return None if data is None else parse_record(data, target, store.shown(target, name))


def write_record(store: Store, record: Record, name: str = RECORD) -> None:
    """Write the record, all of it or nothing, durable on return."""
    store.replace(record.target, name, record.to_bytes())


def change_record(store: Store, old: Record, new: Record) -> bool:
    """Write `new` in place of `old`, as one step; False when it is not `old` that is there."""
    data = store.read(old.target, RECORD)
    try:
        same = data is not None and parse_record(data, old.target, RECORD) == old
    except DamageError:
        return False
    return same and store.exchange(old.target, RECORD, data, new.to_bytes())


def parse_record(data: bytes, target: Target, place: str) -> Record:
    """The record in `data`; `place` names it in errors.

    Raises:
        DamageError, RequestError: see `read_record`.
    """

    def damaged(problem: object) -> DamageError:
        return DamageError(f"{target} is damaged: its record {place} {problem}")

    try:
        body = parse_object(data)
    except ValueError as error:
        raise damaged(f"is not JSON: {error}") from None
    _check_schema(body, target, place)
    checksum = body.pop("checksum", None)
    if checksum != body_checksum(body):
        raise damaged(f"fails its checksum (states {shortened(ascii(checksum), 40)})")
    if missing := _NEEDED - body.keys():
        raise damaged(f"has no {', '.join(sorted(missing))}")
    try:
        check(record_body, body)
    except ValueError as error:
        raise damaged(f"says what no record can: {error}") from None
    if (body["name"], body["version"], body["kind"]) != (target.name, target.version, target.kind):
        raise damaged(f"is that of {ascii('/'.join((body['name'], body['version'])))[1:-1][:200]}")
    known: dict[str, Any] = {
        key: tuple(value) if key in _LISTS else value for key, value in body.items() if key in _NAMES
    }
    return Record(**known)


def _check_schema(body: Mapping[str, Any], target: Target, place: str) -> None:
    schema = body.get("schema")
    if isinstance(schema, int) and SCHEMA < schema < 1 << 31:
        raise RequestError(
            f"{target} was made by a newer marin_build: its record {place} has schema {schema}, "
            f"this version ({__version__}) reads up to {SCHEMA}\n"
            f"  use marin_build {str(body.get('written_by', 'of a later version'))[:40]}"
        )
