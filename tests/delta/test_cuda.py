"""The encoder on a real GPU; needs one."""

from __future__ import annotations

import pytest
import torch

from ckptsync import Channel, DeltaPolicy, Publisher
from ckptsync.delta import codec
from ckptsync.delta.device import DeviceBaseline
from ckptsync.export import stream
from ckptsync.verify import verify_version

from .test_ranks import check_that_only_changes_came
from .test_versions import model, step
from .updates import adam_like, proven_on_a_gpu

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("effort", ["fast", "best"])
def test_a_gpu_makes_the_blobs_of_the_host(effort: codec.Effort) -> None:
    old, new = adam_like(9_000_001, 0.02)
    before, after = (torch.from_numpy(each).cuda() for each in (old, new))
    (blob,) = DeviceBaseline({"w": before}).encode({"w": after}, effort=effort).blobs.values()
    assert blob == codec.encode(old.tobytes(), new.tobytes(), 2, effort=effort)


@pytest.mark.parametrize("effort", ["fast", "best"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_gpu_makes_the_blobs_of_the_host_for_tensors_of_any_size_wherever_they_lie(
    effort: codec.Effort, seed: int
) -> None:
    proven_on_a_gpu(effort, seed)


def test_only_changes_cross_the_bus_after_the_first_version(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {name: tensor.cuda() for name, tensor in model().items()}
    publisher = Publisher(str(tmp_path), delta=DeltaPolicy(on_gpu=True))
    publisher.publish(state)
    monkeypatch.delattr(stream, "collect")  # what fetches tensors whole
    for seed in range(3):
        host = {name: tensor.cpu() for name, tensor in state.items()}
        step(host, seed=seed)
        for name, tensor in host.items():
            state[name].copy_(tensor)
        done = publisher.publish(state)
        assert done.manifest.kind == "delta"
        assert verify_version(Channel.open(str(tmp_path)), done.version).ok


@pytest.mark.distributed
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_only_changes_cross_the_bus_from_ranks_with_a_gpu_each(tmp_path) -> None:
    check_that_only_changes_came(str(tmp_path), cuda=True)
