"""The same promises with the model on GPUs and the job on NCCL; needs a GPU, and two for the sharded half."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.distributed.tensor import DTensor

from ckptsync import resume
from ckptsync.publish import Publisher
from ckptsync.store import open_store
from ckptsync.testing.hooks import HookedStore
from tests.trainer.models import TinyModel, same, shard
from tests.trainer.ranks_harness import returned, run_ranks
from tests.trainer.test_sources import loaded

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.skipif(not GPUS, reason="needs a GPU")]

NCCL_SECONDS = 10.0
"""Shorter than the slow store below: a rank that waited for it in an NCCL collective would not survive."""


def on_gpus() -> TinyModel:
    return shard(TinyModel().cuda())


def whole(model: TinyModel) -> dict[str, torch.Tensor]:
    """Collective."""
    state = model.state_dict().items()
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().cpu().clone() for name, t in state}


def train(model: TinyModel) -> None:
    """Collective: all-gathers and reduce-scatters over NCCL, and an update in place."""
    model(torch.arange(8, device="cuda").view(2, 4)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=1e-5).step()
    model.zero_grad()


def publish_while_training(_: int, root: str, writers: Literal["rank0", "all"]) -> bool:
    model = on_gpus()
    with Publisher(root, writers=writers) as publisher:
        for step in range(3):
            expected = whole(model)
            pending = publisher.publish(model, step=step, background=True)
            for _ in range(5):
                train(model)
            done = pending.result()
            assert done.changed
            same(loaded(root, done.manifest), expected)
        done = publisher.publish(model, step=3)
    expected = whole(model)
    same(loaded(root, done.manifest), expected)
    again = on_gpus()
    point = resume(root, again)
    assert point is not None
    assert point.step == 3
    same(whole(again), expected)
    train(again)
    return all(p.is_cuda for p in again.parameters())


@pytest.mark.parametrize("writers", ["rank0", "all"])
def test_a_publish_from_gpus_is_the_state_at_the_call_and_comes_back(tmp_path: Path, writers: str) -> None:
    assert all(returned(run_ranks(GPUS, publish_while_training, str(tmp_path), writers, cuda=True)))


def publish_to_a_slow_store(rank: int, root: str) -> int:
    waited: list[str] = []

    def wait(operation: str, path: str) -> None:
        if operation == "append" and path.endswith(".safetensors") and not waited:
            waited.append(path)
            time.sleep(1.5 * NCCL_SECONDS)

    model = on_gpus()
    store = open_store(root)
    with Publisher(HookedStore(store, wait) if rank == 0 else store) as publisher:
        done = publisher.publish(model, step=1)
    train(model)
    return done.manifest.id.number


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_case_61_no_rank_waits_for_storage_inside_an_nccl_collective(tmp_path: Path) -> None:
    done = returned(run_ranks(2, publish_to_a_slow_store, str(tmp_path), collective_timeout=NCCL_SECONDS, cuda=True))
    assert done == [1, 1]
