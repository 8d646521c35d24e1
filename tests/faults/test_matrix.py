"""The fault matrix itself: every row is shown by a test or says what is missing, and the report counts rightly."""

from __future__ import annotations

import datetime
from collections import Counter

from fault_matrix import BEGIN, END, rows_shown, updated
from fault_rows import BY_NUMBER, ROWS

TODAY = datetime.date(2026, 12, 1)


def test_every_row_is_shown_by_a_test_or_names_what_is_missing():
    assert [row.number for row in ROWS] == list(range(1, 35))
    shown = rows_shown()
    assert [row.number for row in ROWS if not row.missing and row.number not in shown] == []
    assert shown.keys() <= BY_NUMBER.keys()


def test_a_run_updates_the_rows_it_ran_and_leaves_the_rest_of_the_page():
    page = updated("# Reliability\n\nWords.\n", {(1, "quick"): Counter(passed=3)}, TODAY)
    assert page.startswith(f"# Reliability\n\nWords.\n\n{BEGIN}\n| row | fault |")
    assert "| 3 passed (2026-12-01) |  |" in page
    page = page.replace(END, f"{END}\n\nMore words.")
    later = datetime.date(2026, 12, 2)
    counts = {(1, "soak"): Counter(passed=200, failed=1), (2, "quick"): Counter(skipped=1)}
    page = updated(page, counts, later)
    assert page.endswith(f"{END}\n\nMore words.\n")
    first = next(line for line in page.splitlines() if line.startswith("| 1 |"))
    assert "| 3 passed (2026-12-01) | 1 failed, 200 passed (2026-12-02) |" in first
    assert updated(page, {}, later) == page
