"""The GPU benchmark on a tiny shape without a GPU: it loads by the plan, all or only what changed; equal outputs."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.vllm_plugin import overlay

import make  # isort: skip - found through overlay
import serve  # isort: skip

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_gpu_benchmark_runs_and_checks_the_outputs(plugin_path: str, tmp_path: Any) -> None:
    argv = [make.ensure("vllm"), "-m", "benchmarks.gpu_pause", "--shape", "tiny", "--rounds", "1", "--change", "0.02"]
    argv += ["--work", str(tmp_path / "work"), "--json", str(tmp_path / "found.json")]
    env = serve.environment("vllm") | {"PYTHONPATH": plugin_path}
    done = subprocess.run(argv, env=env, cwd=overlay.REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with open(tmp_path / "found.json", encoding="utf-8") as file:
        found = json.load(file)
    assert found["bars"] == {
        "outputs": True,
        "change: only what changed was moved": True,
        "change: outputs": True,
        "change: every element": True,
    }
    assert 0 < found["change_moved_all"][0] < found["bytes"] / 5
    assert (found["first_path"], found["first_proof"], found["proof_kind"]) == ("reload", "elements", "elements")
    assert found["change_proof_kind"] == "sums"
    assert "stock reload_weights" in done.stdout
