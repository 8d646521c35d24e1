"""Peak memory of tokenizing against the size of the corpus.

    python benchmarks/tokenize_memory.py                        # 16, 64 and 256 MB, bytes tokenizer, about a minute
    python benchmarks/tokenize_memory.py --tokenizer trained --megabytes 8 32 96 --processes 2
    python benchmarks/tokenize_memory.py --suffix .zst

Each size is built in a process of its own, from nothing. Builder and workers are measured by the kernel (ru_maxrss);
the largest worker counts. The text is the quickstart corpus with every tenth word replaced by one that never comes
again, so that a cache without a bound would show. Exit code 1 if the largest corpus needs over 1.25 times the memory of
the smallest.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import zstandard

from marin_build.artifact.context import BuildContext, Dependency
from marin_build.artifact.digest import file_entries, list_files, root_digest
from marin_build.data import sources, tokenize, tokenizer
from marin_build.recipe import schema
from marin_build.recipe.sources import ArtifactSource, JsonLines
from marin_build.recipe.target import parse_target
from marin_build.settings import Settings

RAW, TOKENIZER, TOKENS = "raw/memory/dev", "tokenizers/memory/dev", "tokenized/memory/dev"
JSON_LINES = JsonLines(type="jsonl", text_key="text")
SPECIALS = schema.SpecialTokens(bos="<|bos|>", eos="<|eos|>", pad=None)
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SHARD_BYTES = 8 << 20
ALLOWED_GROWTH = 1.25


def lines(megabytes: int) -> Iterator[bytes]:
    """JSON lines, so many MB in all."""
    dice, left = random.Random(0), megabytes * 10**6
    corpus = (sources.CORPORA / "quickstart/train.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"].split(" ") for line in corpus]
    while left > 0:
        words = dice.choice(texts).copy()
        for at in range(0, len(words), 10):
            words[at] = dice.randbytes(5).hex()
        line = json.dumps({"text": " ".join(words)}).encode() + b"\n"
        left -= len(line)
        yield line


def write_corpus(path: Path, megabytes: int) -> None:
    opener = {".gz": gzip.open, ".zst": zstandard.open}.get(path.suffix, open)
    with opener(path, "wb") as file:
        for line in lines(megabytes):
            file.write(line)


def context(target: str, folder: Path, recipe: schema.Recipe, processes: int, *needs: Dependency) -> BuildContext:
    folder.mkdir(parents=True, exist_ok=True)
    return BuildContext(
        target=parse_target(target),
        recipe=recipe,
        fingerprint="0" * 32,
        folder=folder,
        logs=folder / "logs",
        dependencies={str(need.target): need for need in needs},
        settings=Settings(processes=processes),
        logger=logging.getLogger("benchmark"),
        stop_requested=lambda: False,
        check_lease=lambda: None,
    )


def finished(target: str, folder: Path) -> Dependency:
    entries = file_entries(folder, list_files(folder))
    return Dependency(parse_target(target), folder, {"files": entries, "digest": root_digest(entries)})


def build_tokenizer(place: Path, which: str) -> None:
    """Bytes, or 4,096 ids trained on 4 MB of the text."""
    wanted = schema.BytesTokenizer(method="bytes", special_tokens=SPECIALS)
    if which == "trained":
        (place / "text").mkdir()
        write_corpus(place / "text/a.jsonl", 4)
        text = schema.TrainingText(target=RAW, files=["a.jsonl"], format=JSON_LINES)
        wanted = schema.TrainedTokenizer(
            method="byte_level_bpe",
            text=[text],
            vocabulary_size=4096,
            split_regex=SPLIT,
            special_tokens=SPECIALS,
        )
    needs = [finished(RAW, place / "text")] if which == "trained" else []
    tokenizer.build(context(TOKENIZER, place / "tokenizer", schema.TokenizerRecipe(tokenizer=wanted), 1, *needs))


def measure_one(place: Path, name: str, processes: int) -> None:
    """Build one token set and print what it took; the only work of this process."""
    recipe = schema.TokenizedRecipe(
        tokenizer=TOKENIZER,
        source=ArtifactSource(type="artifact", target=RAW, files=["*"]),
        format=JSON_LINES,
        add_bos=True,
        add_eos=True,
        shard_bytes=SHARD_BYTES,
        token_budget=None,
        max_bad_documents=0,
    )
    needs = (finished(RAW, place / name / "raw"), finished(TOKENIZER, place / "tokenizer"))
    start = time.perf_counter()
    result = tokenize.build(context(TOKENS, place / name / "tokens", recipe, processes, *needs))
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    report = {
        "builder_mb": usages[0].ru_maxrss / 1024,
        "worker_mb": usages[1].ru_maxrss / 1024,
        "cpu_seconds": sum(usage.ru_utime + usage.ru_stime for usage in usages),
        "seconds": time.perf_counter() - start,
        "tokens": result.metrics["tokens"],
        "text_mb": result.metrics["text_bytes"] / 1e6,
        "processes": result.details["processes"],
    }
    print(json.dumps(report))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--tokenizer", choices=["bytes", "trained"], default="bytes")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--suffix", choices=["", ".gz", ".zst"], default="", help="compress the one source file")
    parser.add_argument("--measure", nargs=2, metavar=("PLACE", "NAME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure_one(Path(options.measure[0]), options.measure[1], options.processes)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return compare(Path(folder), options)


def compare(place: Path, options: argparse.Namespace) -> int:
    build_tokenizer(place, options.tokenizer)
    print(f"{options.tokenizer} tokenizer, shards of {SHARD_BYTES / 1e6:.1f} MB, source a.jsonl{options.suffix}")
    print(f"{'text MB':>9} {'builder MB':>11} {'worker MB':>10} {'M tokens':>9} {'MB / CPU-s':>11} {'processes':>10}")
    peaks = []
    for megabytes in options.megabytes:
        name = str(megabytes)
        (place / name / "raw").mkdir(parents=True)
        write_corpus(place / name / f"raw/a.jsonl{options.suffix}", megabytes)
        command = [sys.executable, __file__, "--processes", str(options.processes), "--measure", str(place), name]
        report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        peaks.append(max(report["builder_mb"], report["worker_mb"]))
        print(
            f"{report['text_mb']:9.1f} {report['builder_mb']:11.0f} {report['worker_mb']:10.0f} "
            f"{report['tokens'] / 1e6:9.1f} {report['text_mb'] / report['cpu_seconds']:11.2f} {report['processes']:10d}"
        )
    growth = peaks[-1] / peaks[0]
    print(f"the largest corpus needs {growth:.2f} times the memory of the smallest (allowed: {ALLOWED_GROWTH})")
    return int(growth > ALLOWED_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
