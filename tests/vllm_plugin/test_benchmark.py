"""The GPU benchmarks on a tiny shape without a GPU: by the plan, all or only what changed, and beside peers."""

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
    found, said = run("gpu_pause", plugin_path, tmp_path, "--rounds", "1", "--change", "0.02")
    assert found["bars"] == {
        "outputs": True,
        "change: only what changed was moved": True,
        "change: outputs": True,
        "change: every element": True,
    }
    assert 0 < found["change_moved_all"][0] < found["bytes"] / 5
    assert (found["first_path"], found["first_proof"], found["proof_kind"]) == ("reload", "elements", "elements")
    assert found["change_proof_kind"] == "sums"
    assert "stock reload_weights" in said


def test_the_peers_that_do_not_run_here_are_named_and_the_others_compared(plugin_path: str, tmp_path: Any) -> None:
    found, _ = run("gpu_peers", plugin_path, tmp_path, "--rounds", "2")
    assert [row["way"] for row in found["rows"]] == ["ckptsync", "reload_weights"]
    assert all(row["part_ratios"]["pause"] > 0 for row in found["rows"])
    assert set(found["absent"]) == {
        "checkpoint-engine", "reload_weights, by fastsafetensors", "reload_weights, by runai-model-streamer"
    }  # fmt: skip


def run(name: str, plugin_path: str, tmp_path: Any, *options: str) -> tuple[Any, str]:
    """What it put into its file, and said."""
    argv = [make.ensure("vllm"), "-m", f"benchmarks.{name}", "--shape", "tiny", *options]
    argv += ["--work", str(tmp_path / "work"), "--json", str(tmp_path / "found.json")]
    env = serve.environment("vllm") | {"PYTHONPATH": plugin_path}
    done = subprocess.run(argv, env=env, cwd=overlay.REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    with open(tmp_path / "found.json", encoding="utf-8") as file:
        return json.load(file), done.stdout
