"""The examples of the trainer's side run as their first lines say."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ckptsync.channel import Channel
from ckptsync.verify import verify_version


@pytest.mark.distributed
@pytest.mark.slow
def test_the_fsdp2_example_publishes_every_second_step(root: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*command, "examples/fsdp2_publish.py", root, "--steps", "4"],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    channel = Channel.open(root)
    assert [channel.manifest(version).step for version in channel.versions()] == [2, 4]
    assert all(verify_version(channel, version).ok for version in channel.versions())
    assert "published e1-v2 of step 4" in ran.stdout
