"""What it costs to ask Snakemake for a target, against `snakemake --version`, however many recipes there are.

    python benchmarks/startup.py [--sizes 1 100 5000] [--repeats 5]

CPU seconds (user + system, children included), medians over the repeats. In each repeat every command runs once, in
turn, so that a change of the machine's load meets all of them alike. Goal: within 1.2 times `--version` at each size.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
TARGET = "tokenizers/bytes/2026.06.28"
LARGEST = "checkpoints/dclm_1b_1x/2026.06.28"
GOAL = 1.2
SNAKEMAKE = [sys.executable, "-m", "snakemake"]


def make_repository(folder: Path, recipes: int) -> Path:
    """A working directory with this repository's rules and `recipes` recipes, TARGET among them and finished."""
    folder.mkdir()
    for name in ("rules", "profiles"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "Snakefile", folder)
    (folder / "config").mkdir()
    shutil.copy(ROOT / "config/config.yaml", folder / "config")
    copy_recipe(TARGET, folder)
    page = (ROOT / "config/checkpoints/quickstart/2026.06.28.yaml").read_bytes()
    for number in range(recipes - 1):
        path = folder / f"config/checkpoints/sweep_{number // 100}/point_{number % 100}/2026.06.28.yaml"
        path.parent.mkdir(parents=True)
        path.write_bytes(page)
    run([*SNAKEMAKE, TARGET], folder)
    return folder


def copy_recipe(target: str, folder: Path) -> None:
    path = folder / f"config/{target}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / f"config/{target}.yaml", path)


def run(command: list[str], folder: Path) -> float:
    """CPU seconds of a command and of all that it starts."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    child = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    said = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} failed in {folder}:\n{said}")
    return usage.ru_utime + usage.ru_stime


def measure(sizes: list[int], repeats: int, folder: Path) -> dict[str, float]:
    """Median CPU seconds by command."""
    places = {size: make_repository(folder / str(size), size) for size in sizes}
    commands = {"snakemake --version": ([*SNAKEMAKE, "--version"], places[sizes[0]])}
    for size, place in places.items():
        commands[f"dry run, {size:,} recipes"] = ([*SNAKEMAKE, "-n", "-f", TARGET], place)
        commands[f"nothing to do, {size:,} recipes"] = ([*SNAKEMAKE, TARGET], place)
    commands["dry run of the largest recipe in the tree"] = ([*SNAKEMAKE, "-n", LARGEST], ROOT)
    samples: dict[str, list[float]] = {name: [] for name in commands}
    for repeat in range(repeats + 1):
        for name, (command, place) in commands.items():
            seconds = run(command, place)
            if repeat:  # the first round warms caches and compiles
                samples[name].append(seconds)
    return {name: statistics.median(values) for name, values in samples.items()}


def report(medians: dict[str, float], repeats: int) -> str:
    base = medians["snakemake --version"]
    rows = [f"| {name} | {seconds:.2f} | {seconds / base:.2f} |" for name, seconds in medians.items()]
    return "\n".join(
        [
            f"# Start-up, {date.today()}",
            "",
            f"`python benchmarks/startup.py`: CPU seconds, median of {repeats}, commands in turn, on "
            f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}. "
            f"Goal: {GOAL} at each number of recipes; the last row, a closure of some thirty recipes, has none.",
            "",
            "| command | CPU seconds | × `--version` |",
            "| --- | --- | --- |",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 100, 5000])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        medians = measure(options.sizes, options.repeats, Path(folder))
    print(report(medians, options.repeats))


if __name__ == "__main__":
    main()
