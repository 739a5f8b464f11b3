"""Staging from a real S3 server: what arrives, what is refused, and a server that is away for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ckptsync.channel import Channel
from ckptsync.errors import BadShard
from ckptsync.manifest import Manifest, TensorSpec
from ckptsync.store import Store, open_store
from ckptsync.store.base import put_bytes, read_bytes
from ckptsync.testing.engines import FakeEngine, weights_in
from tests.servers import seaweed
from tests.servers.fixtures import S3Root
from watchers.stage import MissingFile, Stage

from .actions import SHARD, Watch, run_until, step
from .publish import SCHEMA, TestPublisher

pytestmark = pytest.mark.s3

LARGE = [TensorSpec(f"layers.{n}.weight", "U8", (5 << 20,)) for n in range(8)]
"""Two shards of 20 MiB: several ranges each."""


@pytest.fixture
def store(s3_root: S3Root) -> Store:
    return open_store(s3_root.url, options=s3_root.options)


def publisher_on(store: Store) -> TestPublisher:
    return TestPublisher("", channel=Channel.create(store))


def bytes_of(store: Store, manifest: Manifest, name: str) -> bytes:
    return read_bytes(store, f"{manifest.folder}/{name}", 1 << 30)


def test_what_is_staged_from_s3_is_what_is_there(store: Store, folder: str) -> None:
    manifest, moved = publisher_on(store).publish(specs=LARGE, max_bytes=21 << 20), []
    version = Stage(folder).stage(Channel.open(store), manifest, moved.append, reader="me")
    for name, _ in manifest.files():
        with open(f"{version.folder}/{name}", "rb") as file:
            assert file.read() == bytes_of(store, manifest, name)
    assert sum(moved) == manifest.nbytes
    assert list(store.list("leases")) == []


def test_a_flipped_bit_on_s3_is_refused_and_the_next_version_is_loaded(
    store: Store, watch: Watch, engine: FakeEngine
) -> None:
    publisher = publisher_on(store)
    publisher.publish()
    watcher = watch(engine, root=store)
    step(watcher)
    damaged = publisher.publish()
    data = bytearray(bytes_of(store, damaged, SHARD))
    data[-5] ^= 1
    put_bytes(store, f"{damaged.folder}/{SHARD}", bytes(data))
    receipt = step(watcher)
    assert (receipt.state, receipt.label) == ("refused", "e1-v1")
    assert receipt.error is not None
    assert f"{SHARD}: xxh3-128 is" in receipt.error["message"]
    publisher.publish()
    assert step(watcher).label == "e1-v3"


def test_an_object_that_is_absent_is_missing_and_one_of_another_size_is_refused(store: Store, folder: str) -> None:
    manifest = publisher_on(store).publish()
    data = bytes_of(store, manifest, SHARD)
    store.delete(f"{manifest.folder}/{SHARD}")
    with pytest.raises(MissingFile, match=SHARD):
        Stage(folder).stage(Channel.open(store), manifest)
    put_bytes(store, f"{manifest.folder}/{SHARD}", data[:-1])
    with pytest.raises(BadShard, match="bytes on the store"):
        Stage(folder).stage(Channel.open(store), manifest)


@pytest.fixture
def own_server(tmp_path: Any) -> Iterator[seaweed.S3Server]:
    """A server that may be killed."""
    server = seaweed.start(str(tmp_path / "server"))
    yield server
    server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("deadline", [30.0, 1.0], ids=["within the store's retries", "beyond them"])
def test_a_server_that_is_away_for_some_seconds_in_mid_transfer_costs_only_time(
    own_server: seaweed.S3Server, watch: Watch, deadline: float
) -> None:
    url, options = f"s3://{own_server.bucket}/run", {**own_server.options, "deadline": deadline}
    publisher, engine = publisher_on(open_store(url, options=own_server.options)), FakeEngine(SCHEMA)
    publisher.publish()
    away: list[threading.Thread] = []

    def come_back() -> None:
        time.sleep(3.0)  # the outage itself
        own_server.launch()

    def leave(_: int) -> None:
        if engine.label and not away:
            own_server.kill()
            away.append(threading.Thread(target=come_back))
            away[0].start()

    watcher = watch(engine, root=open_store(url, options=options), progress=leave, poll=0.2)
    step(watcher)
    publisher.publish()
    run_until(watcher, lambda: engine.label == "e1-v2", seconds=120.0)
    away[0].join()
    assert watcher.health.ready
    assert engine.calls.count("pause") == 2
    version = watcher.stage.find(publisher.channel.latest())
    assert version is not None
    assert engine.weights == weights_in(version)
