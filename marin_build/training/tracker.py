"""Weights & Biases, when it is wanted: a copy of metrics.jsonl that may fail without stopping anything.

The run folder is `wandb/` of the working directory, as wandb's users expect; offline runs are uploaded with `wandb
sync`. It is never part of an artifact. The variables of wandb (WANDB_MODE, WANDB_DIR, WANDB_PROJECT, …) keep their
meaning and win over our settings.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from marin_build.foreign import printable
from marin_build.settings import Settings

INIT_SECONDS = 30
"""The devices wait so long, at most, for an answer when a run starts online; WANDB_INIT_TIMEOUT, if set, wins."""


def _harmless(value: Any) -> Any:
    """The same values with every text as `printable`: they end on a page."""
    if isinstance(value, dict):
        return {_harmless(key): _harmless(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_harmless(item) for item in value]
    return printable(value) if isinstance(value, str) else value


class Tracker:
    """A run of Weights & Biases, or nothing. The first failure is logged with its reason and ends the tracking."""

    def __init__(
        self, settings: Settings, *, name: str, run_id: str, config: Mapping[str, Any], logger: logging.Logger
    ):
        self._logger = logger
        self._run: Any = None
        mode = os.environ.get("WANDB_MODE", settings.wandb)
        if mode != "disabled":
            self._attempt("start", lambda: self._start_somewhere(settings, mode, name, run_id, config))

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._run is not None:
            self._attempt("log", lambda: self._run.log(dict(metrics), step=step))

    def finish(self, exit_code: int = 0) -> None:
        if self._run is not None:
            self._attempt("finish", lambda: self._run.finish(exit_code=exit_code))
            self._run = None

    def _start_somewhere(
        self, settings: Settings, mode: str, name: str, run_id: str, config: Mapping[str, Any]
    ) -> None:
        try:
            self._start(settings, mode, name, run_id, config)
        except Exception as error:
            if mode != "online":
                raise
            import wandb

            wandb.teardown()  # its service still holds the id for the run that failed
            self._start(settings, "offline", name, run_id, config)
            self._logger.warning(
                "Weights & Biases cannot be reached, so this run is kept offline; `wandb sync` uploads it later: %s",
                _reason(error),
            )

    def _start(self, settings: Settings, mode: str, name: str, run_id: str, config: Mapping[str, Any]) -> None:
        import wandb

        waits = {} if "WANDB_INIT_TIMEOUT" in os.environ else {"init_timeout": INIT_SECONDS}
        quiet = wandb.Settings(
            silent=True, console="off", disable_git=True, save_code=False, program="marin-build", **waits
        )
        self._run = wandb.init(
            project=None if "WANDB_PROJECT" in os.environ else settings.wandb_project,
            entity=None if "WANDB_ENTITY" in os.environ else settings.wandb_entity,
            name=name,
            id=run_id,
            config=_harmless(dict(config)),
            mode=mode,
            resume="allow" if mode == "online" else None,
            settings=quiet,
        )

    def _attempt(self, what: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            # Whatever it is, training is worth more than its copy: metrics.jsonl has everything.
            self._run = None
            self._logger.warning(
                "Weights & Biases failed to %s and is off for this run (training goes on, metrics.jsonl is complete): "
                "%s",
                what,
                _reason(error),
            )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
