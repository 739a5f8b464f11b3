"""`python -m tests.chaos`: what is run again, what is only looked at again, and what it leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from . import __main__ as command
from . import record
from .record import Epoch, Fault, Holding, Report, Version

BEFORE = Report(
    seed=7, seconds=20, engine="module", links="none", replicas=["embedded-1"], base="one",
    schedule=[Fault(1, 2, "freeze", "embedded-1"), Fault(5, 1, "kill", "store")],
    source=Holding("e1-v1", [Version("e1-v1", 0.5, "one", "full", "content", "record")], [Epoch(1, 1)], []),
)  # fmt: skip


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What was asked of a run, which leaves a log and sees its first fault only."""
    asked: list[tuple[Any, ...]] = []

    def run(folder: str, *how: Any) -> Report:
        asked.append(how)
        (Path(folder) / "logs").mkdir()
        (Path(folder) / "logs" / "mirror.log").write_text("copied")
        return msgspec.structs.replace(BEFORE, happened=BEFORE.schedule[:1])

    monkeypatch.setattr(command, "run", run)
    return asked


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    record.save(BEFORE, str(tmp_path / "before.json"))
    return str(tmp_path / "before.json")


def test_a_replay_runs_the_recorded_schedule_with_its_seed_length_and_engine(
    tmp_path: Path, recorded: str, runs: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "again"
    assert command.main(["--replay", recorded, "--seed", "3", "--out", str(out)]) == 1, "a fault did not happen"
    assert runs == [(7, 20, "module", BEFORE.schedule)]
    assert record.load(str(out / "report.json")).schedule == BEFORE.schedule
    assert (out / "timeline.png").exists()
    assert (out / "logs" / "mirror.log").read_text() == "copied"
    assert "1 of 2 faults happened" in capsys.readouterr().out


def test_a_run_that_is_judged_again_is_not_run_again(
    tmp_path: Path, recorded: str, runs: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--judge", recorded, "--out", str(tmp_path / "again")]) == 1
    assert runs == []
    assert "BROKEN  everybody was asked, and every fault happened" in capsys.readouterr().out


def test_a_new_run_draws_its_schedule(tmp_path: Path, runs: list[tuple[Any, ...]]) -> None:
    command.main(["--seconds", "30", "--seed", "3", "--out", str(tmp_path / "out")])
    assert runs == [(3, 30, "module", None)]
