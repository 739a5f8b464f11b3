from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["plan", "write", "read", "index", "hf_folder"])
def test_shards_are_planned_written_and_read_without_torch(module):
    block = "import sys; sys.modules['torch'] = sys.modules['safetensors'] = sys.modules['numpy'] = None"
    subprocess.run([sys.executable, "-c", f"{block}; import ckptsync.shards.{module}"], check=True)
