"""`marin-build` as a user meets it: a tiny tree of recipes, real builds of raw text and tokenizers, no Snakemake."""

import json
import os
from pathlib import Path

import pytest

from marin_build.artifact import forced
from marin_build.build import BUILDERS, accelerator_present, builder_of
from marin_build.cli import main
from marin_build.errors import Stopped
from marin_build.recipe.target import KINDS, parse_target
from marin_build.settings import Settings
from marin_build.typed import as_target

RAW, TOKENIZER = "raw/notes/2026.01.01", "tokenizers/bytes/2026.01.01"
BYTES_RECIPE = "tokenizer:\n  method: bytes\n  special_tokens: {bos: null, eos: <|end|>, pad: null}\n"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MARIN_PREFIX", raising=False)
    Path("notes.txt").write_text("One line.\n")
    write(RAW, "source: {type: files, paths: [notes.txt], digest: unresolved}\n")
    write(TOKENIZER, BYTES_RECIPE)
    return tmp_path


def attempts(place: Path) -> int:
    """How often work on the tokenizer was begun."""
    return len(list((place / "artifacts" / TOKENIZER / "logs").iterdir()))


def write(target: str, text: str) -> Path:
    path = Path(f"config/{target}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_every_kind_has_a_builder():
    assert set(BUILDERS) == set(KINDS)
    assert callable(builder_of("raw"))


def test_build_then_show_why_status_and_verify(place, capsys):
    assert main(["build", TOKENIZER]) == 0
    assert main(["show", TOKENIZER, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["kind"] == "tokenizers"
    assert len(record["fingerprint"]) == len(record["digest"]) == 32
    assert main(["show", f"./artifacts/{TOKENIZER}/"]) == 0
    assert record["digest"] in capsys.readouterr().out
    assert main(["why", TOKENIZER]) == 0
    assert "finished: nothing to do" in capsys.readouterr().out
    assert main(["status", "--json"]) == 0
    states = {line["target"]: line["state"] for line in json.loads(capsys.readouterr().out)}
    assert states == {RAW: "missing", TOKENIZER: "finished"}
    assert main(["verify", "--full", TOKENIZER]) == 0
    assert "all is well" in capsys.readouterr().out


def test_verify_names_a_flipped_byte_and_the_state_becomes_damaged(place, capsys):
    main(["build", TOKENIZER])
    path = place / "artifacts" / TOKENIZER / "tokenizer.json"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    assert main(["verify", "--quick", TOKENIZER]) == 0
    assert main(["verify", "--full", TOKENIZER]) == 4
    assert "tokenizer.json" in capsys.readouterr().out
    main(["status", TOKENIZER, "--json"])
    assert json.loads(capsys.readouterr().out)[0]["state"] == "damaged"
    assert main(["build", TOKENIZER]) == 0
    assert main(["verify", "--full", TOKENIZER]) == 0


def test_verify_is_quick_unless_asked_for_more(place):
    main(["build", TOKENIZER])
    path = place / "artifacts" / TOKENIZER / "tokenizer.json"
    path.write_bytes(path.read_bytes()[::-1])
    assert main(["verify", TOKENIZER]) == 0
    assert main(["verify", "--full", TOKENIZER]) == 4


def test_an_attempt_with_any_flipped_bit_is_known_or_of_unknown_origin_and_never_a_crash(place, capsys):
    write(RAW, "source: {type: files, paths: [notes.txt], digest: abababababababababababababababab}\n")
    assert main(["build", RAW]) == 2
    path = place / "artifacts" / RAW / ".attempt.json"
    (path.parent / "notes.txt").write_text("begun")
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert main(["status", RAW]) == 0
    capsys.readouterr()


@pytest.mark.row(22)
def test_drift_is_refused_with_the_field_then_accepted_with_a_reason(place, capsys):
    main(["build", TOKENIZER])
    write(TOKENIZER, BYTES_RECIPE.replace("<|end|>", "<|eos|>"))
    assert main(["build", TOKENIZER]) == 3
    text = capsys.readouterr().err
    assert "<|end|>" in text
    assert "<|eos|>" in text
    assert "marin-build bump" in text
    assert main(["accept", TOKENIZER, "--reason", "only the name changed"]) == 0
    assert main(["build", TOKENIZER]) == 0
    capsys.readouterr()
    main(["show", TOKENIZER])
    assert "only the name changed" in capsys.readouterr().out


def test_an_unpinned_source_is_refused_until_it_is_pinned(place, capsys):
    assert main(["build", RAW]) == 2
    assert f"marin-build pin {RAW}" in capsys.readouterr().err
    assert main(["pin", RAW]) == 0
    assert main(["build", RAW]) == 0
    assert (place / "artifacts" / RAW / "notes.txt").read_text() == "One line.\n"


def test_force_builds_once_more(place, capsys):
    main(["build", TOKENIZER])
    before = json.loads((place / "artifacts" / TOKENIZER / ".artifact.json").read_text())
    assert main(["build", TOKENIZER]) == 0
    assert main(["build", "--force", TOKENIZER]) == 0
    after = json.loads((place / "artifacts" / TOKENIZER / ".artifact.json").read_text())
    assert after["provenance"]["attempt"] != before["provenance"]["attempt"]
    assert after["digest"] == before["digest"]


def test_an_artifact_whose_recipe_is_gone_can_be_shown(place, capsys):
    main(["build", TOKENIZER])
    Path(f"config/{TOKENIZER}.yaml").unlink()
    assert main(["show", TOKENIZER]) == 0
    assert "its recipe is gone" in capsys.readouterr().out


def test_new_and_bump_write_recipes_that_load(place, capsys):
    assert main(["new", "checkpoints/mine/2026.01.02", "--model", "nano"]) == 0
    assert main(["bump", TOKENIZER, "--version", "2026.01.03"]) == 0
    assert Path("config/tokenizers/bytes/2026.01.03.yaml").read_text() == BYTES_RECIPE
    assert main(["bump", TOKENIZER, "--version", "2026.01.03"]) == 2
    assert "2026.01.03" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["build", "tokenizers/byte/2026.01.01"], "did you mean tokenizers/bytes/2026.01.01?"),
        (["show", RAW], "not finished"),
        (["show", "tokenizers/byte/2026.01.01"], "did you mean tokenizers/bytes/2026.01.01?"),
        (["build", RAW, "--config", "procesess=1"], "did you mean 'processes'?"),
        (["build", RAW, "--config", "processes=many"], "processes"),
        (["build", RAW, "--config", "processes"], "key=value"),
        (["build", RAW, "--config", "mesh={"], "YAML"),
        (["verify", "nonsense"], "not a target"),
        (["verify", "tokenizers/byte/2026.01.01"], "did you mean tokenizers/bytes/2026.01.01?"),
        (
            ["status", RAW, "--prefix", "a\udcff"],
            "setting prefix: holds a control character or bytes that are no UTF-8",
        ),
        (["status", RAW, "--recipes", "a\udcff"], "setting recipes: holds a control character"),
        (["status", RAW, "--prefix", "a\nb"], "setting prefix: holds a control character"),
        (["new", "checkpoints/mine/2026.02.30"], "not a real date"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(place, capsys, arguments, said):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("marin-build: ")
    assert "Traceback" not in error


def test_a_broken_settings_file_is_named(place, capsys):
    Path("config/config.yaml").write_text("prefix: [")
    assert main(["status"]) == 2
    assert "config/config.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    "typed",
    ["raw/a/dev", "./raw/a/dev", "raw/a/dev/", "out/raw/a/dev", "out/raw/a/dev/.artifact.json",
     "recipes/raw/a/dev.yaml",
     ".marin/records/raw/a/dev.json", f"{os.getcwd()}/out/raw/a/dev/"],
)  # fmt: skip
def test_every_spelling_leads_to_the_target(typed):
    assert as_target(typed, Settings(prefix="out", recipes="recipes")) == "raw/a/dev"


def test_an_accelerator_is_seen_by_its_device_file(tmp_path):
    assert not accelerator_present(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert accelerator_present(tmp_path)


def test_a_link_to_nothing_in_place_of_a_recipe_is_named(place, capsys):
    path = place / "config/tokenizers/a/2027.01.01.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("nowhere.yaml")
    assert main(["why", "tokenizers/a/2027.01.01"]) == 2
    assert "2027.01.01.yaml: is a link to nowhere.yaml, which does not exist" in capsys.readouterr().err


def test_the_note_of_another_run_forces_nothing(place):
    """A Snakemake run that forced it has died; somebody builds it by hand, or another run does."""
    target = parse_target(TOKENIZER)
    assert main(["build", TOKENIZER]) == 0
    first = attempts(place)
    forced.write(target, "dead")
    assert main(["build", TOKENIZER]) == 0
    assert main(["build", TOKENIZER, "--run", "other"]) == 0
    assert attempts(place) == first
    assert main(["build", TOKENIZER, "--run", "dead"]) == 0
    assert attempts(place) == first + 1


def test_an_interrupted_rebuild_is_told_with_what_finishes_it(place, capsys, monkeypatch):
    assert main(["build", TOKENIZER]) == 0

    def stopped(context):
        (context.folder / "part").write_text("half")
        raise Stopped("pre-empted")

    with monkeypatch.context() as patch:
        patch.setattr("marin_build.build.builder_of", lambda kind: stopped)
        assert main(["build", TOKENIZER, "--force"]) == 6
    capsys.readouterr()
    assert main(["status", TOKENIZER]) == 0
    said = capsys.readouterr().out
    assert "a rebuild was interrupted and the old artifact is kept" in said
    assert f"  snakemake {TOKENIZER}" in said
    assert main(["why", TOKENIZER]) == 0
    said = capsys.readouterr().out
    assert "the old one is kept; the interrupted rebuild goes on when this target is asked for" in said
    assert f"to finish it: snakemake {TOKENIZER}; to keep the old one: remove " in said
