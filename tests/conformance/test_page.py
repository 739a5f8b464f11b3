"""docs/conformance.md says what is tested, and where: the tests are there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.chaos.laws import LAWS
from tests.model import test_model, test_mutations

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs" / "conformance.md").read_text()


def test_every_case_has_a_test_of_its_number_in_each_file_that_is_named() -> None:
    rows = re.findall(r"^\| (\d+) \| .* \| (`.*`) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 81
    for number, files in rows:
        for file in re.findall(r"`([^`]+)`", files):
            path = TESTS.parent / file if file.startswith("ckptsync/") else TESTS / file
            names = re.findall(r"def test_case_(\w+)", path.read_text())
            assert any(number in name.split("_") for name in names), f"{file} has no test of case {number}"


def test_every_file_that_is_named_is_there() -> None:
    named = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", PAGE.partition("## Cases")[0])
    assert [name for name in named if not (TESTS / name.removeprefix("tests/")).exists()] == []


def test_it_lists_as_many_worlds_and_mutations_as_there_are() -> None:
    assert len(re.findall(r"^\| .* \| [\d,]+, [\d,]+ \|$", PAGE, re.MULTILINE)) == len(test_model.WORLDS)
    assert len(re.findall(r"^\d+\. ", PAGE, re.MULTILINE)) == len(test_mutations.MUTATIONS)


def test_it_lists_as_many_laws_of_a_chaos_run_as_there_are() -> None:
    section = PAGE.partition("## Chaos")[2].partition("\n## ")[0]
    assert len(re.findall(r"^- ", section, re.MULTILINE)) == len(LAWS)
