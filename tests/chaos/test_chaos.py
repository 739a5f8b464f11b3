"""The short run of `python -m tests.chaos`: every kind of fault, one real engine, and every law."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from . import record, timeline
from .laws import judge
from .run import run
from .table import table

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.s3, pytest.mark.distributed, pytest.mark.timeout(7200)]

SECONDS = float(os.environ.get("CKPTSYNC_CHAOS_SECONDS", "180" if os.environ.get("CI") else "60"))
SEED = int(os.environ.get("CKPTSYNC_CHAOS_SEED", "1"))


def test_whatever_fails_no_law_is_broken_and_every_engine_ends_on_the_newest_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run(str(tmp_path), SEED, SECONDS, "sglang")
    record.save(report, str(tmp_path / "report.json"))
    timeline.draw(report, str(tmp_path / "timeline.png"))
    verdict = judge(report)
    with capsys.disabled():
        print(f"\n{table(report, verdict)}")
    assert not any(verdict.values()), f"replay it: python -m tests.chaos --replay {tmp_path}/report.json"
