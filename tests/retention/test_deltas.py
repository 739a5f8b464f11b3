"""Retention and rollback over real delta versions."""

from __future__ import annotations

import torch

from ckptsync import DeltaPolicy
from ckptsync.channel import Channel
from ckptsync.publish import Publisher
from ckptsync.retention import Retention
from ckptsync.rollback import roll_back
from ckptsync.verify import verify_version


def train(disk, steps: int) -> None:
    """Versions of which one value differs from the one before."""
    torch.manual_seed(0)
    weights = {"w": torch.randn(64, 64).bfloat16()}
    policy = Retention(keep_last=2, grace=0.0)
    with Publisher(disk, delta=DeltaPolicy(anchor_every=8, skip=(3,)), retention=policy) as publisher:
        for step in range(steps):
            weights["w"].view(-1)[step] += 1
            publisher.publish(weights, step=step)


def test_chains_stay_whole_down_to_their_full_version_also_through_a_rollback(disk, monkeypatch):
    monkeypatch.setattr("ckptsync.keeper.PAUSE", 0.0)
    train(disk, 21)
    channel = Channel.open(disk)
    assert [version.number for version in channel.committed()] == [17, 18, 19, 20, 21]
    new = roll_back(channel, channel.manifest(channel.committed()[-2]))
    assert new.kind == "delta"
    train(disk, 4)
    channel = Channel.open(disk)
    assert new.id in channel.committed()
    assert all(verify_version(channel, version).ok for version in channel.committed())
