"""vLLM's own dataclasses and its own consumer take what the transports post."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
import torch

from ckptsync.transports.vllm_ipc import VllmIpc
from tests.transports.groups import QueueGroup
from tests.transports.receivers import FileDevices, TransferVllm, bodies
from tests.transports.sends import Small, send, weights
from tests.transports.test_broadcast import OnCpu
from tests.vllm_plugin import overlay
from watchers.engines.vllm import VllmEngine

import make  # isort: skip - found through overlay
import serve  # isort: skip

READER = os.path.join(overlay.REPO, "tests", "transports", "in_vllm.py")

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]


class OneBufferEach(FileDevices):
    """So that what was sent can be read after the send."""

    def reduce(self, buffer):
        kept = self.buffer(self.own(), buffer.numel())
        kept.copy_(buffer)
        return super().reduce(kept)


def recorded(server, transport):
    send(transport, Small(), [VllmEngine("http://127.0.0.1:1", transport=server.transport)])
    transport.close()
    names = {"init": "POST /init_weight_transfer_engine", "update": "POST /update_weights"}
    return {name: bodies(server, call) for name, call in names.items()}


def test_vllm_reads_every_tensor_that_was_sent_by_ipc_and_every_announcement_by_nccl(tmp_path):
    group, nccl = QueueGroup(), TransferVllm(["GPU-1", "GPU-2"], backend="nccl")
    nccl.group = group
    found = {
        "ipc": recorded(TransferVllm(["GPU-0"]), VllmIpc(devices=OneBufferEach(str(tmp_path), "GPU-0"))),
        "nccl": recorded(nccl, OnCpu(open_group=group.open)),
    }
    path = tmp_path / "recorded.json"
    path.write_text(json.dumps(found))
    argv = [make.ensure("vllm"), READER, str(path)]
    done = subprocess.run(argv, env=serve.environment("vllm"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    read = json.loads(done.stdout.splitlines()[-1])
    sent = weights(Small())
    assert read["nccl"].keys() == read["ipc"].keys() == sent.keys()
    for name, tensor in sent.items():
        assert torch.equal(torch.tensor(read["ipc"][name]), tensor.flatten().float()), name
