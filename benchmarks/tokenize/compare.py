"""Ours against others: the same bytes from JSON lines to token files, per CPU-second and in wall time.

    python benchmarks/tokenize/build_corpus.py CORPUS
    python benchmarks/tokenize/compare.py CORPUS TOKENIZER_FOLDER WORK --slow-megabytes 40

TOKENIZER_FOLDER holds the tokenizer.json and tokenizer_config.json of Llama 3, which is not part of this repository.
Ways of others run in environments that are made in WORK/venvs, once, with pip; one that cannot be installed is left
out and named. Each way is a process of its own. CPU-seconds are user and system time of it and its children, memory
is the peak of the largest of these processes, both as the kernel counts them (wait4); starting Python and loading the
tokenizer are in them. Slow ways take a part of the documents, every n-th, and ours takes the same part too.

The result is written to benchmarks/results/<date>-tokenize-compare.md; `--out` names another file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

HERE = Path(__file__).resolve().parent
CANDIDATES = HERE / "candidates.py"
OWN = sys.executable
VENVS = {
    "tiktoken_bare": ["tiktoken==0.14.0", "numpy", "orjson", "xxhash"],
    "datatrove": ["datatrove==0.10.1", "tokenizers==0.23.3", "orjson", "numpy", "xxhash"],
    "levanter": ["marin-levanter==0.2.227.dev40316220070"],
}
"""What each way of others needs that is not installed beside marin_build."""
PYTHONS = {"levanter": "python3.12"}
"""Of ways that need another Python than this one; it is looked for on the PATH."""
SAID = {
    "ours_1": "marin-build, 1 process",
    "ours_2": "marin-build, 2 processes",
    "fastokens_bare": "fastokens, bare loop",
    "tokenizers_bare": "tokenizers `encode_batch_fast`, bare loop, 1 thread",
    "tiktoken_bare": "tiktoken `encode_ordinary_batch`, bare loop, 1 thread",
    "datasets_map": "`datasets.map`, 2 processes, `save_to_disk`",
    "datatrove": "datatrove `DocumentTokenizer`, 1 worker",
    "levanter": "Levanter's cache builder, 1 process",
}
FULL = ("ours_1", "ours_2", "fastokens_bare")
SLOW = (
    "ours_1",
    "ours_2",
    "fastokens_bare",
    "tiktoken_bare",
    "tokenizers_bare",
    "datasets_map",
    "datatrove",
    "levanter",
)
TOKENIZER, SET, CHECK = "tokenizers/bench/dev", "tokenized/bench/{}/dev", "checks/encoder/bench/dev"


@dataclass(frozen=True)
class Corpus:
    """Documents of one comparison, in files whose order is that of their names."""

    name: str
    files: list[Path]
    text_bytes: int

    @property
    def megabytes(self) -> float:
        return self.text_bytes / 1e6


@dataclass(frozen=True)
class Run:
    way: str
    corpus: Corpus
    cpu_seconds: float
    wall_seconds: float
    peak_megabytes: float
    facts: dict[str, Any]

    @property
    def rate(self) -> float:
        """MB of text per CPU-second."""
        return self.corpus.megabytes / self.cpu_seconds


# ---- what is compared ------------------------------------------------------------------------------------------------


def documents(folder: Path) -> Iterator[bytes]:
    for path in sorted((folder / "text").glob("*.jsonl")):
        with path.open("rb") as lines:
            yield from lines


def cut(corpus: Path, target: Path, name: str, megabytes: float | None) -> Corpus:
    """About so many MB of the corpus, spread over all of it, in one file; None: all of it."""
    text_bytes = json.loads((corpus / "corpus.json").read_bytes())["total"]["text_bytes"]
    step = max(1, round(text_bytes / 1e6 / megabytes)) if megabytes else 1
    target.mkdir(parents=True, exist_ok=True)
    path, size = target / f"{name}.jsonl", 0
    with path.open("wb") as out:
        for number, line in enumerate(documents(corpus)):
            if number % step == 0:
                out.write(line)
                size += len(json.loads(line)["text"].encode())
    return Corpus(name, [path], size)


# ---- measuring -------------------------------------------------------------------------------------------------------


def measured(command: Sequence[str | Path], log: Path, **environment: str) -> tuple[float, float, float, str]:
    """CPU-seconds, wall seconds, peak MB and standard output of a command.

    Raises:
        SystemExit: it failed; with the end of what it said.
    """
    with log.open("wb") as errors, (log.with_suffix(".out")).open("wb") as out:
        start = time.perf_counter()
        process = subprocess.Popen(
            list(map(str, command)), stdout=out, stderr=errors, env={**os.environ, **environment}
        )
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command[0]} … failed\n{log.read_text(errors='replace')[-2000:]}")
    output = log.with_suffix(".out").read_text(errors="replace")
    return used.ru_utime + used.ru_stime, wall, used.ru_maxrss / 1024, output


class Bench:
    """Runs every way below one folder."""

    def __init__(self, work: Path, tokenizer: Path) -> None:
        self._work, self._tokenizer = work, tokenizer

    def prepare(self, corpora: list[Corpus]) -> Run:
        """Recipes, the tokenizer, and the check of its encoder, which is built once a tokenizer: measured alone."""
        self._recipe(TOKENIZER, _tokenizer_recipe(self._tokenizer))
        for corpus in corpora:
            self._recipe(SET.format(corpus.name), _set_recipe(corpus))
        for target in (TOKENIZER, *(SET.format(corpus.name) for corpus in corpora)):
            self._ours("pin", target)
        self._ours("build", TOKENIZER)
        cpu, wall, peak, _ = self._ours("build", CHECK)
        facts = json.loads((self._work / "artifacts" / CHECK / "parity.json").read_bytes())
        return Run("check", Corpus("check", [], facts["characters"]), cpu, wall, peak, facts)

    def run(self, way: str, corpus: Corpus) -> Run | None:
        output = self._work / "outputs" / f"{way}-{corpus.name}"
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True)
        if way.startswith("ours"):
            return self._run_ours(way, corpus, output)
        python = self._python(way)
        if python is None:
            return None
        command = [python, CANDIDATES, way, self._tokenizer, corpus.files[0], output]
        try:
            cpu, wall, peak, said = measured(command, output / "log.txt")
        except SystemExit as error:
            print(f"{way}: left out: {error}", file=sys.stderr)
            return None
        facts = json.loads(said.splitlines()[-1])
        return Run(way, corpus, cpu, wall, peak, facts | self._written(way, output))

    def _run_ours(self, way: str, corpus: Corpus, output: Path) -> Run:
        target = SET.format(corpus.name)
        shutil.rmtree(self._work / "artifacts" / target, ignore_errors=True)
        cpu, wall, peak, _ = self._ours("build", target, f"processes={way[-1]}")
        folder = self._work / "artifacts" / target
        record = json.loads((folder / ".artifact.json").read_bytes())
        digest = digest_of(ids_of_shards(folder))
        facts = {key: record["metrics"][key] for key in ("documents", "tokens")}
        return Run(way, corpus, cpu, wall, peak, facts | {"digest": digest} | record["provenance"]["encoder"])

    def _ours(self, verb: str, target: str, *settings: str) -> tuple[float, float, float, str]:
        where = ["--prefix", self._work / "artifacts", "--recipes", self._work / "config"]
        given = ["--config", *settings] if settings else []
        log = self._work / f"{verb}-{target.replace('/', '-')}.log"
        return measured([OWN, "-m", "marin_build", verb, target, *where, *given], log)

    def _recipe(self, target: str, text: str) -> None:
        path = self._work / "config" / f"{target}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def _python(self, way: str) -> Path | str | None:
        """The interpreter of a way, with its environment made where it is not there yet; None: it does not install."""
        if way not in VENVS:
            return OWN
        folder = self._work / "venvs" / way.removesuffix("_bare")
        if not (folder / "done").exists():
            pip = [folder / "bin/python", "-m", "pip", "install", "-q", *VENVS[way]]
            python = shutil.which(PYTHONS[way]) if way in PYTHONS else OWN
            for command in ([python or OWN, "-m", "venv", folder], pip):
                if subprocess.run(command).returncode:
                    print(f"{way}: cannot be installed: {' '.join(VENVS[way])}", file=sys.stderr)
                    return None
            (folder / "done").touch()
        return folder / "bin/python"

    def _written(self, way: str, output: Path) -> dict[str, Any]:
        """Digest and counts of what a way has written, where it can be read here."""
        if way == "datasets_map":
            rows = list(ids_of_stream_files(sorted((output / "saved").glob("*.arrow"))))
            return {"digest": digest_of(iter(rows)), "tokens": sum(len(ids) for ids, _ in rows)}
        if way == "datatrove":
            return _datatrove_facts(output / "saved")
        return {}


def _datatrove_facts(folder: Path) -> dict[str, Any]:
    """Flat ids in `*.ds`, and the end of each document in `*.ds.index`."""
    [flat] = folder.glob("*.ds")
    [index] = folder.glob("*.ds.index")
    ends = np.fromfile(index, np.uint64).astype(np.int64)
    ids = np.fromfile(flat, np.uint32 if flat.stat().st_size == 4 * ends[-1] else np.uint16)
    return {"digest": digest_of(iter([(ids, np.diff(ends, prepend=0))])), "tokens": len(ids), "documents": len(ends)}


def ids_of_shards(folder: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    ledger = json.loads((folder / "ledger.json").read_bytes())
    return ids_of_stream_files([folder / shard["file"] for shard in ledger["shards"]])


def ids_of_stream_files(paths: Sequence[Path]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """ids [T] and lengths [N] of each batch of Arrow stream files with a column `input_ids`."""
    for path in paths:
        with pa.memory_map(str(path)) as source, pa.ipc.open_stream(source) as stream:
            for batch in stream:
                column = batch.column("input_ids")
                offsets = column.offsets.to_numpy().astype(np.int64)
                yield column.values.to_numpy()[offsets[0] : offsets[-1]], np.diff(offsets)


def digest_of(batches: Iterator[tuple[np.ndarray, np.ndarray]]) -> str:
    """As candidates.py digests: over ids as int32, and over the lengths of documents."""
    all_ids, all_lengths = xxhash.xxh3_128(), xxhash.xxh3_128()
    for ids, lengths in batches:
        all_ids.update(np.ascontiguousarray(ids, np.int32))
        all_lengths.update(np.ascontiguousarray(lengths, np.int64))
    return all_ids.hexdigest()[:8] + all_lengths.hexdigest()[:8]


def _tokenizer_recipe(folder: Path) -> str:
    files = [str(folder / name) for name in ("tokenizer.json", "tokenizer_config.json")]
    size = len(json.loads((folder / "tokenizer.json").read_bytes())["model"]["vocab"])
    added = json.loads((folder / "tokenizer.json").read_bytes())["added_tokens"]
    size = max(size - 1, *(token["id"] for token in added)) + 1
    return f"""tokenizer:
  method: adopt
  source: {{type: files, paths: {json.dumps(files)}, digest: unresolved}}
  vocabulary_size: {size}
  special_tokens: {{bos: <|begin_of_text|>, eos: <|end_of_text|>, pad: null}}
