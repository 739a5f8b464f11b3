"""The bar of `make test`: what it says, and that it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COVERED = Path(__file__).parents[1] / "covered.py"
SETTINGS = """
[tool.coverage.run]
source_pkgs = ["half"]
patch = ["subprocess", "_exit"]
[tool.coverage.report]
fail_under = {bar}
"""
HALF = """import os

def child():
    os._exit(0)

def nobody():
    one = 1
    return one
"""
RUN = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import half; half.child()'], check=True)"


@pytest.mark.parametrize(("bar", "code"), [(60, 0), (95, 2)])
def test_a_run_below_the_bar_fails_and_names_the_lines_that_no_process_ran(tmp_path: Path, bar: int, code: int) -> None:
    (tmp_path / "pyproject.toml").write_text(SETTINGS.format(bar=bar))
    (tmp_path / "half.py").write_text(HALF)
    (tmp_path / "run.py").write_text(RUN)
    measured = {key: value for key, value in os.environ.items() if not key.startswith("COVERAGE_")}
    environment = {**measured, "PYTHONPATH": str(tmp_path)}

    def ran(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    for words in (("run", "run.py"), ("combine", "--quiet")):
        done = ran("-m", "coverage", *words)
        assert done.returncode == 0, done.stderr
    done = ran(str(COVERED))
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f"coverage: 66.67 % of 6 lines; the bar is {bar} %"
    assert ("half.py: 67 %, not run: 7-8" in done.stdout) == (bar == 95)
