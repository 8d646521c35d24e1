"""The grammar of targets: `kind/name/version`, for example `checkpoints/dclm_1b_1x/2026.06.28`.

The kind is the first folder of the name. A version is a real date `YYYY.MM.DD`, with `.N` for a later one of the same
day, or the mutable `dev` or `<label>-dev`. No segment can leave the prefix or be mistaken for a version.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date

from marin_build.errors import RequestError

WRITTEN = ("raw", "tokenizers", "tokenized", "checkpoints")
"""Kinds whose recipes are written, in the order of the data."""
DERIVED = ("parts", "checks")
"""Kinds whose recipes follow from those of others."""
KINDS = (*WRITTEN, *DERIVED)
"""Kinds that can be built."""

VERSION_PATTERN = r"(?:[0-9]{4}\.[0-9]{2}\.[0-9]{2}(?:\.[1-9][0-9]*)?|(?:[A-Za-z0-9][A-Za-z0-9_]*-)?dev)"
SEGMENT_PATTERN = r"[A-Za-z0-9_][A-Za-z0-9_.\-]*"
TARGET_PATTERN = rf"(?:{SEGMENT_PATTERN}/)+{VERSION_PATTERN}"

MAX_TARGET_BYTES = 1024
MAX_PART_BYTES = 200
"""File systems take 255 bytes a part; endings such as `.yaml` need some of them."""
_VERSION = re.compile(VERSION_PATTERN)
_SEGMENT = re.compile(SEGMENT_PATTERN)


@dataclass(frozen=True, order=True)
class Target:
    """A parsed target. `str(target)` is what a user types."""

    name: str
    version: str

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]

    @property
    def is_dev(self) -> bool:
        """True for a mutable version, which is rebuilt whenever it is asked for."""
        return self.version == "dev" or self.version.endswith("-dev")

    @property
    def is_derived(self) -> bool:
        """True when its recipe is not written, but follows from that of another target."""
        return self.kind in DERIVED

    @property
    def follows_its_recipe(self) -> bool:
        """True when what is there for another recipe is simply built anew: its bytes were promised to nobody."""
        return self.is_dev or self.is_derived

    def __str__(self) -> str:
        return f"{self.name}/{self.version}"


def parse_target(text: str) -> Target:
    """Parse `kind/name/version`.

    Raises:
        RequestError: what is wrong, the value seen and the values allowed.
    """
    shown = ascii(text if len(text) <= 200 else text[:200] + "…")
    if len(text.encode("utf-8", "surrogatepass")) > MAX_TARGET_BYTES:
        raise RequestError(f"{shown} is not a target: it is longer than {MAX_TARGET_BYTES} bytes")
    *segments, version = text.split("/")
    if len(segments) < 2:
        raise RequestError(
            f"{shown} is not a target: write kind/name/version, for example checkpoints/quickstart/2026.06.28"
        )
    if segments[0] not in KINDS:
        raise RequestError(f"{shown} is not a target: the kind {segments[0]!a} is none of {', '.join(WRITTEN)}")
    for part in (*segments, version):
        if len(part) > MAX_PART_BYTES:
            raise RequestError(
                f"{shown} is not a target: the part {part[:40]!a}… is longer than {MAX_PART_BYTES} bytes"
            )
    for segment in segments:
        if not _SEGMENT.fullmatch(segment) or _VERSION.fullmatch(segment):
            raise RequestError(
                f"{shown} is not a target: the part {segment!a} of the name may hold letters, digits, '_', '-' and "
                "'.', starts with a letter, a digit or '_', and is not a version"
            )
    check_version(version, shown)
    return Target("/".join(segments), version)


def check_version(version: str, shown: str) -> None:
    """Raise RequestError unless `version` is a real date `YYYY.MM.DD[.N]`, `dev` or `<label>-dev`."""
    if not _VERSION.fullmatch(version):
        raise RequestError(
            f"{shown} is not a target: the version {version!a} is neither YYYY.MM.DD, YYYY.MM.DD.N, dev nor <label>-dev"
        )
    if not version.endswith("dev"):
        year, month, day = (int(part) for part in version.split(".")[:3])
        try:
            date(year, month, day)
        except ValueError as error:
            raise RequestError(
                f"{shown} is not a target: the version {version!a} is not a real date ({error})"
            ) from None


def version_order(version: str) -> tuple[int, ...]:
    """A sort key: mutable versions first, then by date and number, the newest last."""
    return () if version.endswith("dev") else tuple(int(part) for part in version.split("."))


def is_target(text: str) -> bool:
    try:
        parse_target(text)
    except RequestError:
        return False
    return True
