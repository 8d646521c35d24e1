"""Credentials of the environment and of command lines reach no record, log, attempt, mirror, error or tracker."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from artifact_world import RAW, TOKENIZER, Parts, World

from marin_build.artifact.context import BuildContext, BuildResult
from marin_build.artifact.provenance import hidden
from marin_build.artifact.publish import build
from marin_build.errors import MarinError
from marin_build.foreign import hide, holds_credentials
from marin_build.recipe.target import parse_target
from marin_build.settings import Settings
from marin_build.training.tracker import Tracker

SECRET = "hunter22hunter22"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "HF_TOKEN",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "MY_DB_PASSWORD",
        "AZURE_STORAGE_CONNECTION_STRING",
    ):
        monkeypatch.setenv(name, f"{SECRET}-{name.lower()}")


COMMANDS = [
    ["--token", SECRET],
    ["--password=" + SECRET],
    [f"https://user:{SECRET}@host/x"],
    [f"https://host/x?X-Amz-Signature={SECRET}&X-Amz-Credential={SECRET}"],
    [f"https://a.blob.core.windows.net/c?sv=2020&sig={SECRET}"],
    [f"gs://b/x?access_token={SECRET}"],
    ["-H", f"Authorization: Bearer {SECRET}"],
    [f"HF_TOKEN={SECRET}"],
    [f"--config={{api_key: {SECRET}}}"],
    [f"hf_{SECRET}"],
    [f"AccountKey={SECRET};x=1"],
    [f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: ascii(words)[:40])
def test_a_command_line_keeps_none(words: list[str]):
    assert SECRET not in " ".join(hidden(["marin-build", *words]))
    if len(words) == 1:
        assert SECRET not in hide(words[0])


def everything_below(folder: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("fails", [False, True])
def test_a_build_leaves_none_anywhere(world: World, fails: bool, capfd: pytest.CaptureFixture[str]):
    def builder(context: BuildContext) -> BuildResult:
        context.logger.info("fetching https://user:%s@host/x?sig=%s", SECRET, SECRET)
        context.logger.info("with %s-hf_token and Authorization: Bearer %s", SECRET, SECRET)
        if fails:
            raise MarinError(f"403 for https://host/x?X-Amz-Signature={SECRET} with {SECRET}-wandb_api_key")
        return Parts()(context)

    command = ["marin-build", "build", RAW, *(word for words in COMMANDS for word in words)]
    settings = Settings(prefix=str(world.folder / "artifacts"), lease_seconds=30)
    target, arguments = parse_target(RAW), {"forced_run": None, "run": "r", "command": command}
    try:
        build(target, world.book, world.store, settings, builder, **arguments)
    except MarinError:
        assert fails
    written = everything_below(world.folder / "artifacts") + everything_below(world.folder / ".marin")
    assert "[hidden]" in written
    assert SECRET not in written + capfd.readouterr().err


def test_a_tracker_is_given_none_and_nothing_that_acts(monkeypatch: pytest.MonkeyPatch):
    given: dict[str, Any] = {}
    run = SimpleNamespace(log=lambda metrics, step: None, finish=lambda exit_code: None)
    fake = SimpleNamespace(Settings=lambda **options: options, init=lambda **options: given.update(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    config = {"measure": {"tags": [f"https://u:{SECRET}@h", "\x1b[2J"]}, f"hf_{SECRET}": 1, "steps": 3}
    Tracker(Settings(), name="x", run_id="x", config=config, logger=logging.getLogger("t"))
    assert given["config"]["steps"] == 3
    assert given["config"]["measure"]["tags"] == ["https://[hidden]@h", r"\x1b[2J"]
    assert SECRET not in str(given)


@pytest.mark.parametrize(
    "text",
    [
        "step 10/20 50.0% | loss 3.1234 | 12,345 tokens/s | ETA 0:00:10",
        "train/tokens_per_second: 12345, token_budget: 1000000, max_bad_documents: 3",
        "tokenizers/bytes/2026.01.01: 257 ids, bos None, eos 256, pad None",
        "tokenizer.special_tokens.eos '<|end|>' is not in the vocabulary; eos_token: <|end|>",
        "drift: checkpoints/x: optimizer.learning_rate: 0.003 → 0.001",
        "fencing token: 5; secret santa; a password is needed",
        "xxh3_128 0123456789abcdef0123456789abcdef instead of 0123456789abcdef0123456789abcdee",
        "git@github.com:marin/x and see user@host (process 12)",
        "abfs://container@account.dfs.core.windows.net/x and ssh://git@github.com/a/b and sftp://me@host/x",
        f"made {TOKENIZER} in /data/keys/x",
    ],
)
def test_ordinary_messages_stay_as_they_are(text: str):
    assert hide(text) == text
    assert not holds_credentials(text)


def test_short_values_of_variables_are_words_and_no_secrets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_TOKEN", "false")
    assert hide("wait is false") == "wait is false"
