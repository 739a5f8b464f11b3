"""Deltas from several real ranks: sharded by FSDP2, written by one or by all."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from ckptsync import Channel
from ckptsync.shards.tensors import load_tensors
from ckptsync.verify import verify_version
from tests.trainer.models import TinyModel, shard
from tests.trainer.ranks_harness import returned, run_ranks
from watchers.stage import Stage

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def say_that_all_is_on_a_gpu() -> None:
    """A CPU does what torch does on it; which tensors are compared there is what is tried."""
    from ckptsync.delta import messages

    messages.is_far = lambda _: True


def publish_steps(rank: int, root: str, writers: str, background: str, on_gpu: bool) -> list[str]:
    """`background`: of three publishes each, y or n."""
    from ckptsync import DeltaPolicy
    from ckptsync.publish import Publisher

    if on_gpu:
        say_that_all_is_on_a_gpu()
    policy = DeltaPolicy(skip=(2,), max_ratio=1, on_gpu=on_gpu)
    model = shard(TinyModel())
    made = []
    for _ in range(2):  # a second trainer attempt goes on from the first one's chain
        with Publisher(root, dtype=torch.bfloat16, writers=writers, delta=policy) as publisher:
            for each in background:
                with torch.no_grad():
                    for number, parameter in enumerate(model.parameters()):
                        if number % 2:
                            parameter.mul_(1 + 2**-8)
                done = publisher.publish(model, background=each == "y")
                done = done.result() if each == "y" else done
                made.append(f"{done.manifest.kind} {len(done.manifest.deltas)}")
    Publisher(root + "-full", dtype=torch.bfloat16).publish(model)
    return made


@pytest.mark.parametrize(
    ("writers", "background", "on_gpu"),
    [
        ("rank0", "nnn", False),
        ("all", "nnn", False),
        ("all", "yyy", False),
        ("rank0", "nnn", True),
        ("all", "nnn", True),
        ("all", "nyn", True),
    ],
)
def test_ranks_publish_changes_and_a_second_attempt_goes_on_with_them(
    tmp_path, writers: str, background: str, on_gpu: bool
) -> None:
    root = str(tmp_path / "root")
    made = returned(run_ranks(3, publish_steps, root, writers, background, on_gpu))
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


def count_what_comes_to_the_host(rank: int, root: str, cuda: bool) -> list[int]:
    """Bytes of this rank's tensors for each of four versions; whole for the first."""
    from ckptsync import DeltaPolicy
    from ckptsync.publish import Publisher

    if not cuda:
        say_that_all_is_on_a_gpu()
    fetched, plain = [], torch.Tensor.cpu

    def cpu(tensor: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if sys._getframe(1).f_code.co_name in {"ready", "outgoing"}:  # others ask of what is on the host already
            fetched[-1] += tensor.nbytes
        return plain(tensor, *args, **kwargs)

    torch.Tensor.cpu = cpu
    model = shard(TinyModel(width=96, blocks=3).to("cuda" if cuda else "cpu"))
    with Publisher(root, dtype=torch.bfloat16, delta=DeltaPolicy(on_gpu=True)) as publisher:
        for step in range(4):
            fetched.append(0)
            publisher.publish(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().view(-1)[step::97].mul_(1.01)
    return fetched


def check_that_only_changes_came(root: str, cuda: bool) -> None:
    for first, *rest in returned(run_ranks(2, count_what_comes_to_the_host, root, cuda, cuda=cuda)):
        assert first > 100_000
        assert all(each < first / 50 for each in rest), "some vectors, which changes would make larger"
    assert all(verify_version(Channel.open(root), version).ok for version in Channel.open(root).committed())


def test_of_what_is_on_gpus_only_the_changes_come_to_the_host_on_every_rank(tmp_path) -> None:
    check_that_only_changes_came(str(tmp_path), cuda=False)
