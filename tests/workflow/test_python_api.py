"""Snakemake's own Python interface sees the same targets."""

from __future__ import annotations

import pytest

TOKENS = "tokenized/play/2026.01.01"


def test_the_api_plans_and_finds_nothing_to_do(repository, monkeypatch):
    from snakemake.api import SnakemakeApi
    from snakemake.exceptions import CliException
    from snakemake.settings.enums import Quietness
    from snakemake.settings.types import DAGSettings, OutputSettings, ResourceSettings

    monkeypatch.chdir(repository.folder)
    monkeypatch.delenv("MARIN_PREFIX", raising=False)

    def updated(*targets):
        files: list[str] = []
        with SnakemakeApi(OutputSettings(quiet={Quietness.ALL})) as api:
            workflow = api.workflow(ResourceSettings(cores=1), snakefile=repository.folder / "Snakefile")
            dag = workflow.dag(DAGSettings(targets=frozenset(targets)))
            dag.execute_workflow(executor="dryrun", updated_files=files)
        return files

    assert f".marin/records/{TOKENS}.json" in updated(TOKENS)
    repository.finish_all()
    assert updated(f"./{TOKENS}/") == []
    with pytest.raises(CliException, match="did you mean"):
        updated("tokenized/play/2026.01.02")
