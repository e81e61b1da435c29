"""The table of faults is complete, and every test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
NUM_FAULTS = 124
ROW = re.compile(r"^\| F(\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.M)
CITED = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def table() -> list[tuple[int, str, str, str]]:
    """(number, report, what went wrong, answer) of every row."""
    text = (ROOT / "docs" / "faults.md").read_text()
    rows = [(int(number), *(cell.strip() for cell in cells)) for number, *cells in ROW.findall(text)]
    assert len(rows) == text.count("\n| F"), "a row that is not in the form of the others"
    return rows


@cache
def names_in(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_the_faults_are_numbered_without_a_gap_and_no_report_stands_twice():
    rows = table()
    assert [number for number, *_ in rows] == list(range(1, NUM_FAULTS + 1))
    reports = [report for _, report, _, _ in rows]
    assert len(set(reports)) == len(reports)


def test_every_fault_is_answered_by_a_test_by_a_reason_or_by_what_is_missing():
    for number, _, _, answer in table():
        said = re.findall(r"(?:cannot arise|not built yet): \w[^;]+", answer)
        assert CITED.search(answer) or said, number
        assert answer.count("`tests/") == len(CITED.findall(answer)), number


def test_every_test_that_is_named_exists():
    missing = [
        f"F{number}: {path}::{name}"
        for number, _, _, answer in table()
        for path, name in CITED.findall(answer)
        if not (ROOT / path).exists() or name not in names_in(path)
    ]
    assert missing == []
