"""One look at a channel: versions, branches, readers and what they hold, on a folder and on a real S3 server."""

from __future__ import annotations

import time

import pytest

from ckptsync import holds
from ckptsync.channel import Channel
from ckptsync.holds import READER_SECONDS
from ckptsync.rollback import roll_back
from ckptsync.status import ChannelStatus, Observer
from ckptsync.store import put_bytes
from ckptsync.store.base import Store
from ckptsync.testing.engines import FakeEngine
from ckptsync.testing.hooks import HookedStore, Recorder
from ckptsync.version import VersionId
from tests.watcher.publish import SCHEMA, TestPublisher
from watchers.watcher import Watcher

from .channels import FILES, Trainer, collect


def look(store: Store) -> ChannelStatus:
    return Observer(Channel.open(store)).look()


def row(status: ChannelStatus, label: str):
    return next(version for version in status.versions if version.version == label)


def test_versions_branches_and_what_they_are_made_from(trainer, store):
    trainer.publish(1, step=10)
    trainer.publish_deltas(2)
    trainer.publish(3)
    Trainer(trainer.channel, VersionId(1, 2)).publish(3, kind="adapter")
    roll_back(trainer.channel, trainer.channel.manifest(VersionId(1, 1)), "worse")
    holds.pin(trainer.channel, VersionId(1, 1), "good")
    status = look(store)
    assert status.newest == "e3-v4"
    assert [(each.version, each.kind, each.live) for each in status.versions] == [
        ("e1-v1", "full", True),
        ("e1-v2", "delta", True),
        ("e1-v3", "full", False),
        ("e2-v3", "adapter", True),
        ("e3-v4", "full", True),
    ]
    assert row(status, "e1-v2").parent == "e1-v1"
    assert (row(status, "e1-v1").pinned, row(status, "e1-v1").step) == ("good", 10)
    assert (row(status, "e3-v4").data_of, row(status, "e3-v4").stored) == ("e1-v1", 0)
    assert row(status, "e1-v1").stored == FILES * 100
    assert [(each.epoch, each.resumed_from) for each in status.epochs] == [(1, None), (2, "e1-v2"), (3, "e2-v3")]
    assert status.disk == sum(entry.size for entry in store.list(""))


def test_who_serves_what_and_how_far_behind(disk, tmp_path):
    publisher = TestPublisher(disk.url)
    publisher.publish()
    reader = Watcher(disk.url, FakeEngine(SCHEMA), stage=f"{tmp_path}/stage", reader="engine-0", events=False)
    reader.step()
    (fresh,) = look(disk).readers
    assert (fresh.serves, fresh.lag, fresh.behind, fresh.follow, fresh.state) == ("e1-v1", 0, 0.0, "latest", "serving")
    assert fresh.alive
    publisher.publish()
    publisher.publish()
    status = look(disk)
    (late,) = status.readers
    assert (late.serves, late.lag) == ("e1-v1", 2)
    assert 0.0 < late.behind <= time.time() - row(status, "e1-v2").created
    assert row(status, "e1-v1").serving == ("engine-0",)
    reader.close()


def test_readers_that_are_silent_do_not_count_as_serving(on_disk, disk, monkeypatch):
    on_disk.publish(1)
    on_disk.channel.write_receipt("gone", {"label": "e1-v1"})
    later = time.time() + READER_SECONDS + 60
    monkeypatch.setattr(time, "time", lambda: later)
    status = look(disk)
    assert not status.readers[0].alive
    assert status.readers[0].silent > READER_SECONDS
    assert row(status, "e1-v1").serving == ()


def test_how_long_ago_a_reader_was_heard_is_told_as_it_is_and_what_it_serves_stays_kept_a_minute_longer(
    on_disk, disk, monkeypatch
):
    monkeypatch.setattr("ckptsync.store.clock.MARGIN", 60.0)
    on_disk.publish(1)
    on_disk.channel.write_receipt("r", {"label": "e1-v1"})
    written = next(iter(disk.list("receipts"))).modified
    monkeypatch.setattr(time, "time", lambda: written + 22.0)
    assert look(disk).readers[0].silent == pytest.approx(22.0)
    monkeypatch.setattr(time, "time", lambda: written + READER_SECONDS + 30.0)
    (reader,) = look(disk).readers
    assert (reader.alive, reader.silent) == (True, pytest.approx(READER_SECONDS + 30.0))


def test_leases_debris_and_data_that_wait_are_counted(trainer, store):
    trainer.publish(1, 2, 3)
    collect(store, grace=3600.0)
    trainer.channel.lease("engine-0", VersionId(1, 2), 600.0)
    put_bytes(store, "data/e0001-v00000009-died/model.safetensors", bytes(70))
    status = look(store)
    assert [(lease.reader, lease.version) for lease in status.leases] == [("engine-0", VersionId(1, 2))]
    assert status.debris == {"data/e0001-v00000009-died": 70}
    assert status.waiting == {"e1-v1": FILES * 100}


def test_what_cannot_be_read_is_said_and_hides_nothing_else(on_disk, disk):
    on_disk.publish(1, 2)
    put_bytes(disk, "receipts/r.json", b'{"torn')
    put_bytes(disk, "manifests/e0001-v00000003.json", b'{"torn')
    put_bytes(disk, "pins/e0001-v00000002.json", b'{"torn')
    status = look(disk)
    assert status.newest == "e1-v2"
    assert "receipts/r.json cannot be read" in status.problems[0]
    assert row(status, "e1-v2").pinned == ""
    assert "not complete JSON" in row(status, "e1-v3").problem


def test_a_second_look_reads_no_manifest_again_and_writes_nothing(on_disk, disk):
    on_disk.publish(1, 2)
    recorder = Recorder()
    observer = Observer(Channel.open(HookedStore(disk, recorder)))
    observer.look()
    recorder.seen.clear()
    observer.look()
    assert [path for operation, path in recorder.seen if operation == "open" and "manifests" in path] == []
    assert recorder.changes() == []


def test_a_file_that_a_killed_writer_began_is_debris(on_disk, disk):
    on_disk.publish(1)
    dead = disk.write("data/e0001-v00000002-died/model-00001-of-00001.safetensors")
    assert list(look(disk).debris) == ["data/e0001-v00000002-died"]
    dead.abort()
    assert look(disk).debris == {}


def test_what_is_known_of_a_version_is_forgotten_with_it(on_disk, disk):
    on_disk.publish(1, 2)
    observer = Observer(Channel.open(disk))
    assert len(observer.look().versions) == 2
    disk.delete("manifests/e0001-v00000001.json")
    observer.look()
    assert list(observer._known) == [VersionId(1, 2)]
