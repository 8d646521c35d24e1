"""The adapter never runs against a Snakemake that it does not know, and its errors print as one line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from snakemake.exceptions import format_exception_to_string

from marin_build.adapter import AdapterError, Build, record
from marin_build.recipe.target import Target


def known_workflow(**changed):
    def _prepare_dag(forceall, ignore_incomplete, lock_warn_only, nolock=False, shadow_prefix=None):
        raise AssertionError("never called here")

    parts = {
        "_prepare_dag": _prepare_dag,
        "is_main_process": True,
        "config_settings": SimpleNamespace(config={}),
        "resource_settings": SimpleNamespace(cores=2),
        "_onstart": lambda log: None,
        "_onerror": lambda log: None,
    }
    return SimpleNamespace(**{key: value for key, value in (parts | changed).items() if value is not None})


def test_a_known_workflow_is_hooked():
    workflow = known_workflow()
    inner = workflow._prepare_dag
    Build(workflow, {})
    assert workflow._prepare_dag is not inner


def test_a_spawned_job_is_left_alone():
    workflow = known_workflow(is_main_process=False)
    inner = workflow._prepare_dag
    Build(workflow, {})
    assert workflow._prepare_dag is inner


@pytest.mark.parametrize("gone", ["_prepare_dag", "is_main_process", "config_settings", "_onerror"])
def test_an_unknown_snakemake_is_refused_before_it_can_run(gone):
    with pytest.raises(AdapterError, match=r"^unsupported Snakemake version 9\.\S+: marin_build needs >=9\.19,<10$"):
        Build(known_workflow(**{gone: None}), {})


def test_a_hook_with_other_arguments_is_refused():
    with pytest.raises(AdapterError, match="unsupported Snakemake version"):
        Build(known_workflow(_prepare_dag=lambda forceall: None), {})


def test_an_error_prints_without_a_place_even_when_a_snakefile_raised_it():
    with pytest.raises(AdapterError) as raised:
        exec(compile("raise AdapterError('no')", "Snakefile", "exec"), {"AdapterError": AdapterError})
    assert format_exception_to_string(raised.value, {"Snakefile": {1: 1}}) == "Error: no"


def test_the_files_of_rules_follow_the_targets():
    assert record("{target}") == ".marin/records/{target}.json"
    assert record(Target("raw/a", "dev")) == ".marin/records/raw/a/dev.json"
