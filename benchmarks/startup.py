"""What it costs to ask Snakemake for a target, against `snakemake --version`, however many recipes there are.

    python benchmarks/startup.py [--sizes 1 100 5000] [--repeats 5]
    python benchmarks/startup.py --instructions

CPU seconds (user + system, children included), medians over the repeats. In each repeat every command runs once, in
turn, so that a change of the machine's load meets all of them alike. With `--instructions`, valgrind counts the machine
instructions of one run each instead: minutes long, and the same on a busy machine as on an idle one. Goal: within 1.2
times `--version` at each size.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
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
SHARED = "tokenized/llama3/dclm_1b_1x/dclm_baseline/2026.06.28"
PARTS = (1, 200, 5000)
"""The last must stay within 3 times the first."""
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


def count_instructions(command: list[str], folder: Path) -> float:
    """Billions of machine instructions of one run of a command."""
    run(command, folder)  # compiles what is not compiled yet
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    valgrind = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    said = subprocess.run([*valgrind, *command], cwd=folder, env=environment, capture_output=True, text=True).stderr
    return int(re.search(r"I\s+refs:\s+([\d,]+)", said)[1].replace(",", "")) / 1e9


def commands_to_measure(sizes: list[int], folder: Path) -> dict[str, tuple[list[str], Path]]:
    """Command and working directory, by name; `--version` first."""
    places = {size: make_repository(folder / str(size), size) for size in sizes}
    commands = {"snakemake --version": ([*SNAKEMAKE, "--version"], places[sizes[0]])}
    for size, place in places.items():
        commands[f"dry run, recipes: {size:,}"] = ([*SNAKEMAKE, "-n", "-f", TARGET], place)
        commands[f"nothing to do, recipes: {size:,}"] = ([*SNAKEMAKE, TARGET], place)
    commands["dry run of the largest recipe in the tree"] = ([*SNAKEMAKE, "-n", LARGEST], ROOT)
    for parts in PARTS:
        plan = [*SNAKEMAKE, "-n", SHARED, "--config", f"tokenize_parts={parts}"]
        commands[f"dry run of a token set in parts: {parts:,}"] = (plan, ROOT)
    return commands


def measure(commands: dict[str, tuple[list[str], Path]], repeats: int) -> dict[str, float]:
    """Median CPU seconds by command."""
    samples: dict[str, list[float]] = {name: [] for name in commands}
    for repeat in range(repeats + 1):
        for name, (command, place) in commands.items():
            seconds = run(command, place)
            if repeat:  # the first round warms caches and compiles
                samples[name].append(seconds)
    return {name: statistics.median(values) for name, values in samples.items()}


def report(figures: dict[str, float], what: str) -> str:
    base = figures["snakemake --version"]
    rows = [f"| {name} | {figure:.2f} | {figure / base:.2f} |" for name, figure in figures.items()]
    place = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    goal = f"Goal: {GOAL} at each number of recipes; the last row, a closure of some thirty recipes, has none."
    title = f"# Start-up, {date.today()}"
    return "\n".join(
        [
            title,
            "",
            f"{what}. {place}. {goal}",
            "",
            "| command | figure | × `--version` |",
            "| --- | --- | --- |",
            *rows,
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 100, 5000])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--instructions", action="store_true", help="count instructions with valgrind")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        commands = commands_to_measure(options.sizes, Path(folder))
        if options.instructions:
            figures = {name: count_instructions(*command) for name, command in commands.items()}
            print(report(figures, "Billions of instructions, valgrind, one run each"))
        else:
            print(report(measure(commands, options.repeats), f"CPU seconds, median of {options.repeats} in turn"))


if __name__ == "__main__":
    main()
