"""The form of what the small files say, records and attempts: types, ranges, and names that stay in their folder.

Unknown fields are let through, since later versions add some. Whoever can write to a prefix can also write a correct
checksum, so it is these checks that keep a forged file from leading out of the prefix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict  # noqa: UP035 (pydantic needs this one before Python 3.12)

from marin_build.artifact.store import OWN_NAMES, TEMPORARY
from marin_build.foreign import shortened
from marin_build.recipe.target import is_target

_LETTER = r"[^/\\\x00-\x1f\x7f-\x9f]"
_FIRST = r"[^./\\\x00-\x1f\x7f-\x9f]"
_SEGMENT = rf"(?:{_FIRST}{_LETTER}*|\.{_FIRST}{_LETTER}*|\.\.{_LETTER}+)"
FILE_PATTERN = rf"^{_SEGMENT}(?:/{_SEGMENT})*$"
"""A relative path without empty parts, `.`, `..`, backslashes and control characters."""
NO_FILE_NAME = "the name is not UTF-8 or holds a backslash or a control character, which no record can hold; rename it"

FileName = Annotated[str, StringConstraints(pattern=FILE_PATTERN, max_length=4096)]
Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Identifier = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z][0-9A-Za-z_.\-]*$", max_length=200)]


BuildFolder = Annotated[str, StringConstraints(pattern=r"^(?:\.|builds/[0-9A-Za-z][0-9A-Za-z_.\-]*)$", max_length=210)]
WorkFolder = BuildFolder | Literal[".rebuild"]
_PLACE = r"^(?:/|[a-z][a-z0-9+.\-]*://)[^\x00-\x1f\x7f-\x9f]+$"
Place = Annotated[str, StringConstraints(pattern=_PLACE, max_length=4096)]
"""An absolute folder, or a URL."""


class File(TypedDict):
    path: FileName
    bytes: Count
    xxh3_128: Hash
    outside_digest: NotRequired[bool]
    pool: NotRequired[bool]


class Kept(File):
    taken: NotRequired[bool]


def _all_own(files: list[File]) -> list[File]:
    """Files that an artifact can have: each once, none under a name of the protocol's own."""
    paths = [file["path"] for file in files]
    if len(set(paths)) != len(paths):
        raise ValueError("names a file twice")
    for path in paths:
        if path.partition("/")[0] in OWN_NAMES or path.endswith(TEMPORARY):
            raise ValueError(f"names {path!r}, which belongs to no artifact")
    return files


Files = Annotated[list[File], AfterValidator(_all_own)]


def _of_a_target(entry: Mapping[str, Any]) -> Any:
    if "/" in entry["version"] or not is_target(f"{entry['name']}/{entry['version']}"):
        raise ValueError(f"names {entry['name']!r}/{entry['version']!r}, which is no target")
    return entry


class Made(TypedDict):
    name: str
    version: str
    fingerprint: Hash
    digest: Hash


Dependencies = list[Annotated[Made, AfterValidator(_of_a_target)]]


class Build(TypedDict):
    """What a build was made from, as an accepted or replaced one is remembered."""

    fingerprint: Hash
    recipe: dict[str, Any]
    dependencies: Dependencies


class Accepted(Build):
    reason: str
    user: str
    time: str


class Damage(TypedDict):
    path: str
    problem: str


class Lost(File):
    problem: str
    noted: str


class Certificate(TypedDict):
    kind: str
    what: str
    checked: list[str]
    seed: int
    equal: str | None
    difference: str | None
    time: str
    user: str
    host: str
    code: str
    packages: dict[str, str]


class Code(TypedDict):
    digest: str
    modules: list[str]


class Brief(TypedDict):
    id: Identifier
    started: NotRequired[str]
    host: NotRequired[str]


class Conditions(TypedDict):
    after: Count
    mesh: dict[str, int]
    execution: dict[str, Any]


class AdoptedBody(TypedDict, total=False):
    reason: str
    user: str
    host: str
    time: str
    unproven: list[str]


class Provenance(TypedDict, total=False):
    attempt: str | None
    token: Count
    forced: str | None
    run: str | None
    finished: str
    command: list[str]
    packages: dict[str, str]
    code: Code
    adopted: AdoptedBody
    attempts: list[Brief]
    conditions: list[Conditions]


class RecordBody(TypedDict):
    schema: Annotated[int, Field(ge=1, lt=1 << 31)]
    name: str
    version: str
    kind: str
    fingerprint: Hash
    digest: Hash
    recipe: dict[str, Any]
    dependencies: Dependencies
    files: Files
    measured: NotRequired[Dependencies]
    metrics: NotRequired[dict[str, bool | int | float | str | None]]
    provenance: NotRequired[Provenance]
    folder: NotRequired[BuildFolder]
    external: NotRequired[Place | None]
    accepted: NotRequired[list[Accepted]]
    replaced: NotRequired[list[Build]]
    damage: NotRequired[list[Damage]]
    lost: NotRequired[list[Lost]]
    certificates: NotRequired[list[Certificate]]
    written_by: NotRequired[str]


class Manifest(TypedDict):
    """Files of a step of a checkpoint."""

    files: Files


class Failure(TypedDict):
    run: str | None
    exit_code: int
    message: str


class AttemptBody(TypedDict):
    schema: Annotated[int, Field(ge=1, lt=1 << 31)]
    id: Identifier
    name: str
    version: str
    fingerprint: Hash
    recipe: dict[str, Any]
    dependencies: Dependencies
    folder: WorkFolder
    token: Count
    started: str
    host: str
    run: NotRequired[str | None]
    forced: NotRequired[str | None]
    earlier: NotRequired[list[Brief]]
    failure: NotRequired[Failure | None]
    repairs: NotRequired[dict[str, Any] | None]


class OwnerBody(TypedDict):
    host: str
    boot_id: str
    namespace: str
    pid: Annotated[int, Field(gt=0, lt=1 << 31)]
    process_start: Count
    user: str
    run: NotRequired[str | None]


Seconds = Annotated[float, Field(allow_inf_nan=False)]


class LeaseBody(TypedDict):
    owner: OwnerBody
    token: Count
    nonce: str
    lease_seconds: Annotated[float, Field(gt=0, le=86400)]
    beat: Count
    wall_seconds: Seconds
    boot_seconds: Seconds
    sealed: NotRequired[Identifier | None]


def is_file_name(name: str) -> bool:
    """Whether a record can name a file so."""
    return not re.search(r"[\\\x00-\x1f\x7f-\x9f\ud800-\udfff]", name)


record_body = TypeAdapter(RecordBody)
manifest_body = TypeAdapter(Manifest)
attempt_body = TypeAdapter(AttemptBody)
lease_body = TypeAdapter(LeaseBody)
kept_entry = TypeAdapter(Kept)


def check(form: TypeAdapter[Any], body: Mapping[str, Any]) -> None:
    """Compare a body with its form.

    Raises:
        ValueError: the first field that is not as it has to be, and what was seen there.
    """
    try:
        form.validate_python(body, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])[:200]
        if first["type"] == "value_error":
            raise ValueError(f"{field} {first['ctx']['error']}"[:500]) from None
        problem = _words(first)
        raise ValueError(f"{field} {problem}, seen {shortened(ascii(first['input']), 100)}") from None


def _words(error: Any) -> str:
    if error["type"] == "string_pattern_mismatch":
        outside = "names a file outside of its folder, or one that no file system has everywhere"
        return outside if error["loc"][-1] == "path" else "has another form"
    return str(error["msg"]).replace("Input should be", "is not").replace("Field required", "is missing")
