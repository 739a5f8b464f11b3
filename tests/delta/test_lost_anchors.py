"""A full version in the middle of a chain is lost or damaged: its own delta leads past it."""

from __future__ import annotations

import os

import pytest

from ckptsync import Channel
from ckptsync.copies import export_version
from ckptsync.errors import BadShard
from ckptsync.fsck import fsck, needed, repair
from ckptsync.manifest import Manifest
from ckptsync.shards.tensors import checkpoint_tensors
from ckptsync.verify import verify_version
from ckptsync.version import VersionId
from watchers.stage import Stage

from .test_versions import Trainer, damage, delta_file, same, staged

ANCHOR = VersionId(1, 4)


@pytest.fixture
def trainer(tmp_path) -> Trainer:
    """e1-v1 and e1-v4 are full, and e1-v4 is a delta against e1-v3 as well."""
    trainer = Trainer(str(tmp_path / "root"), skip=(), anchor_every=3)
    trainer.publish(5)
    return trainer


@pytest.fixture
def channel(trainer: Trainer) -> Channel:
    return Channel.open(trainer.root)


def shard_of(manifest: Manifest) -> str:
    return f"{manifest.folder}/{next(path for path, _ in manifest.files() if path.endswith('.safetensors'))}"


@pytest.fixture(params=["removed", "shorter"])
def lost(trainer: Trainer, channel: Channel, request: pytest.FixtureRequest) -> None:
    path = os.path.join(trainer.root, shard_of(channel.manifest(ANCHOR)))
    if request.param == "removed":
        os.remove(path)
    else:
        os.truncate(path, os.path.getsize(path) - 1)


@pytest.mark.usefixtures("lost")
@pytest.mark.parametrize("version", [ANCHOR, VersionId(1, 5)])
def test_it_and_what_follows_are_read_by_its_delta(trainer, channel, version: VersionId, tmp_path) -> None:
    export_version(channel, channel.manifest(version), str(tmp_path / "out"))
    assert same(dict(checkpoint_tensors(str(tmp_path / "out"))), trainer.held[version])
    stage = Stage(str(tmp_path / "stage"))
    assert same(staged(stage, trainer.root, version), trainer.held[version])
    stage.close()


@pytest.mark.usefixtures("lost")
def test_a_stage_that_has_the_version_before_makes_it_from_that(trainer, channel, tmp_path) -> None:
    stage = Stage(str(tmp_path / "stage"))
    staged(stage, trainer.root, VersionId(1, 3))
    os.remove(os.path.join(trainer.root, shard_of(channel.manifest(VersionId(1, 1)))))
    assert same(staged(stage, trainer.root, VersionId(1, 5)), trainer.held[VersionId(1, 5)])
    stage.close()


@pytest.mark.usefixtures("lost")
def test_fsck_says_what_is_missing_and_that_nothing_is_lost_and_a_repair_loses_nothing(trainer, channel) -> None:
    found = fsck(channel)
    assert [(finding.version, finding.lost) for finding in found] == [(ANCHOR, False)]
    assert not needed(channel, found)
    made = repair(channel)
    assert (made.kind, made.previous) == ("full", VersionId(1, 5))
    assert channel.versions() == [*map(VersionId, [1] * 5, range(1, 6)), made.id]
    assert verify_version(channel, made.id).ok
    assert repair(channel) is None


def test_a_lost_one_that_is_the_newest_is_made_again_by_a_repair(tmp_path) -> None:
    trainer = Trainer(str(tmp_path / "root"), skip=(), anchor_every=3)
    last = trainer.publish(4)
    assert last.kind == "full"
    os.remove(os.path.join(trainer.root, shard_of(last)))
    channel = Channel.open(trainer.root)
    made = repair(channel)
    assert (made.kind, made.content_digest) == ("full", last.content_digest)
    assert verify_version(channel, made.id).ok


def test_a_bit_that_flipped_in_it_is_found_by_a_repair_and_gone_round(trainer, channel, tmp_path) -> None:
    damage(trainer.root, shard_of(channel.manifest(ANCHOR)))
    with pytest.raises(BadShard):
        export_version(channel, channel.manifest(ANCHOR), str(tmp_path / "out"))
    assert fsck(channel) == [], "the bytes of full versions are not read"
    assert [(finding.version, finding.lost) for finding in fsck(channel, read_newest=True)] == [(ANCHOR, False)]
    made = repair(channel)
    assert made.content_digest == channel.manifest(VersionId(1, 5)).content_digest
    assert verify_version(channel, made.id).ok


def test_what_cannot_be_read_is_left_behind_by_a_repair_that_goes_back_to_a_full_version(trainer, channel) -> None:
    damage(trainer.root, delta_file(channel.manifest(VersionId(1, 5))))
    made = repair(channel)
    assert made.previous == ANCHOR
    assert made.content_digest == channel.manifest(ANCHOR).content_digest
    assert VersionId(1, 5) not in channel.versions()
    assert not [finding for finding in fsck(channel) if finding.version in channel.versions()]


def test_a_repair_goes_on_to_what_can_be_read_where_an_older_full_version_is_damaged_too(tmp_path) -> None:
    trainer = Trainer(str(tmp_path / "root"), skip=(), anchor_every=3)
    trainer.publish(7)
    channel = Channel.open(trainer.root)
    damage(trainer.root, delta_file(channel.manifest(VersionId(1, 7))))
    for number in (4, 7):
        damage(trainer.root, shard_of(channel.manifest(VersionId(1, number))))
    made = repair(channel)
    assert made.content_digest == channel.manifest(VersionId(1, 6)).content_digest
    assert verify_version(channel, made.id).ok
