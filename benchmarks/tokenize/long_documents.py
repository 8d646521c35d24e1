"""One long document: CPU-seconds and peak memory of both encoders by its length and kind.

    python benchmarks/tokenize/long_documents.py TOKENIZER_FOLDER [--millions 1 4 16 64] [--kinds prose letter …]

Each measurement is a process of its own, whose memory before the text is encoded is shown, too. A kind and encoder
whose last size took over `--limit-seconds` is not tried with the next.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from marin_build.data.sources import CORPORA
from marin_build.data.tokenizer import load_tokenizer

BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def prose(characters: int) -> str:
    lines = (CORPORA / "quickstart/train.jsonl").read_text(encoding="utf-8").splitlines()
    text = "\n\n".join(json.loads(line)["text"] for line in lines)
    return (text * (characters // len(text) + 1))[:characters]


KINDS: dict[str, Callable[[int], str]] = {
    "prose": prose,
    "letter": lambda n: "a" * n,
    "spaces": lambda n: " " * n,
    "CJK": lambda n: "汉字" * (n // 2),
    "base64": lambda n: "".join(random.Random(0).choices(BASE64, k=n)),
}


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(folder: Path, kind: str, characters: int, fast: bool) -> dict[str, float]:
    tokenizer = load_tokenizer(folder, fast)
    tokenizer.encode(["warm"])
    text = KINDS[kind](characters)
    before, start = peak_megabytes(), time.process_time()
    ids, _ = tokenizer.encode([text])
    seconds = time.process_time() - start
    return {"seconds": seconds, "before": before, "peak": peak_megabytes(), "ids": len(ids)}


def row(folder: Path, kind: str, millions: float, encoder: str) -> dict[str, float] | None:
    """Measured in a process of its own; None: it failed."""
    command = [sys.executable, __file__, str(folder), "--one", kind, str(int(millions * 1e6)), encoder]
    run = subprocess.run(command, capture_output=True, text=True)
    return json.loads(run.stdout) if run.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--millions", type=float, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--encoders", nargs="+", choices=("fastokens", "tokenizers"), default=["fastokens", "tokenizers"]
    )
    parser.add_argument("--limit-seconds", type=float, default=20)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        kind, characters, encoder = arguments.one
        print(json.dumps(measure(arguments.tokenizer, kind, int(characters), encoder == "fastokens")))
        return
    print("| encoder | document | million characters | CPU-s | peak MB | MB before | ids |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for encoder in arguments.encoders:
        for kind in arguments.kinds:
            for millions in arguments.millions:
                found = row(arguments.tokenizer, kind, millions, encoder)
                if found is None:
                    print(f"| {encoder} | {kind} | {millions:g} | failed | | | |", flush=True)
                    break
                figures = f"{found['seconds']:.2f} | {found['peak']:,.0f} | {found['before']:,.0f} | {found['ids']:,}"
                print(f"| {encoder} | {kind} | {millions:g} | {figures} |", flush=True)
                if found["seconds"] > arguments.limit_seconds:
                    break


if __name__ == "__main__":
    main()
