"""The reference recipe: planned and drawn offline as it is, and built for real in small."""

from __future__ import annotations

import json
import shutil

import pytest

SMOKE = "checkpoints/dclm_smoke/2026.06.28"
SETS = 26
OFFLINE = {"HF_HUB_OFFLINE": "1", "HTTPS_PROXY": "http://127.0.0.1:9", "HOME": "/nonexistent"}


@pytest.fixture
def whole(repository, pytestconfig):
    """A repository with all recipes of this one."""
    shutil.rmtree(repository.folder / "config")
    shutil.copytree(pytestconfig.rootpath / "config", repository.folder / "config")
    return repository


@pytest.mark.parametrize("target", ["checkpoints/dclm_1b_1x/2026.06.28", "checkpoints/dclm_7b_1x/2026.06.28"])
def test_the_reference_plans_and_draws_without_network_or_accounts(whole, target):
    plan = whole.snakemake("-n", target, XDG_CACHE_HOME=str(whole.folder / "cache"), **OFFLINE)
    assert plan.code == 0, plan.text
    assert plan.table[target] == "missing"
    assert sum(name.startswith("tokenized/") for name in plan.table) == SETS
    picture = whole.snakemake(target, "--dag", XDG_CACHE_HOME=str(whole.folder / "cache"), **OFFLINE)
    assert picture.out.startswith("digraph")
    assert f"target: {target}" in picture.out


def test_building_the_reference_names_what_is_not_pinned_before_any_work(whole):
    built = whole.snakemake("checkpoints/dclm_1b_1x/2026.06.28")
    assert built.code == 1
    assert "marin-build pin tokenizers/llama3/2026.06.28" in built.text
    assert "Traceback" not in built.text
    assert not (whole.folder / "artifacts").exists()


def test_the_reference_in_small_is_built_by_its_typed_path(whole):
    """26 sets in the formats of the real ones, three of them mixed, one nano model: the whole chain for real."""
    built = whole.snakemake(SMOKE, "--config", "wandb=disabled", **{k: v for k, v in OFFLINE.items() if k != "HOME"})
    assert built.code == 0, built.text[-3000:]
    record = whole.record(SMOKE)
    assert len(record.dependencies) == 1 + 3
    assert len(record.measured) == SETS - 3
    lines = [json.loads(line) for line in (whole.artifact(SMOKE) / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps))
    first, last = (line["eval/loss"] for line in (lines[0], lines[-1]))
    assert first == pytest.approx(5.55, abs=0.1)  # ln 258: an untrained model knows nothing
    assert last < 4.0
    assert {"eval/paloma/macro_bpb", "eval/uncheatable_eval/macro_bpb"} <= record.metrics.keys()
    assert whole.snakemake(SMOKE).is_idle
