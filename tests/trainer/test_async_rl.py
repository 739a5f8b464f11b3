"""`examples/async_rl`, shortened: a tiny model, on two servers of this package and on two real vLLMs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckptsync.channel import Channel
from tests.envs.models import tiny_model

HERE = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(1200)]

VLLM = ["--engine", "vllm", "--serve", f"{sys.executable} {HERE}/tests/vllm_plugin/serve_plugin.py"]


def run(folder: Path, engine: list[str]) -> list[dict[str, Any]]:
    model = tiny_model(str(folder / "model"), 1, family="llama", tied=True)
    sizes = {"steps": 5, "cut-at": 2, "kill-at": 4, "kill-after": 0.1, "batch": 8, "group": 4, "max-tokens": 8}
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    environment = {**os.environ, "PYTHONPATH": str(HERE), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "examples" / "async_rl" / "loop.py"), *engine]
    done = subprocess.run(
        [*command, "--model", model, "--out", str(folder / "out"), *options],
        env=environment, capture_output=True, text=True, timeout=1100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    with open(folder / "out" / "run.jsonl", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("engine", "fast"),
    [pytest.param([], "gloo", id="embedded"), pytest.param(VLLM, "vllm_gloo", id="vllm", marks=pytest.mark.engine)],
)
def test_training_goes_on_over_a_cut_fast_path_and_a_killed_trainer(
    tmp_path: Path, engine: list[str], fast: str
) -> None:
    rows = run(tmp_path, engine)
    begun = [row for row in rows if row["event"] == "begin"]
    steps = [row for row in rows if row["event"] == "step"]
    at = [row["event"] for row in rows].index("trainer lost")

    (cut,) = [row for row in steps if any("(touched" in failure for failure in row["failures"])]
    assert cut["transport"] == "checkpoint", "the sync that broke off was made good by files"
    assert {row["transport"] for row in steps if row["step"] > 2 and row in rows[:at]} == {"checkpoint"}
    assert {row["transport"] for row in begun} == {fast}

    channel = Channel.open(str(tmp_path / "out" / "channel"))
    resumed = channel.resolve(begun[1]["resumed_from"])
    assert resumed.step == begun[1]["step"] >= rows[at - 1]["step"], "the versions of the killed trainer had files"
    assert begun[1]["version"].startswith("e2-")
    assert steps[-1]["step"] == 5
    for row in begun + steps:
        assert set(row["served"].values()) == {row["version"]}
    assert all(age <= 2 for row in steps for age in row["ages"])
    assert sum(rows[-1]["staleness"].values()) >= 8 * len(steps)

    assert (tmp_path / "out" / "run.png").stat().st_size > 10_000
