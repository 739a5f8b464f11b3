"""The fault matrix can be printed, and no row of it ends in wrong bytes."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import delta_faults


def test_every_fault_ends_in_the_version_or_in_a_refusal_that_can_be_repaired(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["delta_faults", "--places", "1", "--json"])
    assert delta_faults.main() == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == len(delta_faults.FAULTS) + 3
    for row in rows:
        assert row["injected"] > 0, row["fault"]
        assert row["exact"] + row["refused"] == row["injected"], row["fault"]
