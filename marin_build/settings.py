"""Settings: where and how things run. They are never part of an artifact's identity.

In rising order: the defaults here, `config/config.yaml`, a profile's `config:`, the environment (`MARIN_PREFIX`), and
`--config key=value`. Snakemake merges all but the environment; `resolve` does the rest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from marin_build.errors import RequestError


class Settings(BaseModel):
    """All settings, with their defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefix: Annotated[str, Field(min_length=1)] = "artifacts"
    """Folder of all artifacts."""
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
    try:
        return Settings.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise RequestError(f"setting {key}: {first['msg']} (value seen: {first['input']!r})") from None


def as_options(settings: Settings, chosen: Mapping[str, Any]) -> list[str]:
    """Options of `marin-build` that give the same settings wherever it runs: the folders, and all that was `chosen`."""
    words = ["--prefix", settings.prefix, "--recipes", settings.recipes]
    pairs = [f"{key}={_spelled(value)}" for key, value in chosen.items() if key not in ("prefix", "recipes")]
    return [*words, "--config", *pairs] if pairs else words


def _spelled(value: Any) -> str:
    """A value as YAML reads it back; text stays bare where it can."""
    import yaml

    return value if isinstance(value, str) and yaml.safe_load(value) == value else json.dumps(value)
