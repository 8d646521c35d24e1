"""Settings: where and how things run. They are never part of an artifact's identity.

In rising order: the defaults here, `config/config.yaml`, a profile's `config:`, the environment (`MARIN_PREFIX`), and
`--config key=value`. Snakemake merges all but the environment; `resolve` does the rest.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from marin_build.errors import RequestError
from marin_build.foreign import hide, holds_credentials, shortened

MAX_YAML_BYTES = 1 << 20
_NO_TEXT = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring = 2, 200

OBJECT_CACHE = "~/.cache/marin_build/objects"


class Settings(BaseModel):
    """All settings, with their defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefix: Annotated[str, Field(min_length=1)] = "artifacts"
    """Folder of all artifacts."""
    object_cache: Annotated[str, Field(min_length=1)] = OBJECT_CACHE
    """Folder on each machine where builders of an object store work, and where what they read is kept."""
    keep: list[str] = []
    """Targets that `marin-build gc` keeps although no recipe names them."""
    recipes: str = "config"
    """Folder of all recipes."""
    platform: str = "local"
    """Picks the block of a recipe's `execution:`; profiles set it."""
    wait: bool = False
    """Wait for a target that somebody else is building instead of stopping."""
    lease_seconds: Annotated[float, Field(gt=0, le=86400)] = 90
    """A lease without a heartbeat for this long is void; the heartbeat comes three times as often."""
    processes: Annotated[int, Field(ge=1)] | None = None
    """Worker processes for tokenizing; none: the cores that this process may use."""
    encoder: Literal["auto", "tokenizers"] = "auto"
    """What turns text into ids. `auto`: the fast one, for tokenizers for which a check has shown that it gives the ids
    of the reference; `tokenizers`: the reference always, and no checks."""
    tokenize_parts: Annotated[int, Field(ge=1, le=99_999)] | None = None
    """Jobs that share the work on a token set; none: what `execution` of its recipe says for the platform, or 1."""
    mesh: dict[str, int] | None = None
    """Overrides `execution.mesh` of the recipe, for example mesh='{data: 2, fsdp: 4, tensor: 1}'."""
    micro_batch_size: Annotated[int, Field(ge=1)] | None = None
    rematerialization: Literal["none", "dots", "full"] | None = None
    rolling_checkpoint_minutes: Annotated[float, Field(gt=0)] | None = 10
    """Save a rolling checkpoint after this many minutes; only the newest is kept."""
    rolling_checkpoint_steps: Annotated[int, Field(ge=1)] | None = None
    """Save a rolling checkpoint every this many steps."""
    log_every_steps: Annotated[int, Field(ge=1)] = 10
    """Steps between two lines of metrics.jsonl."""
    wandb: Literal["offline", "online", "disabled"] = "offline"
    """Weights & Biases. `offline` writes a run folder that `wandb sync` can upload later; needs no account."""
    wandb_project: str = "marin_build"
    wandb_entity: str | None = None
    compilation_cache: str | None = "~/.cache/marin_build/jax"
    """Folder of JAX's persistent compilation cache; null switches it off."""


def resolve(
    given: Mapping[str, Any], environment: Mapping[str, str] = os.environ, command_line: Mapping[str, Any] | None = None
) -> Settings:
    """Merge `given` (files and profiles), the environment and the command line into Settings.

    Raises:
        RequestError: an unknown key, with the nearest name, or a value that is not allowed.
    """
    merged = dict(given)
    if environment.get("MARIN_PREFIX"):
        merged["prefix"] = environment["MARIN_PREFIX"]
    merged.update(command_line or {})
    for key in merged:
        if key not in Settings.model_fields:
            near = get_close_matches(key, Settings.model_fields, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RequestError(
                f"unknown setting {key!r}{hint}\n  settings are: {', '.join(sorted(Settings.model_fields))}"
            )
    for key, value in merged.items():
        if isinstance(value, str):
            _check_text(key, value)
            if key == "prefix":
                _check_prefix(value)
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"setting {key}: {first['msg']} (value seen: {_seen(first['input'])})") from None


def _check_prefix(value: str) -> None:
    """Raise RequestError for a place where no job would find what another has made."""
    scheme = value.lower().partition("://")[0] if "://" in value else ""
    if scheme == "memory":
        raise RequestError("setting prefix: memory:// lasts for one process, and each job is one; use a folder")
    if scheme in ("http", "https"):
        raise RequestError(f"setting prefix: {scheme}:// can only be read; use a folder, gs://… or s3://…")


def _check_text(key: str, value: str) -> None:
    """Refuse what must reach no file name, command line or record."""
    if holds_credentials(value):
        raise RequestError(
            f"setting {key}: holds credentials, which commands and logs would show, seen {_seen(hide(value))}\n"
            "  leave them to the environment or the credentials file of the store"
        )
    if _NO_TEXT.search(value):
        raise RequestError(f"setting {key}: holds a control character or bytes that are no UTF-8, seen {_seen(value)}")


def _seen(value: Any) -> str:
    return shortened(_REPR.repr(value), 200)


def read_yaml(content: bytes) -> Any:
    """The values of settings: plain YAML without references, which make a small text a huge value.

    Raises:
        ValueError: it is none, with the reason.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("references (*name) are not allowed: write the value where it is used")
            return super().compose_node(parent, index)

        def construct_yaml_int(self, node: Any) -> int:
            number: int = super().construct_yaml_int(node)
            if number.bit_length() > 63:
                raise ValueError("it holds a number of more than 64 bits")
            return number

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    if len(content) > MAX_YAML_BYTES:
        raise ValueError(f"it is larger than {MAX_YAML_BYTES} bytes")
    try:
        return yaml.load(content.decode(), Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def as_options(settings: Settings, chosen: Mapping[str, Any]) -> list[str]:
    """Options of `marin-build` that give the same settings wherever it runs: the folders, and all that was `chosen`."""
    words = ["--prefix", settings.prefix, "--recipes", settings.recipes]
    pairs = [f"{key}={_spelled(value)}" for key, value in chosen.items() if key not in ("prefix", "recipes")]
    return [*words, "--config", *pairs] if pairs else words


def _spelled(value: Any) -> str:
    """A value as YAML reads it back; text stays bare where it can."""
    try:
        is_bare = isinstance(value, str) and read_yaml(value.encode()) == value
    except ValueError:
        is_bare = False
    return str(value) if is_bare else json.dumps(value)
