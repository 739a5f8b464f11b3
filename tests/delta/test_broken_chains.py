"""Whoever reads a version whose chain is damaged is told which version, which file, and what to do."""

from __future__ import annotations

import os
import shutil

import pytest

from ckptsync import Channel, resume
from ckptsync.copies import export_version
from ckptsync.errors import CkptSyncError
from ckptsync.layout import manifest_path
from ckptsync.verify import verify_version
from ckptsync.version import VersionId
from watchers.stage import Stage

from .test_versions import Trainer, delta_file, model

FIRST, SECOND, LAST = VersionId(1, 1), VersionId(1, 2), VersionId(1, 3)
SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A full version and two deltas."""
    trainer = Trainer(str(tmp_path_factory.mktemp("published") / "root"), skip=())
    trainer.publish(3)
    trainer.publisher.close()
    return trainer


@pytest.fixture
def channel(published, tmp_path):
    """A copy of it, to be damaged."""
    return Channel.open(shutil.copytree(published.root, tmp_path / "root").as_posix())


def in_the_middle(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(4096 + 100)
        file.write(b"rot")


def shorter(path: str) -> None:
    os.truncate(path, os.path.getsize(path) - 1)


def a_folder(path: str) -> None:
    os.remove(path)
    os.makedirs(path)


def a_link(path: str) -> None:
    os.rename(path, f"{path}.aside")
    os.symlink(f"{path}.aside", path)


def full_shard(channel: Channel) -> str:
    return f"{channel.manifest(FIRST).folder}/{SHARD}"


def middle_delta(channel: Channel) -> str:
    return delta_file(channel.manifest(SECOND))


def middle_manifest(channel: Channel) -> str:
    return manifest_path(SECOND)


def exported(channel, tmp_path):
    export_version(channel, channel.manifest(LAST), str(tmp_path / "out"))


def loaded(channel, tmp_path):
    stage = Stage(str(tmp_path / "stage"))
    try:
        stage.release(stage.stage(channel, channel.manifest(LAST)))
    finally:
        stage.close()


def resumed(channel, tmp_path):
    resume(channel.store.url, model(seed=9), version=str(LAST))


def verified(channel, tmp_path):
    (problem, *_) = verify_version(channel, LAST).problems
    raise CkptSyncError(problem.message)


@pytest.mark.parametrize(
    ("which", "damaged", "version"),
    [
        (full_shard, os.remove, FIRST),
        (full_shard, in_the_middle, FIRST),
        (full_shard, shorter, FIRST),
        (full_shard, a_folder, FIRST),
        (full_shard, a_link, FIRST),
        (middle_delta, os.remove, SECOND),
        (middle_delta, in_the_middle, SECOND),
        (middle_delta, a_link, SECOND),
        (middle_manifest, os.remove, SECOND),
        (middle_manifest, shorter, SECOND),
    ],
)
@pytest.mark.parametrize("read", [exported, loaded, resumed, verified])
def test_the_version_and_the_file_that_are_damaged_are_named_with_a_remedy(
    read, which, damaged, version, published, channel, tmp_path
):
    path = which(channel)
    damaged(os.path.join(channel.store.url, path))
    fresh = Channel.open(channel.store.url)
    with pytest.raises(CkptSyncError) as failed:
        read(fresh, tmp_path)
    said = str(failed.value)
    assert str(version) in said
    assert path in said
    assert "another version" in said
