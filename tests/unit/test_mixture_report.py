"""`marin-build mixture`: what a run draws from each set, stage by stage, before or after anything is built."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from marin_build.artifact.record import Record
from marin_build.artifact.store import RECORD, open_store
from marin_build.cli import main
from marin_build.recipe.target import parse_target

TINY = "checkpoints/tiny/2026.06.28"
TRAIN, NOTES = "tokenized/bpe/train/2026.06.28", "tokenized/bpe/notes/2026.06.28"
BUDGET = "token_budget: {tokens: 100000, seed: 7}"
STAGES = """  mixture_block: 16
  stages:
    - from_step: 80
      weights: {train: 1, more/notes: 1}
"""


@pytest.fixture
def place(recipe_tree, tmp_path, monkeypatch):
    """The tiny training: 100 steps of 8 sequences of 64 tokens, 15 and 1 of every 16."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARIN_PREFIX", str(tmp_path / "artifacts"))
    return recipe_tree


def finish(text: str, tokens: object) -> None:
    """Write the record of a token set, as if it were built."""
    target = parse_target(text)
    record = Record(
        target.name, target.version, "tokenized", "0" * 32, "0" * 32, {}, (), (), metrics={"tokens": tokens}
    )
    Path("artifacts", text).mkdir(parents=True)
    open_store("artifacts").replace(target, RECORD, record.to_bytes())


def report(capsys, expected: int = 0) -> dict:
    capsys.readouterr()
    assert main(["mixture", TINY, "--json"]) == expected
    return json.loads(capsys.readouterr().out)


def table(capsys, expected: int = 0) -> list[list[str]]:
    capsys.readouterr()
    assert main(["mixture", TINY]) == expected
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_with_nothing_built_it_says_what_is_drawn_and_of_what_the_recipes_promise(place, capsys):
    place.edit(NOTES, BUDGET, "token_budget: {tokens: 1000, seed: 0}")
    found = report(capsys)
    assert found["feasible"] is True
    assert found["tokens"] == 800 * 64
    notes, train = found["components"]
    assert (notes["name"], notes["sequences"], notes["available_tokens"]) == ("more/notes", 50, 1000)
    assert (notes["available_from"], train["available_from"]) == ("token_budget", "not built")
    assert notes["epochs"] == 50 / 15
    assert train["epochs"] is train["available_tokens"] is None
    (stage,) = found["stages"]
    assert [part["sequences_a_block"] for part in stage["components"]] == [1, 15]
    assert stage["components"][1]["share"] == pytest.approx(3 / 3.25)


def test_stages_are_told_apart_and_summed(place, capsys):
    place.edit(TINY, "  mixture_block: 16\n", STAGES)
    found = report(capsys)
    assert [(stage["from_step"], stage["to_step"]) for stage in found["stages"]] == [(0, 80), (80, 100)]
    notes = [stage["components"][0]["sequences"] for stage in found["stages"]]
    assert notes == [40, 80]
    assert found["components"][0]["sequences"] == 120


def test_a_finished_set_counts_as_its_record_says(place, capsys):
    finish(NOTES, 64 * 25 + 1)
    finish(TRAIN, 64 * 1000 + 1)
    notes, train = report(capsys)["components"]
    assert (notes["epochs"], train["epochs"]) == (2.0, 0.75)
    assert notes["available_from"] == train["available_from"] == "finished"
    rows = table(capsys)
    assert ["more/notes", NOTES, "3,200", "1,601", "2", "ok"] in rows
    assert ["0", "to", "100", "more/notes", "0.25", "7.6923%", "1", "(6.2500%)", "50", "3,200"] in rows


def test_a_limit_that_cannot_be_kept_is_exit_code_2_with_what_helps(place, capsys):
    place.edit(TINY, "weight: 0.25", "weight: 0.25, max_epochs: 1.5")
    finish(NOTES, 64 * 25 + 1)
    (problem,) = report(capsys, expected=2)["problems"]
    first, second, third = problem.splitlines()
    assert first == "data.train.more/notes.max_epochs: the run reads 2 epochs of it, more than the limit of 1.5"
    assert second.startswith(
        "  it draws 50 sequences (3,200 tokens) of tokenized/bpe/notes/2026.06.28, which has 25 (1,"
    )
    assert "a set of 2,177 tokens or more, 0.75 times its share" in third
    assert ["more/notes", NOTES, "3,200", "1,601", "2", "1.5", "not", "possible"] in table(capsys, expected=2)


def test_a_limit_that_a_token_budget_cannot_keep_is_known_before_anything_is_built(place, capsys):
    place.edit(TINY, "weight: 0.25", "weight: 0.25, max_epochs: 1.5")
    place.edit(NOTES, BUDGET, "token_budget: {tokens: 1601, seed: 0}")
    assert report(capsys, expected=2)["feasible"] is False


def test_a_set_that_fills_no_sequence_is_a_problem(place, capsys):
    finish(NOTES, 64)
    (problem,) = report(capsys, expected=2)["problems"]
    assert problem.startswith("data.sequence_length: 64 is longer than the data of 'more/notes', which has 64 tokens")


@pytest.mark.parametrize("tokens", ["many", -1, 10**30, 1.5])
def test_a_record_that_names_no_number_of_tokens_is_not_believed(place, capsys, tokens):
    finish(TRAIN, tokens)
    assert report(capsys)["components"][1]["available_from"] == "not built"


@pytest.mark.parametrize("verb", ["mixture", "why"])
@pytest.mark.parametrize(
    ("edits", "said"),
    [
        (
            {"_block: 16\n": "_block: 4\n"},
            "7: data.mixture_block: a block of 4 has no sequence for",
        ),
        ({"  mixture_block: 16\n": STAGES.replace("80", "81")}, "9: data.stages[0].from_step: step 81 begins no block"),
        (
            {"batch_size: 8": "batch_size: 1", "steps: 100": "steps: 10"},
            "3: data.train: 'more/notes' has a weight above 0 and would get nothing: 10 sequences are less than",
        ),
    ],
)
def test_a_mixture_that_cannot_be_is_an_error_of_the_recipe(place, capsys, verb, edits, said):
    for old, new in edits.items():
        place.edit(TINY, old, new)
    assert main([verb, TINY]) == 2
    assert f"{TINY}.yaml:{said}" in capsys.readouterr().err


def test_what_is_no_training_has_no_mixture(place, capsys):
    assert main(["mixture", NOTES]) == 2
    assert "has no mixture: it is of kind tokenized, needs one of kind checkpoints" in capsys.readouterr().err
