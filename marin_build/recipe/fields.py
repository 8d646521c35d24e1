"""What every schema is made of: the base class, and the types of fields, each with its constraint in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from marin_build.errors import RequestError
from marin_build.recipe.target import SEGMENT_PATTERN, VERSION_PATTERN, parse_target

UNRESOLVED = "unresolved"


def added_later(neutral: Any) -> Any:
    """Declare a field that joined the schema after artifacts were made without it."""
    return Field(default=neutral, json_schema_extra={"x-added-later": True})


@dataclass(frozen=True)
class Said:
    """Says a constraint in words, for messages, and as a pattern, for editors."""

    needs: str
    pattern: str | None = None

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        schema: dict[str, Any] = handler(core_schema)
        return schema | {"x-needs": self.needs} | ({"pattern": self.pattern} if self.pattern else {})


def _target_of(kind: str) -> AfterValidator:
    def check(text: str) -> str:
        try:
            target = parse_target(text)
        except RequestError as error:
            raise ValueError(str(error)) from None
        if target.kind != kind:
            raise ValueError(f"needs a target of kind {kind}, seen {text!r}")
        return text

    return AfterValidator(check)


def _said_target(kind: str) -> Said:
    return Said(f"a target {kind}/name/version", rf"^{kind}(?:/{SEGMENT_PATTERN})+/{VERSION_PATTERN}$")


RawTarget = Annotated[str, _target_of("raw"), _said_target("raw")]
TokenizerTarget = Annotated[str, _target_of("tokenizers"), _said_target("tokenizers")]
TokenizedTarget = Annotated[str, _target_of("tokenized"), _said_target("tokenized")]

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
DecayRate = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
"""Of a moving average. At 1 it would keep its start for ever, and Adam's correction of that start divides by zero."""
Digest = Annotated[
    str, StringConstraints(pattern=r"^(?:[0-9a-f]{32}|unresolved)$"), Said("32 hex digits, or unresolved")
]
Revision = Annotated[
    str,
    StringConstraints(pattern=r"^(?:[0-9a-f]{7,40}|unresolved)$"),
    Said("a commit of 7 to 40 hex digits, or unresolved"),
]
HubName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]*(?:/[A-Za-z0-9_.\-]*[A-Za-z0-9_\-])?$", max_length=200),
    Said("owner/name"),
]
RepositoryName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.\-]*/[A-Za-z0-9_.\-]*[A-Za-z0-9_\-]$", max_length=200),
    Said("owner/name"),
]
SetName = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.\-]*)*$", max_length=200),
    Said("letters, digits, '_', '-', '.', and '/' between groups, at most 200 characters"),
]


def _relative_path(text: str) -> str:
    if text.startswith(("/", "~")) or ".." in text.split("/") or any(ord(c) < 32 for c in text):
        raise ValueError("needs a relative path or glob without '..'")
    return text


RelativeGlob = Annotated[
    str,
    AfterValidator(_relative_path),
    StringConstraints(min_length=1, max_length=1000),
    Said("a relative path or glob without '..', at most 1000 characters"),
]


class Model(BaseModel):
    """Base of every schema: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=(), defer_build=True)
