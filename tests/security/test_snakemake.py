"""Nothing that is typed or set runs in a shell: real Snakemake, and a file that any command in the input would make."""

from __future__ import annotations

import itertools
import os

import pytest

RAW = "raw/play/2026.01.01"
BYTES = "tokenizers/bytes/2026.01.01"
SNEAKY = "a b;touch ran;$(touch ran)`touch ran`\"'{x}{input}|&touch ran#"
"""A folder name with everything that means something to a shell or to Snakemake's own formatting."""


def ran(repository) -> bool:
    return any(name == "ran" for _, folders, files in os.walk(repository.folder.parent) for name in [*folders, *files])


TYPED = [
    "$(touch ran)",
    f"{BYTES};touch ran",
    f"{BYTES}\ntouch ran",
    f"{BYTES}\n",
    f"'{BYTES}'",
    f".marin/records/{BYTES}.json\n",
    f".marin/records/{BYTES};touch ran.json",
    ".marin/records/../../../../etc/passwd.json",
    ".marin/records/tokenizers/$(touch ran)/dev.json",
    "../../etc/passwd",
    "/etc/passwd",
    "raw/../../../etc/dev",
    "tokenizers//../../x/dev",
    "tokenizers/\x1b[31mx/dev",
    "tokenizers/\u202ex/dev",
    "t\u043ekenizers/bytes/2026.01.01",
    "tokenizers/x\udcff/dev",
    "tokenizers/" + "x" * 4000 + "/dev",
    "x/" * 2000 + "dev",
    "[red]x[/red]/a/dev",
    "{target}",
    "{wildcards.target}",
]


OPTIONS = itertools.cycle(["", "-f", "-R", "--until", "--omit-from"])


@pytest.mark.parametrize(
    ("option", "typed"), list(zip(OPTIONS, TYPED, strict=False)), ids=lambda text: ascii(text[:30])
)
def test_what_is_typed_is_an_artifact_or_one_line_and_leaves_no_trace(repository, snakemake, option, typed):
    before = {path for path in repository.folder.rglob("*") if ".snakemake" not in path.parts}
    words = [option, typed] if option else [typed]
    found = snakemake("-c1", BYTES if option in ("--until", "--omit-from") else "--nocolor", *words)
    assert found.code == 1
    assert "is not a target" in found.err or "does not exist" in found.err, found.err
    assert all(line.isprintable() for line in found.err.split("\n"))
    assert len(found.err) < 10_000
    assert "Traceback" not in found.text
    assert {path for path in repository.folder.rglob("*") if ".snakemake" not in path.parts} == before
    assert not ran(repository)


def test_no_folder_and_no_setting_runs_in_the_shell_of_a_rule(repository):
    (repository.folder / SNEAKY).symlink_to("config")
    found = repository.snakemake(
        *(BYTES, "-c1", "-p", "--config", f"prefix={SNEAKY}x", f"recipes={SNEAKY}", f"platform={SNEAKY}"),
        HF_TOKEN="a-token-of-somebody",
    )
    assert found.code == 0, found.text
    assert (repository.folder / f"{SNEAKY}x" / BYTES / ".artifact.json").is_file()
    assert not ran(repository)


def test_no_prefix_runs_in_the_shell_that_starts_a_job_elsewhere(repository):
    pytest.importorskip("snakemake_executor_plugin_cluster_generic", reason="needs the tpu extra")
    words = [
        "--executor",
        "cluster-generic",
        "--jobs",
        "1",
        "--cluster-generic-submit-cmd",
        "sh",
        "--latency-wait",
        "1",
    ]
    found = repository.snakemake(BYTES, *words, MARIN_PREFIX="it's $(touch ran)")
    assert not ran(repository)
    assert found.code == 1
    assert "setting prefix: holds quotes beside what a shell would run" in found.text
    assert not (repository.folder / "artifacts").exists()


def test_a_bomb_in_the_settings_file_ends_in_one_line(repository, snakemake):
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n"
    for old, new in zip("abcdefghi", "bcdefghij", strict=True):
        bomb += f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n"
    (repository.folder / "config/config.yaml").write_text(bomb + "prefix: *j\n")
    found = snakemake("-n", BYTES)
    assert found.code == 1
    assert "unknown setting 'a'" in found.text
    assert len(found.text) < 3000


def test_credentials_on_the_command_line_reach_no_log(repository):
    found = repository.snakemake("-c1", "s3://key:hunter22@bucket/x")
    assert found.code == 1
    logs = "".join(path.read_text() for path in repository.folder.glob(".snakemake/log/*"))
    assert "s3://[hidden]@bucket/x" in found.text
    assert "s3://[hidden]@bucket/x" in logs
    assert "hunter22" not in found.text + logs
