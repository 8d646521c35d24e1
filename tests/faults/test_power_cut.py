"""A power cut at any moment of a build: what was not synced is lost, and still there is the old artifact or the new.

That a file and the folder that names it are synced before the record is what these tests prove: they fail when either
sync is left out. Names of which the folder was not synced may survive or not, so each moment is tried in both ways.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from typing import Any

import pytest
from artifact_world import RAW, TOKENIZER, TOKENS, World
from power import PowerMeter

from marin_build.artifact import lease
from marin_build.artifact.examine import State
from marin_build.build import builder_of

pytestmark = pytest.mark.row(34)


@pytest.fixture
def world(memory_world: World) -> World:
    return memory_world


def parts(salt: str) -> Callable[[Any], Any]:
    """A builder that syncs nothing: that is the commit's work. Two files at the top, one in a folder."""

    def build(context: Any) -> Any:
        from marin_build.artifact.context import BuildResult

        (context.folder / "inside").mkdir(exist_ok=True)
        for name in ("a", "b", "inside/c"):
            (context.folder / name).write_text(f"{name} {salt}\n" * 20)
        return BuildResult()

    return build


def cut_everywhere(world: World, work: Callable[[], Any], check: Callable[[], None]) -> int:
    """Do `work` once; then, for each moment of it, put the disk back as a cut would leave it, and check."""
    artifacts = world.folder / "artifacts"
    artifacts.mkdir(exist_ok=True)
    meter = PowerMeter(artifacts)
    gone = dataclasses.replace(lease.this_process(), pid=2**22 + 1)
    with meter.watching(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(lease, "this_process", lambda run: gone)  # after the cut no process of before is alive
        work()
    for moment in meter.moments:
        for keep_names in (False, True):
            moment.restore(artifacts, keep_names=keep_names)
            shutil.rmtree(world.folder / ".marin", ignore_errors=True)
            check()
    return len(meter.moments)


@pytest.mark.parametrize("rebuild", [False, True], ids=["first build", "rebuild"])
def test_after_a_power_cut_there_is_the_old_artifact_or_the_new_and_a_rerun_converges(world: World, rebuild: bool):
    old = world.build(RAW, parts("old")).record.digest if rebuild else None
    force = "r1" if rebuild else None
    new = ""
    seen = set()

    def work() -> None:
        nonlocal new
        new = world.build(RAW, parts("new"), force=force).record.digest

    def check() -> None:
        record = world.record(RAW)
        seen.add(record and record.digest)
        assert record is None or (record.digest in (old, new) and world.verify(RAW).problems == ())
        outcome = world.build(RAW, parts("new"), force=None if record is None else "r2")
        assert outcome.record.digest == new
        assert world.verify(RAW).ok
        assert world.status(RAW).state is State.finished

    assert cut_everywhere(world, work, check) > 15
    assert seen >= {old, new}


def test_after_a_power_cut_tokenizing_resumes_with_whole_shards_only(world: World):
    """Shards and sidecars are synced one by one: what a cut leaves of them is used, and never believed half."""
    builder = builder_of("tokenized")
    world.edit(TOKENS, "type: text, document: file", "type: text, document: line")
    world.edit(TOKENS, "shard_bytes: 1000", "shard_bytes: 90")
    world.build(RAW)
    world.build(TOKENIZER, builder_of("tokenizers"))
    digest, kept = "", set()

    def work() -> None:
        nonlocal digest
        digest = world.build(TOKENS, builder, processes=1).record.digest

    def check() -> None:
        record = world.record(TOKENS)
        assert record is None or (record.digest == digest and world.verify(TOKENS).problems == ())
        outcome = world.build(TOKENS, builder, processes=1)
        assert outcome.record.digest == digest
        if outcome.built:
            kept.add(outcome.record.provenance["shards_kept"])

    assert cut_everywhere(world, work, check) > 20
    assert len(kept) > 2