"""


def _set_recipe(corpus: Corpus) -> str:
    return f"""tokenizer: {TOKENIZER}
source: {{type: files, paths: {json.dumps([str(path) for path in corpus.files])}, digest: unresolved}}
format: {{type: jsonl, text_key: text}}
add_bos: false
add_eos: false
shard_bytes: 33554432
token_budget: null
max_bad_documents: 0
"""


# ---- the report ------------------------------------------------------------------------------------------------------


def table(runs: list[Run]) -> str:
    head = (
        "| way | MB of text / CPU-s | CPU-s | wall s | peak MB | tokens | ids | note |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |"
    )
    digests = [run.facts.get("digest") for run in runs if run.way == "tokenizers_bare"] or [
        run.facts.get("digest") for run in runs if run.way == "fastokens_bare"
    ]
    return "\n".join([head, *(_row(run, digests[0] if digests else None) for run in runs)])


def _row(run: Run, reference: str | None) -> str:
    seen, tokens = run.facts.get("digest"), run.facts.get("tokens")
    same = "not compared" if seen is None else f"{seen}, {'equal' if seen == reference else 'OTHER'}"
    loop = run.facts.get("loop_cpu_seconds")
    note = f"loop alone {loop:.2f} CPU-s, {run.corpus.megabytes / loop:.1f} MB / CPU-s" if loop else ""
    figures = [f"{run.rate:.2f}", f"{run.cpu_seconds:.2f}", f"{run.wall_seconds:.1f}", f"{run.peak_megabytes:.0f}"]
    return f"| {' | '.join([SAID[run.way], *figures, f'{tokens:,}' if tokens else '', same, note])} |"


def goals(full: list[Run], slow: list[Run]) -> list[str]:
    """What was asked for, and what came out."""
    by_way = {run.way: run for run in full}
    slow_by_way = {run.way: run for run in slow}
    lines = []
    if {"ours_1", "fastokens_bare"} <= by_way.keys():
        bare, ours = by_way["fastokens_bare"], by_way["ours_1"]
        loop = ours.cpu_seconds / bare.facts["loop_cpu_seconds"]
        lines.append(
            f"- ours over the bare encoder, all of the corpus: {ours.cpu_seconds / bare.cpu_seconds:.2f} times the "
            f"CPU-seconds of the process that loads the tokenizer and the texts and encodes them; {loop:.2f} times the "
            "loop alone"
        )
    if "datasets_map" in slow_by_way and "ours_1" in by_way:
        ratio = by_way["ours_1"].rate / slow_by_way["datasets_map"].rate
        lines.append(f"- ours (all of the corpus) over `datasets.map` (its part): {ratio:.1f} times per CPU-second")
    return lines


def report(command: str, corpus: Path, check: Run, full: list[Run], slow: list[Run]) -> str:
    facts = json.loads((corpus / "corpus.json").read_bytes())
    total = facts["total"]
    domains = "\n".join(f"| {d['name']} | {d['documents']:,} | {d['text_bytes'] / 1e6:.1f} |" for d in facts["domains"])
    processor = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cpu = processor[0].partition(":")[2].strip() if processor else platform.processor()
    checked = f"{check.facts['characters']:,} characters, {'equal' if check.facts['equal'] else 'NOT EQUAL'}"
    size = f"{total['documents']:,} documents, {total['text_bytes'] / 1e6:.1f} MB of text"
    return f"""# Tokenizing: ours against others, {datetime.date.today()}

