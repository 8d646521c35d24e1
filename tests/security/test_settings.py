"""Settings as typed and as written: no value runs, grows, or reaches a command line, a log or a record as a secret."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from marin_build.cli import main
from marin_build.errors import RequestError
from marin_build.settings import Settings, as_options, read_yaml, resolve

Tried = Callable[..., tuple[int, str]]


@pytest.fixture
def tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tried:
    """Runs `marin-build` in an empty folder, which stays empty: exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MARIN_PREFIX", raising=False)
    (tmp_path / "config").mkdir()

    def run(*arguments: str) -> tuple[int, str]:
        try:
            code = main(list(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
        printed = "".join(capsys.readouterr())
        assert all(line.isprintable() for line in printed.split("\n")), "nothing that a terminal would obey"
        assert len(printed) < 3000
        assert [path.name for path in tmp_path.rglob("*") if path.name not in ("config", "config.yaml")] == []
        return code, printed

    return run


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"b{i}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for i, (a, b) in enumerate(zip("abcdefghi", "bcdefghij", strict=True))
)


@pytest.mark.parametrize(
    "item",
    [
        "prefix=" + "[" * 3000,
        "prefix=&a [*a]",
        "wait=!!python/object/apply:os.system [touch ran]",
        "wait=!!python/name:os.system",
        'prefix="a\\0b"',
        'prefix="a\\x1b[31m"',
        "prefix=a\x1b]0;title\x07",
        "processes=" + "9" * 6000,
        "processes=0x" + "f" * 6000,
        "mesh={data: 99999999999999999999}",
        "lease_seconds=.nan",
        "lease_seconds=1e300",
        "prefix=a\udcff",
        "prefix=2026-01-01",
        "prefix=",
        "prefix=memory://x",
        "prefix=https://a/b",
        "recipes=[a]",
        "\x1b[31m=1",
        "nonsense",
        "__class__=1",
        "model_config=1",
    ],
    ids=lambda item: ascii(item[:40]),
)
def test_a_value_that_is_none_is_refused_in_one_line(tried: Tried, item: str):
    code, printed = tried("status", "--config", item)
    assert code == 2
    assert printed.startswith("marin-build: ")


@pytest.mark.parametrize("text", [BOMB + "prefix: *j\n", "[" * 3000, "a: !!python/name:os.system\n", "#" * (1 << 21)])
def test_a_settings_file_cannot_run_or_grow(tried: Tried, text: str):
    Path("config/config.yaml").write_text(text)
    code, printed = tried("status")
    assert code == 2
    assert printed.startswith("marin-build: config/config.yaml: not readable as YAML")


def test_a_bomb_that_was_read_elsewhere_is_not_spelled_out():
    bomb: list[object] = ["x"]
    for _ in range(60):
        bomb = [bomb] * 9
    with pytest.raises(RequestError, match="setting prefix: Input should be a valid string") as error:
        resolve({"prefix": bomb}, {})
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "secret",
    [
        "https://user:hunter22@host/bucket",
        "s3://key:hunter22@bucket/x",
        "s3://bucket/x?X-Amz-Signature=hunter22",
        "https://a.blob.core.windows.net/c?sv=1&sig=hunter22",
        "gs://bucket/hf_hunter22hunter22",
    ],
)
def test_credentials_are_no_setting_and_are_not_repeated(tried: Tried, monkeypatch: pytest.MonkeyPatch, secret: str):
    for arguments in (
        ["--prefix", secret],
        ["--config", f"prefix='{secret}'"],
        ["--config", f"wandb_entity='{secret}'"],
    ):
        code, printed = tried("status", *arguments)
        assert code == 2
        assert "holds credentials" in printed
        assert "hunter22" not in printed
    monkeypatch.setenv("MARIN_PREFIX", secret)
    assert tried("status")[0] == 2


@pytest.mark.parametrize(
    "prefix", ["a b", "$(touch ran)", "a;touch ran", "a'b", 'a"b', "`touch ran`", "{x}", "-x", "é", "a\\b"]
)
def test_options_of_a_job_give_back_the_settings_word_for_word(prefix: str):
    import shlex

    settings = Settings(prefix=prefix, platform=prefix)
    line = shlex.join(as_options(settings, {"prefix": prefix, "platform": prefix}))
    words = shlex.split(line)
    assert words[:2] == ["--prefix", prefix]
    assert read_yaml(words[-1].partition("=")[2].encode()) == prefix


TYPED = [
    "../../etc/passwd",
    "/etc/passwd",
    "raw/../../etc/dev",
    "//raw/a/dev",
    "raw//../..//etc/dev",
    "$(touch ran)",
    "`touch ran`",
    "raw/a;touch ran/dev",
    "raw/a/dev;touch ran",
    "raw/a/dev\ntouch ran",
    "raw/a/dev\n",
    "raw/a/dev ",
    "'raw/a/dev'",
    "raw/\x1b[31ma/dev",
    "raw/a\x00/dev",
    "raw/\u202ea/dev",
    "r\u0430w/a/dev",
    "raw/\uff0e\uff0e/dev",
    "raw/a/\u0662\u0660\u0662\u0666.06.28",
    "raw/a/de\udcffv",
    "raw/" + "x" * 4000 + "/dev",
    "x/" * 2000 + "dev",
    "raw/" + "../" * 1300 + "dev",
    "--help=x",
    "",
    ".",
    "/",
    "raw/a/{target}",
    "raw/a/*",
    "%s%n",
    "[red]raw[/]/a/dev",
]


@pytest.mark.parametrize("typed", TYPED, ids=lambda text: ascii(text[:30]))
@pytest.mark.parametrize("verb", ["build", "show", "new"])
def test_what_is_no_target_is_one_line_and_leaves_no_trace(tried: Tried, verb: str, typed: str):
    code, printed = tried(verb, typed)
    assert code == 2, printed
    assert "Traceback" not in printed
    assert not os.path.exists("ran")


def test_letters_that_look_alike_are_told_apart(tried: Tried):
    assert r"r\u0430w" in tried("status", "r\u0430w/a/dev")[1]
