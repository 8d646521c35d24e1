"""A full disk and a failing one while a token set is made: one clear line, nothing lost, and the next attempt heals."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import builders
import pytest
from builders import Workbench

DRIVER = '''
"""Makes the token set in the folder named; prints errors for people as the command line does."""
import logging, sys
from pathlib import Path

from builders import Workbench
from marin_build.data import tokenize
from marin_build.errors import MarinError

tokenize.BYTES_WORTH_A_PROCESS = 1

if __name__ == "__main__":
    bench = Workbench(Path(sys.argv[1]))
    raw = bench.finished("raw/bench/dev", bench.folder / "raw/bench/dev")
    tokens = bench.finished("tokenizers/bytes/dev", bench.folder / "tokenizers/bytes/dev")
    try:
        bench.tokenize(raw, tokens, folder=sys.argv[2], shard_bytes=50_000, processes=int(sys.argv[3]))
    except MarinError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
'''


class Place:
    def __init__(self, folder: Path) -> None:
        self.bench = Workbench(folder / "bench")
        dice = random.Random(0)
        lines = [json.dumps({"text": dice.randbytes(dice.randrange(2000)).hex()}) for _ in range(400)]
        self.bench.raw({"a.jsonl": "".join(line + "\n" for line in lines).encode()})
        self.bench.bytes_tokenizer()
        self.driver = folder / "driver.py"
        self.driver.write_text(DRIVER)

    def command(self, folder: str | Path, processes: int = 1) -> list[str]:
        return [sys.executable, str(self.driver), str(self.bench.folder), str(folder), str(processes)]

    def run(self, *command: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": os.path.dirname(builders.__file__)}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)

    def contents(self, folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    made = Place(tmp_path_factory.mktemp("faults"))
    assert made.run(*made.command("undisturbed")).returncode == 0
    return made


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.row(5)
def test_a_full_disk_is_one_line_and_the_next_attempt_goes_on(place, tmp_path, processes):
    disk, saved = tmp_path / "disk", tmp_path / "saved"
    disk.mkdir()
    build = " ".join(place.command(disk / "tokens", processes))
    script = f"""
        set -u
        mount -t tmpfs -o size=4m tmpfs {disk} || exit 99
        head -c 3500000 /dev/zero > {disk}/filler
        {build}; echo "first: $?"
        ls {disk}/tokens | grep -c 'json$'; ls {disk}/tokens | grep -c ledger
        rm {disk}/filler
        {build}; echo "second: $?"
        cp -r {disk}/tokens {saved}
    """
    done = place.run("unshare", "--map-root-user", "--mount", "bash", "-c", script)
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip("this machine lets no small disk be mounted")
    first, kept, ledgers, second = done.stdout.split("\n")[:4]
    assert (first, second) == ("first: 1", "second: 0"), done.stderr
    assert int(kept) > 2
    assert ledgers == "0"
    assert done.stderr.startswith(f"the disk is full: {disk}/tokens/a.jsonl-0")
    assert " bytes needed, " in done.stderr
    assert "Traceback" not in done.stderr
    assert place.contents(saved) == place.contents(place.bench.folder / "undisturbed")


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize(
    ("processes", "file", "fault", "message"),
    [
        (2, "raw/bench/dev/a.jsonl", "read:error=EIO:when=3+", r"a.jsonl cannot be read at byte"),
        (1, "out/a.jsonl-00003.arrow.tmp", "fsync:error=EIO", "a.jsonl-00003.arrow: Input/output error"),
        (2, "out/a.jsonl-00003.arrow.tmp", "write:error=ENOSPC:when=2+", "the disk is full: "),
        (1, "out/ledger.json.tmp", "fsync:error=EIO", "ledger.json: Input/output error"),
    ],
)
@pytest.mark.row(5)
@pytest.mark.row(6)
def test_a_failing_disk_is_one_line_and_the_next_attempt_heals(place, processes, file, fault, message):
    out = place.bench.folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    trace = ["strace", "-f", "-qq", "-o", "/dev/null", "-P", str(place.bench.folder / file), "-e", f"inject={fault}"]
    done = place.run(*trace, *place.command("out", processes))
    if "ptrace" in done.stderr.lower():
        pytest.skip("this machine lets no process be traced")
    assert done.returncode == 1, done.stderr
    assert message in done.stderr.splitlines()[0]
    assert "Traceback" not in done.stderr
    assert not (out / "ledger.json").exists()
    assert place.run(*place.command("out", processes)).returncode == 0
    assert place.contents(out) == place.contents(place.bench.folder / "undisturbed")