Command: `{command}`
Machine: {os.cpu_count()} cores ({cpu}), load {os.getloadavg()[0]:.1f} at the end, Python \
{platform.python_version()}; each way once. Tokenizer: Llama 3 (xxh3_128 {check.facts["tokenizer"]["xxh3_128"]}).
CPU-seconds are user and system time of all processes of a way, start and loading of the tokenizer included. Bare loops
hold all texts and ids in memory.
Corpus: {size}, {total["sha256"][:16]} (`build_corpus.py`).

The check of the fast encoder, once a tokenizer: {check.cpu_seconds:.1f} CPU-s, {checked}.

## All of the corpus

{table(full)}

## A part of it: {slow[0].corpus.megabytes:.1f} MB

{table(slow)}

## Goals

{chr(10).join(goals(full, slow))}

## The corpus

| domain | documents | MB of text |
| --- | --- | --- |
{domains}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("work", type=Path)
    parser.add_argument("--megabytes", type=float, help="of text for the fast ways; by default all of the corpus")
    parser.add_argument("--slow-megabytes", type=float, default=40, help="of text for all ways")
    parser.add_argument("--ways", nargs="+", choices=SLOW, default=SLOW)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    full = cut(arguments.corpus, work / "inputs", "full", arguments.megabytes)
    slow = cut(arguments.corpus, work / "inputs", "part", arguments.slow_megabytes)
    bench = Bench(work, arguments.tokenizer.resolve())
    check = bench.prepare([full, slow])
    runs: dict[str, list[Run]] = {"full": [], "part": []}
    for corpus, ways in ((full, FULL), (slow, SLOW)):
        for way in (way for way in ways if way in arguments.ways):
            run = bench.run(way, corpus)
            if run is not None:
                print(f"{corpus.name:5} {way:16} {run.rate:8.2f} MB / CPU-s {run.wall_seconds:7.1f} s", flush=True)
                runs[corpus.name].append(run)
    places = [Path(place).name for place in sys.argv[1:4]]
    command = " ".join(["python", "benchmarks/tokenize/compare.py", *places, *sys.argv[4:]])
    text = report(command.strip(), arguments.corpus, check, runs["full"], runs["part"])
    out = arguments.out or HERE.parent / "results" / f"{datetime.date.today()}-tokenize-compare.md"
    out.write_text(text)
    print(out)


if __name__ == "__main__":
    main()
