"""A trainer that dies and resumes, retention, a mirror, twenty readers and random kills: see `life`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(9000)]

LONGEST_START_AND_END = 900


def test_memory_is_flat_objects_are_bounded_and_every_reader_ends_on_the_newest_whole_version(
    seconds_of_life: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, seed = str(tmp_path / "run"), os.environ.get("CKPTSYNC_SOAK_SEED", "1")
    command = [sys.executable, "-m", "tests.soak.life", folder, "--seconds", str(seconds_of_life), "--seed", seed]
    longest = seconds_of_life + LONGEST_START_AND_END
    ran = subprocess.run(command, capture_output=True, text=True, timeout=longest, check=False)
    assert ran.stdout, ran.stderr
    with open(os.path.join(folder, "report.json"), encoding="utf-8") as file:
        report = json.load(file)
    with capsys.disabled():
        print(f"\n{report['newest']}, {sum(report['kills'].values())} kills, {report['cores']} cores")
    assert [f"{check['name']}: {check['message']}" for check in report["checks"] if not check["ok"]] == []
    assert report["ok"], ran.stderr
