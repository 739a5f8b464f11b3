"""The guard of compiled code: what it counts, and that it sees a step."""

from __future__ import annotations

import shutil
import sys

import pytest

pytest.importorskip("numba")

from benchmarks import instructions


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="there is no valgrind")
def test_instructions_between_two_marks_are_those_of_the_work_between_them() -> None:
    work = "for times in (0, 1, 3): os.getpgrp(); [zlib.adler32(data) for _ in range(times)]"
    script = f"import os, zlib; data = bytes(1 << 20)\n{work}\nos.getpgrp()"
    _, nothing, once, thrice = instructions.between_marks([sys.executable, "-c", script])
    assert nothing < once / 10
    assert thrice == pytest.approx(3 * once, rel=0.05)


def test_a_path_that_runs_a_fifth_more_than_the_record_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"with": instructions.here(), "paths": {"digest": 1_000, "delta, apply": 1_000}}
    monkeypatch.setattr(instructions, "counted", lambda: {"digest": 1_190, "delta, apply": 1_210})
    assert instructions.compared(record) == ["delta, apply: 1.21 times the instructions of before"]


def test_a_record_of_other_libraries_is_no_measure_and_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(instructions, "counted", lambda: {"digest": 1 << 40})
    record = {"with": {**instructions.here(), "numba": "0.1"}, "paths": {"digest": 1_000}}
    assert instructions.compared(record) == []
    assert "not compared" in capsys.readouterr().out
