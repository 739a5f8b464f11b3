"""Publishing to a real S3 server: from FSDP2 ranks, over an outage, and with a wrong secret."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from ckptsync.channel import Channel
from ckptsync.errors import CkptSyncError, StoreDenied, StoreUnavailable
from ckptsync.publish import Publisher
from ckptsync.store import open_store
from ckptsync.verify import verify_version
from tests.servers import seaweed
from tests.servers.fixtures import S3Root
from tests.trainer.models import TinyModel, shard
from tests.trainer.ranks_harness import returned, run_ranks

pytestmark = [pytest.mark.s3, pytest.mark.slow]


def publish_twice(rank: int, url: str, options: Mapping[str, object]) -> list[str]:
    store = open_store(url, options=options)
    model = shard(TinyModel())
    with Publisher(store, dtype=torch.bfloat16, shard_bytes=1500) as publisher:
        labels = [publisher.publish(model, step=1).version.label]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        return [*labels, publisher.publish(model, step=2).version.label]


@pytest.mark.distributed
def test_two_fsdp2_ranks_publish_to_a_bucket(s3_root: S3Root) -> None:
    ranks = returned(run_ranks(2, publish_twice, s3_root.url, s3_root.options))
    assert ranks == [["e1-v1", "e1-v2"]] * 2
    channel = Channel.open(open_store(s3_root.url, options=s3_root.options))
    assert [verify_version(channel, version).problems for version in channel.versions()] == [(), ()]
    assert len(channel.latest().tracks["model"].files) > 2, "several shards and an index"


def weights(value: float) -> dict[str, torch.Tensor]:
    return {f"layers.{i}.w": torch.full((3 << 20,), value + i).bfloat16() for i in range(4)}


def test_a_server_that_is_away_for_ten_seconds_in_mid_publish_is_survived(tmp_path: Path) -> None:
    server = seaweed.start(str(tmp_path))
    try:
        store = open_store(f"s3://{server.bucket}/run", options=server.options)
        with Publisher(store) as publisher:
            server.kill()
            back = threading.Timer(10, server.launch)
            back.start()
            done = publisher.publish(weights(1.0))
            back.join()
        assert verify_version(Channel.open(store), done.version).ok
    finally:
        server.kill()


def test_a_server_that_stays_away_leaves_no_version_and_the_next_publish_works(tmp_path: Path) -> None:
    server = seaweed.start(str(tmp_path))
    try:
        store = open_store(f"s3://{server.bucket}/run", options={**server.options, "deadline": 5.0})
        with Publisher(store) as publisher:
            publisher.publish(weights(1.0))
            server.kill()
            with pytest.raises(StoreUnavailable):
                publisher.publish(weights(2.0))
            server.launch()
            assert Channel.open(store).latest().id.number == 1
            done = publisher.publish(weights(3.0))
        assert Channel.open(store).latest().id == done.version
        assert verify_version(Channel.open(store), done.version).ok
    finally:
        server.kill()


def test_a_wrong_secret_is_told_at_once_and_not_shown(s3_root: S3Root) -> None:
    options = {**s3_root.options, "secret": "not-the-secret"}
    with pytest.raises(StoreDenied) as raised:
        Publisher(open_store(s3_root.url, options=options))
    error: BaseException | None = raised.value
    while error is not None:
        assert not isinstance(error, CkptSyncError) or "not-the-secret" not in str(error)
        error = error.__cause__
    assert list(open_store(s3_root.url, options=s3_root.options).list("")) == []
