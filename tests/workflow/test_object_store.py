"""The whole chain on object stores, through Snakemake: raw text → tokenizer → tokens → checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from object_servers import BUCKET, gcs_server, missing_packages, s3_server
from repository import BYTES, HELD_OUT, MODEL, RAW, TOKENS, Repository

from marin_build.artifact.record import read_record
from marin_build.artifact.store import open_store
from marin_build.recipe.target import parse_target

ALL = (RAW, BYTES, TOKENS, HELD_OUT, MODEL)

pytestmark = pytest.mark.skipif(bool(missing_packages()), reason=f"needs {missing_packages()}")


@pytest.fixture(scope="module")
def on_disk(new_repository: Callable[[Path], Repository], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The digests that a local run comes to."""
    repository = new_repository(tmp_path_factory.mktemp("disk") / "repository")
    done = repository.snakemake(MODEL, "--cores", "2")
    assert done.code == 0, done.text
    return {target: repository.record(target).digest for target in ALL}


@pytest.fixture(params=["gs", "s3"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, dict[str, str]]]:
    with (gcs_server if request.param == "gs" else s3_server)() as environment:
        yield f"{request.param}://{BUCKET}/some/folder", environment


def test_the_whole_chain_comes_to_the_digests_of_a_local_disk(
    repository: Repository, server: tuple[str, dict[str, str]], on_disk: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    prefix, variables = server
    cache = str(repository.folder / "cache")
    options = ("--cores", "2", "--config", f"object_cache={cache}")
    if prefix.startswith("gs"):
        variables = {**variables, "MARIN_PREFIX": prefix}
    else:
        options = (*options, f"prefix={prefix}", "tokenize_parts=2")
    done = repository.snakemake(f"{prefix}/{MODEL}", *options, **variables)
    assert done.code == 0, done.text
    assert not (repository.folder / "artifacts").exists()

    again = repository.snakemake(MODEL, *options, **variables)
    assert again.is_idle, again.text
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    store = open_store(prefix, cache)
    assert {target: read_record(store, parse_target(target)).digest for target in ALL} == on_disk

    look = ("--prefix", prefix, "--config", f"object_cache={cache}")
    report = repository.command("marin-build", "verify", "--full", *ALL, *look, **variables)
    assert report.code == 0, report.text
    assert report.out.count("all is well") == len(ALL)
    shown = repository.command("marin-build", "show", MODEL, *look, **variables)
    assert f"{prefix}/{MODEL}/builds/" in shown.out
    states = repository.command("marin-build", "status", MODEL, *look, **variables)
    assert states.out.count("finished") >= len(ALL)
