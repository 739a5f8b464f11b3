"""Broken chains are found, named, and mended from what can still be read."""

from __future__ import annotations

import os

import pytest

from ckptsync import Channel
from ckptsync.copies import compact
from ckptsync.delta.plan import cheapest
from ckptsync.errors import BrokenChain, Fenced, Unrepairable
from ckptsync.fsck import fsck, needed, repair
from ckptsync.layout import manifest_path
from ckptsync.manifest import Origin
from ckptsync.verify import verify_version
from ckptsync.version import VersionId
from watchers.stage import Stage

from .test_versions import Trainer, damage, delta_file, same, staged


@pytest.fixture
def trainer(tmp_path):
    trainer = Trainer(str(tmp_path / "root"), skip=(4,))
    trainer.publish(6)
    return trainer


@pytest.fixture
def channel(trainer):
    return Channel.open(trainer.root)


def test_a_whole_channel_has_nothing_to_find(channel):
    assert fsck(channel) == []
    assert repair(channel) is None


def test_a_damaged_delta_loses_what_has_no_other_way(trainer, channel):
    damage(trainer.root, delta_file(channel.manifest(VersionId(1, 3))))
    found = fsck(channel)
    assert [finding.version.number for finding in found if finding.lost] == [3, 4]
    assert [f.version.number for f in found if not f.lost] == [3], "5 and 6 are reached over the skip delta of 5"


def test_repair_makes_the_newest_readable_version_full(trainer, channel, tmp_path):
    damage(trainer.root, delta_file(channel.manifest(VersionId(1, 6))))
    made = repair(channel)
    assert (made.kind, str(made.id)) == ("full", "e2-v6")
    assert channel.latest().id == made.id
    assert verify_version(channel, made.id).ok
    assert repair(channel) is None
    stage = Stage(str(tmp_path / "stage"))
    assert same(staged(stage, trainer.root, made.id), trainer.held[VersionId(1, 5)])
    stage.close()


def test_a_full_version_that_is_the_newest_readable_is_rolled_back_to(tmp_path):
    trainer = Trainer(str(tmp_path / "two"))
    trainer.publish(2)
    channel = Channel.open(trainer.root)
    damage(trainer.root, delta_file(channel.manifest(VersionId(1, 2))))
    assert [finding.version.number for finding in needed(channel, fsck(channel))] == [2]
    made = repair(channel)
    assert isinstance(made.data_of, Origin)
    assert (made.data_of.id, channel.latest().id) == (VersionId(1, 1), made.id)
    assert not needed(channel, fsck(channel))
    assert repair(channel) is None


def test_a_missing_manifest_in_the_middle_is_named(trainer, channel):
    os.remove(f"{trainer.root}/{manifest_path(VersionId(1, 2))}")
    lost = [finding for finding in fsck(channel) if finding.lost]
    assert [finding.version.number for finding in lost] == [3, 4]
    assert "e1-v3 is a delta against e1-v2" in lost[0].message


def test_a_missing_shard_of_the_full_version_loses_all(trainer, channel):
    first = channel.manifest(VersionId(1, 1))
    shard = next(path for path, _ in first.files() if path.endswith(".safetensors"))
    os.remove(f"{trainer.root}/{first.folder}/{shard}")
    assert len([finding for finding in fsck(channel) if finding.lost]) == 6
    with pytest.raises(Unrepairable, match="nothing to repair it from"):
        repair(channel)


def test_a_compacted_version_has_the_same_content_and_costs_a_reader_nothing(trainer, channel, tmp_path):
    last = channel.latest()
    made = compact(channel, last)
    assert (made.kind, made.content_digest) == ("full", last.content_digest)
    assert cheapest(channel, made, held=lambda m: m.id == last.id).nbytes == 0
    assert not cheapest(channel, made).links
    stage = Stage(str(tmp_path / "stage"))
    assert same(staged(stage, trainer.root, last.id), trainer.state)
    assert same(staged(stage, trainer.root, made.id), trainer.state)
    stage.close()


def test_a_compaction_that_cannot_read_the_weights_fences_nobody(trainer, channel):
    before, last = list(channel.claims()), channel.latest()
    first = channel.manifest(VersionId(1, 1))
    damage(trainer.root, f"{first.folder}/model-00001-of-00001.safetensors")
    with pytest.raises(BrokenChain, match=rf"e1-v6 cannot be rebuilt: .*`ckptsync verify {trainer.root} e1-v1`"):
        compact(channel, last)
    assert list(channel.claims()) == before
    assert trainer.publish().parent.id == last.id, "the trainer goes on"


def test_a_trainer_that_still_runs_is_fenced_by_a_compaction(trainer, channel):
    compact(channel, channel.latest())
    with pytest.raises(Fenced):
        trainer.publish()
