"""Settings as options of a job: what a job reads back is what was resolved."""

from __future__ import annotations

import yaml

from marin_build.settings import Settings, as_options, resolve


def read_back(words: list[str]) -> Settings:
    """As the command line of `marin-build build` does."""
    given = {"prefix": words[1], "recipes": words[3]}
    for word in words[5:]:
        key, _, value = word.partition("=")
        given[key] = yaml.safe_load(value)
    return resolve(given, environment={})


def test_only_the_folders_are_said_when_nothing_was_chosen():
    assert as_options(Settings(), {}) == ["--prefix", "artifacts", "--recipes", "config"]


def test_what_was_chosen_is_read_back_as_it_was():
    chosen = {
        "prefix": "a b",
        "wait": True,
        "mesh": {"data": 2, "fsdp": -1},
        "micro_batch_size": None,
        "rolling_checkpoint_minutes": 0.5,
        "wandb_project": "two: words",
        "wandb_entity": "1e3",
        "platform": "null",
    }
    settings = resolve(chosen, environment={})
    assert read_back(as_options(settings, chosen)) == settings


def test_plain_text_stays_plain():
    settings = Settings(platform="tpu")
    assert as_options(settings, {"platform": "tpu"})[-2:] == ["--config", "platform=tpu"]
