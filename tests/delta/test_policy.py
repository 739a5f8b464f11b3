"""Which versions are full and which have skips, and which way a reader takes for it."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from ckptsync import Channel, DeltaPolicy, Publisher
from ckptsync.delta.plan import cheapest
from ckptsync.errors import InvalidInput
from ckptsync.layout import manifest_path
from ckptsync.manifest import Manifest
from ckptsync.version import VersionId

from .test_versions import Trainer, model, same, staged


def anchors(policy: DeltaPolicy, step: float, count: int) -> list[int]:
    """Where full versions come after the first one, if each step's changes are this part of a full version."""
    found, last = [], 0
    for number in range(1, count + 1):
        if policy.is_due(number - last, (number - 1 - last) * step):
            found.append(number)
            last = number
    return found


def test_by_default_any_128_versions_take_less_than_a_hundredth_and_a_half_of_a_full_one_each():
    # What 1 % of changed weights take (benchmarks/delta_chain.py): of a step, and of 32 together.
    step, skip = 0.0056, 0.047
    policy = DeltaPolicy()
    full = anchors(policy, step, 1000)
    stored = [step + (skip if at % 32 == 0 else 0) + (at in full) for at in range(1, 1001)]
    assert policy.skip == (32,)
    assert max(sum(stored[at : at + 128]) / 128 for at in range(1000 - 128)) <= 0.015


@pytest.mark.parametrize("step", [0.0001, 0.005, 0.03, 0.1, 0.5])
def test_by_default_changes_between_full_versions_add_up_to_no_more_than_two(step: float):
    policy = DeltaPolicy()
    full = [0, *anchors(policy, step, 2000)]
    longest = max(after - before for before, after in itertools.pairwise(full))
    assert longest <= 256
    assert longest * step <= 2 + step


def test_a_full_version_that_is_due_waits_for_the_next_skip():
    policy = DeltaPolicy(skip=(4, 16), max_chain=1)
    assert anchors(policy, step=0.05, count=70) == [32, 64], "20 are enough"
    assert anchors(policy, step=0.25, count=12) == [5, 10], "before the first skip is due it does not wait"
    assert anchors(DeltaPolicy(skip=(), anchor_every=7), step=0.05, count=20) == [7, 14], "the number bounds it"


def test_a_full_version_comes_once_the_changes_since_the_last_add_up_to_one(tmp_path):
    trainer = Trainer(str(tmp_path / "root"), max_chain=0.2, skip=())
    trainer.publish(4)
    trainer.restart(max_chain=0.2, skip=())
    trainer.publish(8)
    channel = Channel.open(trainer.root)
    chain, full = 0, 0
    for manifest in map(channel.manifest, list(trainer.held)[1:]):
        assert (manifest.kind == "full") == (chain >= 0.2 * manifest.nbytes), f"{manifest.id}, after {chain} bytes"
        chain, full = (0, full + 1) if manifest.kind == "full" else (chain + manifest.parent.nbytes, full)
    assert full


@pytest.mark.parametrize("value", [0, -1, True, float("nan")])
def test_a_chain_of_no_length_is_refused(value: float):
    with pytest.raises(InvalidInput, match="max_chain"):
        DeltaPolicy(max_chain=value)


def test_every_so_many_versions_one_is_full_and_readers_still_need_only_its_changes(tmp_path, stage):
    trainer = Trainer(str(tmp_path / "root"), anchor_every=4, skip=())
    trainer.publish(9)
    channel = Channel.open(trainer.root)
    manifests = [channel.manifest(version) for version in trainer.held]
    assert [m.kind for m in manifests] == ["full", *["delta"] * 3, "full", *["delta"] * 3, "full"]
    before, anchor = manifests[3], manifests[4]
    chain = cheapest(channel, anchor, held=lambda m: m.id == before.id)
    assert [link.edge for link in chain.links] == [(anchor.id, before.id)]
    assert not cheapest(channel, anchor).links, "a reader that holds nothing takes the full version"
    assert same(staged(stage, trainer.root, before.id), trainer.held[before.id])
    assert same(staged(stage, trainer.root, anchor.id), trainer.held[anchor.id])


def test_a_reader_far_behind_takes_one_skip_delta(tmp_path):
    trainer = Trainer(str(tmp_path / "root"), skip=(4, 8))
    trainer.publish(9)
    channel = Channel.open(trainer.root)
    first, last = (channel.manifest(version) for version in (min(trainer.held), max(trainer.held)))
    assert [base.id.number for base in last.deltas] == [8, 5, 1]
    chain = cheapest(channel, last, held=lambda m: m.id == first.id)
    assert [link.edge for link in chain.links] == [(last.id, first.id)]
    replayed = sum(channel.manifest(version).parent.nbytes for version in list(trainer.held)[1:])
    assert chain.nbytes < replayed


def test_skip_deltas_give_the_same_weights(tmp_path, stage):
    trainer = Trainer(str(tmp_path / "root"), skip=(4, 8))
    trainer.publish(9)
    first, last = min(trainer.held), max(trainer.held)
    channel = Channel.open(trainer.root)
    here = stage.stage(channel, channel.manifest(first))
    for number in range(2, 9):
        os.remove(f"{trainer.root}/{manifest_path(VersionId(1, number))}")
    assert same(staged(stage, trainer.root, last), trainer.held[last])
    stage.release(here)


def test_changes_that_are_nearly_everything_become_a_full_version(trainer):
    trainer.publish()
    trainer.state = model(seed=9)
    assert trainer.publish().kind == "full"
    assert trainer.publish().kind == "delta"


def test_a_restart_counts_the_versions_since_the_last_full_one(tmp_path):
    trainer = Trainer(str(tmp_path / "root"), anchor_every=4)
    trainer.publish(3)
    trainer.restart(anchor_every=4)
    assert [trainer.publish().kind for _ in range(3)] == ["delta", "full", "delta"]


def given_up(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.event == "delta-given-up"]


def test_a_restart_with_another_layout_of_shards_says_why_it_publishes_a_full_version(trainer, caplog):
    last = trainer.publish(2)
    assert given_up(caplog) == [], "a first version is full, and deltas follow"
    with Publisher(trainer.root, delta=DeltaPolicy(), shard_bytes=7000) as publisher:
        assert [publisher.publish(trainer.state).manifest.kind for _ in range(2)] == ["full", "delta"]
    (said,) = given_up(caplog)
    assert f"a full version is published: the shards of {last.id} are laid out otherwise" in said


def test_of_another_model_is_said_that_it_is_one_and_no_more(trainer, caplog):
    trainer.publish()
    trainer.state["layers.1.scale"] = torch.ones(8)
    assert trainer.publish().kind == "full"
    assert given_up(caplog) == []
    assert "is another model than" in caplog.text


def test_a_reader_with_nothing_at_hand_asks_for_no_version_before_the_full_one(tmp_path, stage, monkeypatch):
    trainer = Trainer(str(tmp_path / "root"), anchor_every=4, skip=())
    last = trainer.publish(7)
    channel, asked = Channel.open(trainer.root), []
    manifest_of = Channel.manifest

    def manifest(self: Channel, version: VersionId) -> Manifest:
        asked.append(version.number)
        return manifest_of(self, version)

    monkeypatch.setattr(Channel, "manifest", manifest)
    found = stage.stage(channel, last)
    assert min(asked) == 5
    stage.release(found)
    assert channel.manifest(VersionId(1, 5)).parent is not None, "there was a way further back"
