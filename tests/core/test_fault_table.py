"""The tables of faults that stock engines have, in design note 19: each row names tests, and they are there."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
NOTE = HERE.parents[1] / "docs" / "design" / "0019-faults-and-spans.md"
CASES = (*(53, 54, 56, 57, 58), *(88, 89, 90, 92, 93, 94, 96, 97, 98), *(100, 101, 102, 104, 105, 106, 108))
"""Of the bug bank: watchers and engines."""


def known() -> set[str]:
    """The names of all tests."""
    found = (
        re.findall(r"^ *def (test_\w+)", path.read_text(), re.MULTILINE) for path in HERE.parent.rglob("test_*.py")
    )
    return {name for names in found for name in names}


def test_every_row_of_the_fault_tables_names_a_test_that_is_there() -> None:
    _, *tables = re.split(r"\n\| stock .*\n\|---.*\n", NOTE.read_text())
    rows = [row for table in tables for row in table.partition("\n\n")[0].splitlines()]
    assert len(rows) == 6 + 8
    assert all("`test_" in row or "| the same" in row for row in rows)
    assert {name for row in rows for name in re.findall(r"`(test_\w+)`", row)} <= known()


def test_every_case_of_watchers_and_engines_is_in_a_tests_name() -> None:
    named = {int(number) for name in known() if "_case_" in name for number in re.findall(r"(?<=_)\d+(?=_)", name)}
    assert set(CASES) <= named
