"""Deltas over a real S3 server: what is read is what is needed."""

from __future__ import annotations

import pytest

from ckptsync import Channel, DeltaPolicy, Publisher, open_store, resume
from ckptsync.store.base import Reader
from ckptsync.store.hooks import HookedStore
from ckptsync.verify import verify_version
from tests.servers.fixtures import S3Root
from watchers.stage import Stage

from .test_versions import model, same, staged, step

pytestmark = [pytest.mark.s3, pytest.mark.slow]


class Recording(HookedStore):
    """Remembers what was opened."""

    def __init__(self, store) -> None:
        super().__init__(store, flush=lambda: None, refresh=lambda: None)
        self.opened: list[str] = []

    def open(self, path: str) -> Reader:
        self.opened.append(path)
        return super().open(path)


def test_versions_in_a_bucket_are_rebuilt_from_what_is_here_and_the_changes(s3_root: S3Root, tmp_path) -> None:
    store = open_store(s3_root.url, options=s3_root.options)
    state = model()
    with Publisher(store, delta=DeltaPolicy(skip=(2,))) as publisher:
        for seed in range(4):
            step(state, seed)
            publisher.publish(state)
    watched = Recording(open_store(s3_root.url, options=s3_root.options))
    channel, stage = Channel.open(watched), Stage(str(tmp_path / "stage"))
    for version in channel.committed():
        assert verify_version(channel, version).ok
    stage.stage(channel, channel.manifest(channel.committed()[2]))
    watched.opened.clear()
    assert same(staged(stage, watched, channel.committed()[3]), state)
    assert not [path for path in watched.opened if "/model-" in path], "no shard is fetched"
    target = {name: tensor.clone().zero_() for name, tensor in state.items()}
    resume(watched, target)
    assert same(target, state)
    stage.close()
