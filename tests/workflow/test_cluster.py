"""Jobs that another Snakemake process, or no Snakemake at all, starts somewhere else: as clusters do."""

from __future__ import annotations

import os
import shlex
import signal
import sys

import pytest

pytest.importorskip("snakemake_executor_plugin_cluster_generic", reason="needs the tpu extra")

RAW = "raw/play/2026.01.01"
BYTES = "tokenizers/bytes/2026.01.01"
TOKENS = "tokenized/play/2026.01.01"

SUBMIT = """
import json, re, subprocess, sys, os
from pathlib import Path

folder, script = Path(sys.argv[1]), sys.argv[-1]
job = json.loads(re.search(r"^# properties = (.*)$", Path(script).read_text(), re.M).group(1))
target = job["wildcards"]["target"]
done = folder / f"{target.replace('/', '-')}.code"
done.unlink(missing_ok=True)
program = '"$@"; code=$?; echo $code > "$0.part"; mv "$0.part" "$0"'
command = [sys.executable, "-m", "marin_build", "build", target, "--run", os.environ["MARIN_RUN_ID"]]
with open(folder / "log", "a") as log:
    subprocess.Popen(["sh", "-c", program, done, *command], stdout=log, stderr=log, start_new_session=True)
print(done)
"""

STATUS = """
import sys
from pathlib import Path

done = Path(sys.argv[-1])
print("running" if not done.exists() else "success" if done.read_text().strip() == "0" else "failed")
"""


def cluster(repository, submit, *more):
    words = ["--executor", "cluster-generic", "--jobs", "2", "--latency-wait", "5"]
    return [*words, "--cluster-generic-submit-cmd", submit, *more]


def test_a_job_in_a_snakemake_of_its_own_uses_the_same_prefix_and_run(repository):
    words = cluster(repository, "sh", "--seconds-between-status-checks", "1")
    found = repository.snakemake(TOKENS, *words, MARIN_PREFIX="elsewhere")
    assert found.code == 0, found.text
    assert (repository.folder / "elsewhere" / TOKENS / ".artifact.json").exists()
    assert not (repository.folder / "artifacts").exists()
    assert repository.snakemake(TOKENS, MARIN_PREFIX="elsewhere").is_idle


def test_a_final_failure_in_a_snakemake_of_its_own_is_not_tried_again(repository):
    repository.edit(TOKENS, "text_key: text", "text_key: no_such_key")
    found = repository.snakemake(TOKENS, *cluster(repository, "sh", "--seconds-between-status-checks", "1"))
    assert found.code == 1
    assert len(list(repository.artifact(TOKENS).glob("logs/*.log"))) == 1
    assert f"{TOKENS} was not finished; the last lines of" in found.text
    assert "no_such_key" in found.text


def test_a_forced_rebuild_is_forced_where_the_job_runs(repository):
    words = cluster(repository, "sh", "--seconds-between-status-checks", "1")
    assert repository.snakemake(BYTES, *words).code == 0
    first = repository.record(BYTES).provenance["attempt"]
    assert repository.snakemake("-f", BYTES, *words).code == 0
    assert repository.record(BYTES).provenance["attempt"] != first


def test_a_new_snakemake_takes_up_the_job_of_a_dead_one(repository, tmp_path, gate):
    (tmp_path / "submit.py").write_text(SUBMIT)
    (tmp_path / "status.py").write_text(STATUS)
    submit, status = (shlex.join([sys.executable, f"{tmp_path}/{name}.py"]) for name in ("submit", "status"))
    checks = ["--cluster-generic-status-cmd", status, "--seconds-between-status-checks", "1"]
    words = cluster(repository, f"{submit} {tmp_path}", *checks)
    first = repository.start(RAW, *words, **gate.environment(WAIT_IN="raw"))
    gate.wait_for("raw", first)
    os.kill(first.pid, signal.SIGKILL)
    second = repository.start(RAW, *words, **gate.environment())
    said = ""
    while "Resuming incomplete job" not in said:
        line = second.stdout.readline()
        assert line, said  # it ended without taking the job up
        said += line
    gate.open()
    said += second.communicate(timeout=120)[0]
    assert second.returncode == 0, said
    assert len(list(repository.artifact(RAW).glob("logs/*.log"))) == 1
    first.communicate()
