"""Deltas from several real ranks: sharded by FSDP2, written by one or by all."""

from __future__ import annotations

import os

import pytest
import torch

from ckptsync import Channel
from ckptsync.shards.tensors import load_tensors
from ckptsync.verify import verify_version
from tests.trainer.models import TinyModel, shard
from tests.trainer.ranks_harness import returned, run_ranks
from watchers.stage import Stage

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def publish_steps(rank: int, root: str, writers: str, background: bool) -> list[str]:
    from ckptsync import DeltaPolicy
    from ckptsync.publish import Publisher

    model = shard(TinyModel())
    made = []
    for _ in range(2):  # a second trainer attempt goes on from the first one's chain
        with Publisher(
            root, dtype=torch.bfloat16, writers=writers, delta=DeltaPolicy(skip=(2,), max_ratio=1)
        ) as publisher:
            for _ in range(3):
                with torch.no_grad():
                    for number, parameter in enumerate(model.parameters()):
                        if number % 2:
                            parameter.mul_(1 + 2**-8)
                done = publisher.publish(model, background=background)
                done = done.result() if background else done
                made.append(f"{done.manifest.kind} {len(done.manifest.deltas)}")
    Publisher(root + "-full", dtype=torch.bfloat16).publish(model)
    return made


@pytest.mark.parametrize(("writers", "background"), [("rank0", False), ("all", False), ("all", True)])
def test_ranks_publish_changes_and_a_second_attempt_goes_on_with_them(tmp_path, writers: str, background: bool) -> None:
    root = str(tmp_path / "root")
    made = returned(run_ranks(3, publish_steps, root, writers, background))
    assert made == [made[0]] * 3
    assert made[0] == ["full 0", "delta 1", "delta 2", "delta 1", "delta 1", "delta 1"]
    channel, full = Channel.open(root), Channel.open(root + "-full").latest()
    assert channel.latest().content_digest == full.content_digest
    assert all(verify_version(channel, version).ok for version in channel.committed())
    stage = Stage(str(tmp_path / "stage"))
    found = stage.stage(channel, channel.latest())
    ours = dict(load_tensors(found.folder, found.manifest.tracks["model"], verify=True))
    theirs = dict(load_tensors(os.path.join(root + "-full", full.folder), full.tracks["model"]))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    stage.close()


def count_what_is_sent(rank: int, root: str) -> list[int]:
    """Bytes that this rank sends the others for each of five versions."""
    import torch.distributed as dist

    from ckptsync import DeltaPolicy
    from ckptsync.publish import Publisher

    sent, plain = [], dist.isend

    def isend(tensor: torch.Tensor, *args, **kwargs):
        sent[-1] += tensor.numel()
        return plain(tensor, *args, **kwargs)

    dist.isend = isend
    model = shard(TinyModel(width=96, blocks=3))
    with Publisher(root, dtype=torch.bfloat16, delta=DeltaPolicy()) as publisher:
        for step in range(4):
            sent.append(0)
            publisher.publish(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().view(-1)[step::97].mul_(1.01)
        sent.append(0)
        publisher.publish(model)
        sent.append(0)
        Publisher(root + "-full", dtype=torch.bfloat16).publish(model)
    return sent[:5]


def test_ranks_send_the_writer_only_what_changed(tmp_path) -> None:
    root = str(tmp_path / "root")
    first, *rest = zip(*returned(run_ranks(3, count_what_is_sent, root)), strict=True)
    assert all(sum(each) < sum(first) / 4 for each in rest)
    channel, full = Channel.open(root), Channel.open(root + "-full").latest()
    assert channel.latest().content_digest == full.content_digest
    assert all(verify_version(channel, version).ok for version in channel.committed())
