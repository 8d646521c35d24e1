"""What others wrote acts on no terminal: escapes, markup and direction marks are shown, in every place that prints."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
from artifact_world import RAW, TOKENIZER, Parts, World
from forgery import ATTEMPT_BODY, RAW_BODY, entry, signed
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from rich.text import Text

from marin_build import looks
from marin_build.artifact.attempt_log import attempt_log, last_lines
from marin_build.artifact.context import BuildContext, BuildResult
from marin_build.artifact.record import parse_record
from marin_build.artifact.store import ATTEMPT, RECORD
from marin_build.artifact.verify import Problem, Report
from marin_build.errors import RequestError
from marin_build.foreign import MAX_LINE, one_line, printable, visible
from marin_build.recipe.target import parse_target

TARGET = parse_target(RAW)
EVIL = (
    "\x1b[2J\x1b]0;title\x07\x1b]8;;http://evil\x1b\\click\x9b31m\r\x08\x7f\u202eabc\u2066\u200b\u2028\ud800"
    "[red]x[/red][link=http://evil]y[/link] :smile: <script>alert(1)</script> [/] [bold"
)


def is_harmless(text: str) -> bool:
    return all(line.replace("\t", "").isprintable() for line in text.split("\n"))


@given(st.text())
def test_visible_text_holds_nothing_but_visible_characters_and_keeps_these(text: str):
    shown = visible(text)
    assert is_harmless(shown)
    assert text.isprintable() <= (shown == text)
    assert visible(shown) == shown


@example("\\[")
@example("\\\\")
@example("\\\\[a")
@example("\\[b]")
@given(st.one_of(st.text(), st.text("\\[]/ab #")))
def test_foreign_text_stays_within_its_line_and_means_nothing_to_rich(text: str):
    marked = looks.shown(text)
    assert "\n" not in marked
    assert Text.from_markup(f"[bold]{marked}[/] after", emoji=False).plain == f"{one_line(text)} after"


def test_a_line_has_an_end():
    assert len(printable("x" * 10_000_000)) < MAX_LINE + 100
    assert printable("x\n" * 10) == "x\n" * 10


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What `looks` prints on a terminal with colours."""
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=500, highlight=False, emoji=False, color_system=None)
    monkeypatch.setattr(looks, "console", lambda: terminal)
    return out


def check(shown: io.StringIO) -> str:
    """Nothing was obeyed: no escape is left, and markup and HTML stand there as they were written."""
    text = shown.getvalue()
    assert is_harmless(text.replace("\x1b[1m", "").replace("\x1b[0m", "").replace("\x1b[2m", ""))
    assert r"\x1b[2J\x1b]0;title\x07" in text
    assert "[red]x[/red][link=http://evil]y[/link] :smile: <script>alert(1)</script> [/] [bold" in text
    return text


def evil_record() -> bytes:
    build = {"fingerprint": "0" * 32, "recipe": {}, "dependencies": []}
    evil = EVIL.replace("\ud800", "")
    return signed(
        {
            **RAW_BODY,
            "files": [entry(path="[red]x[/red]:smile:<b>")],
            "metrics": {evil: evil, "n": 10**30},
            "provenance": {
                evil: evil,
                "command": [evil],
                "packages": {evil: evil, "": "1", "numpy": evil},
                "code": {"digest": evil, "modules": [evil]},
                "finished": evil,
            },
            "accepted": [{**build, "reason": evil, "user": evil, "time": evil}],
            "damage": [{"path": "[red]x[/red]:smile:<b>", "problem": evil}],
            "written_by": evil,
        }
    )


def test_a_record_is_shown_without_obeying_it(world: World, shown: io.StringIO):
    looks.show_record(parse_record(evil_record(), TARGET, "here"), Path("/x"), None)
    check(shown)


def test_states_and_reasons_are_shown_without_obeying_them(world: World, shown: io.StringIO):
    world.store.replace(TARGET, RECORD, evil_record())
    looks.show_states([world.status(RAW)])
    looks.show_reasons([world.status(RAW)])
    assert is_harmless(shown.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "").replace("\x1b[2m", ""))


def test_the_message_of_a_failed_attempt_is_shown_without_obeying_it(world: World, shown: io.StringIO):
    failure = {"run": None, "exit_code": 2, "message": EVIL}
    body = {**ATTEMPT_BODY, "fingerprint": world.book.fingerprint(TARGET), "failure": failure}
    world.store.replace(TARGET, ATTEMPT, signed(body))
    looks.show_reasons([world.status(RAW)])
    check(shown)


def test_a_verification_is_shown_without_obeying_names(shown: io.StringIO):
    looks.show_verification(Report(TARGET, True, 1, 1, (Problem("x", EVIL),), (EVIL,)))
    check(shown)


def test_logs_and_errors_of_builders_hold_no_escapes_and_no_secrets(
    world: World, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789hunter22")

    def build(context: BuildContext) -> BuildResult:
        context.logger.info("%s 0123456789hunter22 https://u:hunter22@host/x?sig=hunter22", EVIL)
        raise RequestError(f"{EVIL} https://u:hunter22@host Authorization: Bearer hunter22hunter22")

    with pytest.raises(RequestError):
        world.build(RAW, build)
    logs = "".join(path.read_text() for path in world.path(RAW, "logs").iterdir())
    attempt = world.path(RAW, ".attempt.json").read_text()
    for text in (capfd.readouterr().err, logs, attempt):
        assert "hunter22" not in text
        assert "[hidden]" in text
        assert is_harmless(text)
        assert r"\x1b[2J" in text or r"\\x1b[2J" in text


def test_a_traceback_in_a_log_holds_no_secrets(world: World):
    def build(context: BuildContext) -> BuildResult:
        raise KeyError("https://u:hunter22@host\x1b[2J")

    with pytest.raises(KeyError):
        world.build(RAW, build)
    text = "".join(path.read_text() for path in world.path(RAW, "logs").iterdir())
    assert "Traceback" in text
    assert "hunter22" not in text.replace(Path(__file__).read_text(), "").split("KeyError")[-1]


def test_the_end_of_a_log_is_read_and_no_more_and_no_link_is_followed(tmp_path: Path):
    log = tmp_path / "x.log"
    log.write_text("".join(f"{n}\n" for n in range(100_000)))
    assert last_lines(log, 2) == ["99998", "99999"]
    (tmp_path / "link").symlink_to("/etc/passwd")
    assert last_lines(tmp_path / "link", 2) == last_lines(tmp_path / "none", 2) == last_lines(tmp_path, 2) == []


def test_text_that_cannot_be_encoded_is_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with attempt_log(tmp_path, "a") as log:
        log.logger.log(logging.INFO, "a\udcff\x1b[2J")
    assert r"a\udcff\x1b[2J" in next(tmp_path.rglob("a.log")).read_text()
    assert r"a\udcff\x1b[2J" in capsys.readouterr().err


def test_an_ordinary_build_says_what_it_always_said(world: World, capfd: pytest.CaptureFixture[str]):
    world.build(TOKENIZER, Parts())
    assert f"building {TOKENIZER} in " in capfd.readouterr().err
