"""The report of the fault matrix: `pytest tests -m 'row and not soak' --matrix docs/reliability.md`.

Tests are counted by their mark `row(number)`. The table stands between two comments of a Markdown page; a run updates
the rows it ran, quick and soak tests in columns of their own, and leaves the rest of the page alone.
"""

from __future__ import annotations

import ast
import datetime
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_rows import BY_NUMBER, ROWS

BEGIN, END = "<!-- fault matrix -->", "<!-- end of the fault matrix -->"
HEADINGS = ("row", "fault", "expected", "shown by", "quick", "soak", "missing part")
TESTS = Path(__file__).parents[1]
OUTCOMES = ("failed", "passed", "skipped")
PROPERTY = "fault row"


def rows_shown() -> dict[int, list[str]]:
    """Row → the test modules, relative to `tests`, that hold a test marked with it."""
    shown: dict[int, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for number in sorted({*_marked(path)}):
            shown[number].append(path.relative_to(TESTS).as_posix())
    return shown


def _marked(path: Path) -> Iterator[int]:
    """The numbers in `pytest.mark.row(…)` of a module."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.row":
            yield from (argument.value for argument in node.args if isinstance(argument, ast.Constant))


class MatrixReport:
    """Counts outcomes by row, quick and soak tests apart."""

    def __init__(self, page: Path) -> None:
        self.page = page
        self.counts: dict[tuple[int, str], Counter[str]] = defaultdict(Counter)

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        outcome = report.outcome if report.when == "call" or report.skipped else "failed"
        for key, value in report.user_properties:
            if key == PROPERTY:
                number, column = value
                self.counts[number, column][outcome] += 1

    @pytest.hookimpl
    def pytest_sessionfinish(self) -> None:
        if self.counts:
            old = self.page.read_text(encoding="utf-8") if self.page.exists() else ""
            self.page.parent.mkdir(parents=True, exist_ok=True)
            self.page.write_text(updated(old, self.counts, datetime.date.today()), encoding="utf-8")


def updated(page: str, counts: dict[tuple[int, str], Counter[str]], today: datetime.date) -> str:
    """The page with its table brought up to date; a page without one gets it at its end."""
    before, begin, rest = page.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if begin and not end:
        raise ValueError(f"the page has {BEGIN} and not {END}")
    table = _table(_results(inside), counts, today)
    front = before if begin or not before else before.rstrip("\n") + "\n\n"
    return f"{front}{BEGIN}\n{table}{END}{after or chr(10)}"


def _results(table: str) -> dict[tuple[int, str], str]:
    """The cells with results of earlier runs."""
    found = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == len(HEADINGS) and cells[0].isdigit():
            found.update({(int(cells[0]), name): cells[HEADINGS.index(name)] for name in ("quick", "soak")})
    return found


def _table(old: dict[tuple[int, str], str], counts: dict[tuple[int, str], Counter[str]], today: datetime.date) -> str:
    shown = rows_shown()
    lines = [HEADINGS, ("---",) * len(HEADINGS)]
    for row in ROWS:
        results = [
            f"{_counted(counts[row.number, name])} ({today})" if (row.number, name) in counts else old.get(key, "")
            for name in ("quick", "soak")
            for key in [(row.number, name)]
        ]
        modules = ", ".join(f"`{Path(module).stem}`" for module in shown.get(row.number, []))
        lines.append((str(row.number), row.fault, row.expected, modules, *results, row.missing or ""))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _counted(outcomes: Counter[str]) -> str:
    return ", ".join(f"{outcomes[outcome]} {outcome}" for outcome in OUTCOMES if outcomes[outcome])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--matrix", type=Path, metavar="FILE", help="write the results of the fault matrix into this page")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--matrix") and not hasattr(config, "workerinput"):  # with xdist, the controller reports
        config.pluginmanager.register(MatrixReport(config.getoption("--matrix")))


def pytest_itemcollected(item: pytest.Item) -> None:
    column = "soak" if item.get_closest_marker("soak") else "quick"
    for number in {number for mark in item.iter_markers("row") for number in mark.args}:
        if number not in BY_NUMBER:
            raise pytest.UsageError(f"{item.nodeid}: the fault matrix has no row {number}")
        item.user_properties.append((PROPERTY, (number, column)))


__all__ = ["pytest_addoption", "pytest_configure", "pytest_itemcollected"]
