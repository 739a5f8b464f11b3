"""The examples of this part run as they are shown."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("example", "says"),
    [
        ("resume_elsewhere.py", "resumed from e1-v1 (step 20) on 1 rank(s)"),
        ("lora_publish.py", "PEFT loads it back: the same logits"),
    ],
)
def test_an_example_does_what_it_says(example: str, says: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, str(HERE / "examples" / example), str(tmp_path / "root")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
