"""`ckptsync demo`, the whole of it: what people see first must be there, and be filled in."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.distributed, pytest.mark.timeout(900)]


def test_the_model_is_made_once_and_its_folder_is_printed() -> None:
    done = subprocess.run([sys.executable, "-m", "ckptsync.demo.smollm2"], capture_output=True, text=True, check=True)
    folder = done.stdout.strip()
    assert os.path.isfile(os.path.join(folder, "model.safetensors.index.json"))


def test_every_row_tells_loss_bytes_publish_stage_and_pause_and_the_answer_changes() -> None:
    command = [sys.executable, "-m", "ckptsync.cli", "demo", "--versions", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "140"})
    assert done.returncode == 0, done.stdout + done.stderr
    board = done.stdout[done.stdout.rindex("┏") :]
    for label in ("e1-v1", "e1-v2"):
        (row,) = re.findall(rf"│ {label} +│(.*)│", board)
        loss, size, publish, stage, pause, answer = (cell.strip() for cell in row.split("│"))
        assert float(loss) < 5.0
        assert re.fullmatch(r"[\d.]+ MB \(\d+%\)", size), row
        for seconds in (publish, stage, pause):
            assert re.fullmatch(r"[\d.]+ m?s", seconds), row
        assert "capital" in answer
    assert "Paris" in re.findall(r"│ base +│(.*)│", board)[0]
    assert re.search(r"e1-v2 .*latest", board), "it ends with the listing"
