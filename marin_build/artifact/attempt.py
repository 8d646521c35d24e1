"""The attempt `.attempt.json`: what the unfinished work in a folder was made from, so that it is resumed or refused.

It is written before the work begins and stays when the work is done: should the record be lost, the bytes still
belong to a known recipe. It also notes a failure that a retry of the same run cannot cure.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from marin_build.artifact.bodies import attempt_body, check
from marin_build.artifact.digest import body_checksum
from marin_build.artifact.store import ATTEMPT, Store
from marin_build.artifact.strict_json import parse_object
from marin_build.errors import (
    FINAL_EXIT_CODES,
    DamageError,
    DriftError,
    MarinError,
    NumericalError,
    RefusedError,
    RequestError,
)
from marin_build.foreign import printable
from marin_build.recipe.target import Target

SCHEMA = 1

_CLASSES: tuple[type[MarinError], ...] = (RequestError, DriftError, DamageError, NumericalError, RefusedError)


@dataclass(frozen=True)
class Attempt:
    """One attempt at a target; a later one that resumes its work names it in `earlier`."""

    id: str
    name: str
    version: str
    fingerprint: str
    recipe: Mapping[str, Any]
    """Identity body of the recipe."""
    dependencies: tuple[Mapping[str, Any], ...]
    """{name, version, fingerprint, digest} of what it is made from, as it was at the start."""
    folder: str
    """Where it works, in the artifact's folder: `.`, or `.rebuild` while the old artifact stays; on an object store
    `builds/<id>`."""
    token: int
    """Fencing token of its lease."""
    started: str
    host: str
    run: str | None = None
    forced: str | None = None
    """Id of the run that forced it."""
    earlier: tuple[Mapping[str, Any], ...] = ()
    """{id, started, host} of the attempts whose work this one resumes, oldest first."""
    failure: Mapping[str, Any] | None = None
    """{run, exit_code, message} of a failure that a retry cannot cure."""
    repairs: Mapping[str, Any] | None = None
    """The record of the finished artifact whose damage it repairs; it comes back when that turns out impossible."""
    schema: int = SCHEMA

    @property
    def target(self) -> Target:
        return Target(self.name, self.version)

    def digests(self) -> dict[str, str]:
        """Digest of each dependency, by target."""
        return {f"{entry['name']}/{entry['version']}": entry["digest"] for entry in self.dependencies}

    def brief(self) -> dict[str, Any]:
        return {"id": self.id, "started": self.started, "host": self.host}

    def with_failure(self, error: MarinError) -> Attempt:
        failure = {"run": self.run, "exit_code": error.exit_code, "message": printable(error)}
        return dataclasses.replace(self, failure=failure)

    def to_bytes(self) -> bytes:
        body = dataclasses.asdict(self)
        text = json.dumps({**body, "checksum": body_checksum(body)}, indent=1, sort_keys=True, ensure_ascii=False)
        return text.encode("utf-8", "surrogatepass") + b"\n"

    def raise_again_in(self, run: str | None) -> None:
        """Raise the noted failure when it happened in the same run: a retry cannot cure it."""
        if run is not None and self.failure and self.failure["run"] == run:
            code, message = self.failure["exit_code"], self.failure["message"]
            raise next((kind for kind in _CLASSES if kind.exit_code == code), MarinError)(message)


def new_id() -> str:
    """Sorts by time for people; unique by its last part."""
    return f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{secrets.token_hex(4)}"


def now() -> str:
    """UTC time for people and provenance; it decides nothing."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def read_attempt(store: Store, target: Target) -> Attempt | None:
    """The attempt at `target`; None where there is none or it is unreadable: then nobody knows what its work is of.

    Raises:
        RequestError: a newer version of the program wrote it.
    """
    return parse_attempt(store.read(target, ATTEMPT), target)


def parse_attempt(data: bytes | None, target: Target) -> Attempt | None:
    """As `read_attempt`, of these bytes."""
    try:
        body = parse_object(data or b"null", half_characters=True)
        if isinstance(body["schema"], int) and body["schema"] > SCHEMA:
            raise RequestError(f"{target}: its unfinished work is of a newer marin_build (schema {body['schema']})")
        if body.pop("checksum") != body_checksum(body):
            return None
        check(attempt_body, body)
        names = {item.name for item in dataclasses.fields(Attempt)}
        known: dict[str, Any] = {name: value for name, value in body.items() if name in names}
        lists = {name: tuple(known.get(name, ())) for name in ("dependencies", "earlier")}
        attempt = Attempt(**{**known, **lists})
    except (ValueError, KeyError):
        return None
    return attempt if attempt.target == target else None


def write_attempt(store: Store, attempt: Attempt) -> None:
    store.replace(attempt.target, ATTEMPT, attempt.to_bytes())


def note_failure(store: Store, attempt: Attempt, error: MarinError) -> None:
    """Note a failure that a retry cannot cure, unless the attempt is no longer ours; others leave it as it is."""
    if error.exit_code in FINAL_EXIT_CODES:
        store.exchange(attempt.target, ATTEMPT, attempt.to_bytes(), attempt.with_failure(error).to_bytes())
