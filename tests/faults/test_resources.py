"""Too little memory, too few file descriptors, too many shards, names that are long or foreign."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import builders
import pytest
from artifact_world import RAW, Parts, World, in_child
from builders import Workbench
from repository import BYTES, Repository

from marin_build.artifact.examine import State
from marin_build.data.shards import TokenizedSet
from marin_build.errors import MarinError, RequestError

STARVED = '''
"""Makes a token set with two processes, in memory that is enough for a small document and not for a large one."""
import resource, sys
from pathlib import Path

from builders import Workbench
import numpy, pyarrow, tokenizers
from marin_build.data import tokenize
from marin_build.errors import MarinError

tokenize.BYTES_WORTH_A_PROCESS = 1

if __name__ == "__main__":
    bench = Workbench(Path(sys.argv[1]))
    raw = bench.finished("raw/bench/dev", bench.folder / "raw/bench/dev")
    tokens = bench.finished("tokenizers/bytes/dev", bench.folder / "tokenizers/bytes/dev")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (int(sys.argv[2]) << 20),) * 2)
    try:
        bench.tokenize(raw, tokens, processes=2)
    except MarinError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
'''


@pytest.mark.row(19)
def test_a_worker_out_of_memory_says_so_with_what_helps_and_keeps_what_is_finished(
    workbench: Workbench, tmp_path: Path
):
    """The limit is one on addresses, so the allocation fails for real."""
    large = b'{"text": "%s"}\n' % (b"word " * 6_000_000)
    workbench.raw({"a.jsonl": b'{"text": "small"}\n' * 500, "b.jsonl": large})
    tokens = workbench.bytes_tokenizer()
    driver = tmp_path / "starved.py"
    driver.write_text(STARVED)
    environment = {**os.environ, "PYTHONPATH": f"{Path(builders.__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}
    for megabytes in (100, 50, 25):  # what a process needs depends on the machine
        command = [sys.executable, str(driver), str(workbench.folder), str(megabytes)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode:
            break
    assert done.returncode == 1, done.stderr
    assert "out of memory" in done.stderr
    assert "less memory: fewer processes (--config processes=N)" in done.stderr
    assert "run the same command again: finished shards are kept" in done.stderr
    assert "Traceback" not in done.stderr
    (workbench.folder / "raw/bench/dev/b.jsonl").write_bytes(b'{"text": "smaller"}\n')
    raw = workbench.finished(workbench.RAW, workbench.folder / workbench.RAW)
    _, result = workbench.tokenize(raw, tokens)
    assert (result.details["shards_made"], result.details["shards_kept"]) == (1, 1)


@pytest.mark.row(19)
def test_a_builder_out_of_memory_is_one_line_and_its_work_resumes(world: World):
    def build(context):
        Parts(2)(context)
        raise MemoryError

    with pytest.raises(MarinError, match=r"^out of memory while .* was made\n  .*run the same command again") as caught:
        world.build(RAW, build, run="r1")
    assert caught.value.exit_code == 1
    builder = Parts()
    assert world.build(RAW, builder, run="r1").built
    assert builder.made == ["part-2"]


# ---- file descriptors and shards -------------------------------------------------------------------------------------


def with_descriptors(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


@pytest.mark.row(32)
def test_a_build_of_many_shards_needs_few_descriptors(workbench: Workbench):
    """300 shards are made, and read back all at once, by a process that may open 64 files."""
    tokens = workbench.bytes_tokenizer()
    raw = workbench.raw({"a.jsonl": b'{"text": "one line"}\n' * 3000})

    def work() -> None:
        with_descriptors(64)
        folder, result = workbench.tokenize(raw, tokens, shard_bytes=210)
        assert result.metrics["shards"] == 300
        opened = TokenizedSet.open(folder)
        assert len(opened.shards) == 300

    assert in_child(work) == 0


@pytest.mark.row(32)
def test_snakemake_and_its_jobs_run_with_64_descriptors(repository: Repository):
    found = repository.command("sh", "-c", f'ulimit -n 64; exec "{sys.executable}" -m snakemake {BYTES}')
    assert found.code == 0, found.text
    assert repository.record(BYTES) is not None


@pytest.mark.soak
@pytest.mark.row(32)
def test_ten_thousand_shards_are_made_read_and_verified(workbench: Workbench):
    tokens = workbench.bytes_tokenizer()
    raw = workbench.raw({"a.jsonl": b'{"text": "one line"}\n' * 20_000})

    def work() -> None:
        with_descriptors(64)
        folder, result = workbench.tokenize(raw, tokens, shard_bytes=42)
        assert result.metrics["shards"] == 10_000
        assert len(TokenizedSet.open(folder).shards) == 10_000
        assert workbench.tokenize(raw, tokens, shard_bytes=42)[1].details["shards_kept"] == 10_000

    assert in_child(work) == 0


# ---- names -----------------------------------------------------------------------------------------------------------


def below(world: World, path: str) -> World:
    """The same recipes, and artifacts in a folder of that relative path."""
    return replace(world, prefix=str(world.folder / path))


def long_path(characters: int) -> str:
    """A relative path of so many characters, each part of which is allowed."""
    return "/".join("p" * min(200, characters - at) for at in range(0, characters, 201))


@pytest.mark.row(32)
def test_a_prefix_of_3500_bytes_works(world: World):
    deep = below(world, long_path(3500 - len(str(world.folder))))
    assert deep.build(RAW).built
    assert deep.verify(RAW).ok
    assert deep.status(RAW).state is State.finished
    assert not deep.build(RAW).built


@pytest.mark.row(32)
@pytest.mark.parametrize("characters", [4000, 8000])
def test_a_prefix_of_4000_bytes_is_one_clear_line_at_the_plan(world: World, characters: int):
    with pytest.raises(
        RequestError, match=r"^the prefix is a path of [48],\d+ bytes; at most 3,584 leave room for names$"
    ):
        below(world, long_path(characters)).status(RAW)


@pytest.mark.row(32)
@pytest.mark.parametrize("name", ["Ωμέγα ü 模型 🧪", "a b  c", "$(touch x)`'\"{wildcards}", "-n"])
def test_a_prefix_of_any_printable_name_works(world: World, name: str):
    named = below(world, name)
    assert named.build(RAW).built
    assert named.verify(RAW).ok
    assert (world.folder / name / RAW / ".artifact.json").exists()


@pytest.mark.row(32)
def test_long_and_foreign_names_of_source_files_are_kept(workbench: Workbench):
    names = ["ü" * 100 + ".jsonl", "模型/🧪 x.jsonl", "a" * 200 + "/" + "b" * 200 + ".jsonl"]
    raw = workbench.raw({name: b'{"text": "one"}\n' for name in names})
    folder, result = workbench.tokenize(raw, workbench.bytes_tokenizer())
    assert result.metrics["shards"] == 3
    assert {shard["source"]["file"] for shard in TokenizedSet.open(folder).ledger["shards"]} == set(names)
