"""The training loader against bare slice copies of the same tokens, in tokens per CPU-second.

    python benchmarks/loader.py [--tokens 60000000] [--repeats 9]

Three sets of 60, 30 and 10 % in ten Arrow shards, batches of 256 × 2,049 tokens, page cache warm. All figures are
medians over the repeats, which take turns, so that a change of the machine's load meets all of them alike. The floor
copies 256 slices a batch, drawn beforehand, into one reused buffer: no mixture, no order, no allocation.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from marin_build.data.loader import TrainingLoader
from marin_build.data.shards import Shard, write_shard
from marin_build.recipe.mixture_schedule import Schedule

ROWS, SEQUENCE_LENGTH, BATCHES = 256, 2048, 64
SHARES = {"code": (0.6, 5), "dictionary": (0.3, 3), "prose": (0.1, 2)}


@dataclass(frozen=True)
class Shards:
    """All that the loader needs of a token set."""

    shards: list[Shard]


def make_sets(folder: Path, tokens: int, dtype: type) -> dict[str, Shards]:
    """Random tokens in documents of log-normal length, mean 1,000 tokens, as Arrow shards."""
    generator = np.random.default_rng(0)
    return {
        name: Shards(
            [
                make_shard(
                    folder / f"{name}-{number}-{np.dtype(dtype)}.arrow", generator, int(tokens * share / shards), dtype
                )
                for number in range(shards)
            ]
        )
        for name, (share, shards) in SHARES.items()
    }


def make_shard(path: Path, generator: np.random.Generator, tokens: int, dtype: type) -> Shard:
    ends = np.cumsum(np.ceil(generator.lognormal(6.4, 1.0, tokens // 500)).astype(np.int64))
    lengths = np.diff(np.concatenate([[0], ends[ends < tokens], [tokens]]))
    write_shard(path, generator.integers(0, 50_000, tokens).astype(dtype), lengths)
    return Shard(path, tokens, len(lengths))


def loader(sets: dict[str, Shards], block: int, segments: bool) -> TrainingLoader:
    weights = {name: share for name, (share, _) in SHARES.items()}
    schedule = Schedule.make([(0, weights)], block=block, global_batch_size=ROWS, seed=7)
    return TrainingLoader(sets, schedule, sequence_length=SEQUENCE_LENGTH, segments=segments)


def floor(sets: dict[str, Shards]) -> Callable[[int], object]:
    """Slices drawn beforehand, in the sets' shares, from the same mapped shards."""
    generator = np.random.default_rng(1)
    shards = [shard.ids for token_set in sets.values() for shard in token_set.shards]
    lengths = np.array([len(ids) for ids in shards])
    chosen = generator.choice(len(shards), (1000, ROWS), p=lengths / lengths.sum())
    starts = (generator.random((1000, ROWS)) * (lengths[chosen] - SEQUENCE_LENGTH - 1)).astype(np.int64)
    out = np.empty((ROWS, SEQUENCE_LENGTH + 1), np.int32)

    def batch(step: int) -> None:
        places = zip(chosen[step % 1000].tolist(), starts[step % 1000].tolist(), strict=True)
        for row, (shard, start) in enumerate(places):
            out[row] = shards[shard][start : start + SEQUENCE_LENGTH + 1]

    return batch


def cases(folder: Path, tokens: int) -> dict[str, Callable[[int], object]]:
    wide, narrow = make_sets(folder, tokens, np.int32), make_sets(folder, tokens, np.uint16)
    jumps = np.random.default_rng(2).integers(0, 10**9, 10**5).tolist()
    leaper, with_segments = loader(wide, 2048, False), loader(wide, 2048, True)
    return {
        "bare slice copies (floor)": floor(wide),
        "loader, block 2048": loader(wide, 2048, False).batch,
        "loader, block 2048, segments": loader(wide, 2048, True).batch,
        "loader, block 64": loader(wide, 64, False).batch,
        "loader, block 16384": loader(wide, 16384, False).batch,
        "loader, uint16 shards": loader(narrow, 2048, False).batch,
        "loader, steps in random order": lambda step: leaper.batch(jumps[step]),
        "loader, segments, steps in random order": lambda step: with_segments.batch(jumps[step]),
    }


def cpu_seconds(batch: Callable[[int], object], first: int) -> float:
    start = time.process_time()
    for step in range(first, first + BATCHES):
        batch(step)
    return time.process_time() - start


def measure(ways: dict[str, Callable[[int], object]], repeats: int) -> dict[str, list[float]]:
    """CPU-seconds of each way and repeat, after one repeat to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, batch in ways.items():
            seconds[name].append(cpu_seconds(batch, repeat * BATCHES))
    return {name: runs[1:] for name, runs in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=60_000_000)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        seconds = measure(cases(Path(folder), arguments.tokens), arguments.repeats)
    base = statistics.median(seconds["bare slice copies (floor)"])
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, numpy {np.__version__}, {arguments.tokens:,} tokens")
    print("| way | million tokens per CPU-second | CPU-ms a batch | of the floor |\n| --- | --- | --- | --- |")
    for name, runs in seconds.items():
        middle = statistics.median(runs)
        rate = BATCHES * ROWS * SEQUENCE_LENGTH / middle / 1e6
        print(f"| {name} | {rate:,.0f} | {middle / BATCHES * 1e3:.2f} | {base / middle:.0%} |")


if __name__ == "__main__":
    main()
