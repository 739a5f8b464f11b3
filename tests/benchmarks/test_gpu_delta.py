"""The GPU benchmark's logic, on a tiny shape and a CPU: every stage ends, and what it makes is proven."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu_delta


def test_the_benchmark_of_deltas_on_a_gpu_runs_and_proves_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "found.json"
    argv = ["gpu_delta", "--dry", "--shape", "tiny", "--density", "0.01", "--rounds", "1", "--seconds", "600"]
    monkeypatch.setattr("sys.argv", [*argv, "--json", str(path)])
    assert gpu_delta.main() == 0
    found = json.loads(path.read_text())
    assert found["failed"] == []
    for effort in ("fast", "best"):
        assert found[f"1.0% {effort}: blobs are the host encoder's"] is True
        assert found[f"1.0% {effort}: tensors decoded and equal"] == 24
        assert found[f"1.0% {effort}: bytes of the delta"] < found["bytes"] / 3
    assert found["the moved baseline is the new weights"] is True
