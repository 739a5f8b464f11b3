"""A new version with an earlier one's weights: nothing copied, truthfully named, and kept whole."""

from __future__ import annotations

import pytest
import torch

from ckptsync import holds
from ckptsync.channel import Channel
from ckptsync.copies import export_version, import_version
from ckptsync.errors import (
    BadManifest,
    Fenced,
    InvalidInput,
    NotFound,
    StoreUnavailable,
    UnsupportedFormat,
    VersionGone,
)
from ckptsync.layout import collected_path, manifest_path
from ckptsync.manifest import Origin, decode, seal
from ckptsync.publish import Publisher
from ckptsync.rollback import roll_back
from ckptsync.store import put_bytes, read_bytes
from ckptsync.testing.engines import FakeEngine
from ckptsync.testing.hooks import Failing, HookedStore, Recorder, matching
from ckptsync.verify import verify_version
from ckptsync.version import VersionId
from tests.core.manifests import manifest
from tests.watcher.actions import weights
from tests.watcher.publish import SCHEMA, TestPublisher
from watchers.watcher import Watcher

from .channels import FILES, Trainer, collect, numbers, with_data


def v(number: int, epoch: int = 1) -> VersionId:
    return VersionId(epoch, number)


def back_to(store, number: int):
    channel = Channel.open(store)
    return roll_back(channel, channel.resolve(str(number)), "reward collapsed")


def test_watchers_that_follow_latest_load_the_earlier_weights_under_the_new_label(disk, tmp_path):
    publisher, engine = TestPublisher(disk.url), FakeEngine(SCHEMA)
    first, _ = publisher.publish(seed=1), publisher.publish(seed=2)
    reader = Watcher(disk.url, engine, stage=str(tmp_path / "stage"), poll=0.01, events=False)
    assert reader.step().label == "e1-v2"
    new = back_to(disk, 1)
    assert reader.step().label == "e2-v3"
    assert engine.weights == weights(disk.url, first)
    assert (new.content_digest, new.data_of) == (first.content_digest, Origin(epoch=1, number=1, nonce=first.nonce))
    reader.close()


def test_no_byte_of_data_is_written_or_read(trainer, store):
    trainer.publish(1, 2, 3)
    recorder = Recorder()
    channel = Channel.open(HookedStore(store, recorder))
    roll_back(channel, channel.resolve("1"))
    assert not [path for operation, path in recorder.seen if path.startswith("data/") and operation != "list"]
    assert with_data(store) == {1: FILES, 2: FILES, 3: FILES}


def test_step_metadata_and_trainer_state_are_those_of_the_weights_and_the_producer_says_what_happened(on_disk, disk):
    on_disk.publish(1, step=7, metadata={"reward": 0.5})
    on_disk.publish(2, step=8)
    new = back_to(disk, 1)
    assert (new.id, new.step, new.metadata) == (v(3, 2), 7, {"reward": 0.5})
    assert new.producer["rollback"] == {"to": "e1-v1", "from": "e1-v2", "why": "reward collapsed"}
    assert new.previous == v(2)


def test_a_trainer_that_still_runs_is_fenced_and_the_next_one_goes_on_from_there(disk):
    with Publisher(disk) as publisher:
        for value in (1.0, 2.0):
            publisher.publish({"w": torch.full((8,), value)})
        new = back_to(disk, 1)
        assert verify_version(Channel.open(disk), new.id).ok
        with pytest.raises(Fenced):
            publisher.publish({"w": torch.full((8,), 3.0)})
    with Publisher(disk) as heir:
        done = heir.publish({"w": torch.full((8,), 4.0)})
    assert done.version == v(4, 3)
    assert done.manifest.previous == v(3, 2)
    channel = Channel.open(disk)
    assert channel.versions() == [v(1), v(2), v(3, 2), v(4, 3)]


def test_a_rollback_to_a_rollback_points_at_the_first_data(on_disk, disk):
    on_disk.publish(1, 2)
    back_to(disk, 1)
    Trainer(Channel.open(disk)).publish(4)
    assert back_to(disk, 3).folder == Channel.open(disk).resolve("1").folder


def test_retention_keeps_the_data_as_long_as_the_version_that_uses_them(on_disk, disk):
    on_disk.publish(1, 2, 3)
    new = back_to(disk, 1)
    assert collect(disk).versions == (v(2),)
    assert verify_files(disk, new)
    heir = Trainer(Channel.open(disk))
    heir.publish(5)
    assert collect(disk).versions == (v(3),)
    heir.publish(6)
    assert collect(disk).versions == (v(4, 2), v(1)), "together, the one that needs first"
    assert with_data(disk) == {5: FILES, 6: FILES}


def verify_files(store, manifest) -> bool:
    return {e.path for e in store.list(manifest.folder)} >= {f"{manifest.folder}/{n}" for n, _ in manifest.files()}


def test_a_reader_of_the_rolled_back_version_keeps_data_that_wait_for_their_grace_time(on_disk, disk):
    on_disk.publish(1, 2)
    back_to(disk, 1)
    Trainer(Channel.open(disk)).publish(4, 5)
    assert set(collect(disk, grace=3600.0).versions) == {v(1), v(2), v(3, 2)}
    on_disk.channel.lease("engine-0", v(3, 2), 600.0)
    assert collect(disk).files == FILES, "those of e1-v2"
    assert with_data(disk) == {1: FILES, 4: FILES, 5: FILES}


def test_a_note_that_names_another_folder_deletes_nothing(on_disk, disk):
    on_disk.publish(1, 2)
    for folder in ("data", "data/e0001-v00000002-nonce1x2", "data/e0001-v00000009-n/.."):
        put_bytes(disk, collected_path(v(9)), b'{"folder": "%s", "needs": []}' % folder.encode())
        with pytest.raises(BadManifest, match="not a folder of e1-v9"):
            collect(disk)
    assert with_data(disk) == {1: FILES, 2: FILES}


def test_a_version_that_is_being_collected_or_not_whole_is_not_gone_back_to(on_disk, disk):
    on_disk.publish(1, 2, 3)
    put_bytes(disk, collected_path(v(1)), b"{}")
    with pytest.raises(VersionGone):
        back_to(disk, 1)
    disk.delete(f"{Channel.open(disk).resolve('2').folder}/model.safetensors")
    with pytest.raises(NotFound, match=r"e1-v2 is not whole any more: .*model.safetensors"):
        back_to(disk, 2)
    with pytest.raises(InvalidInput, match="newest version already"):
        back_to(disk, 3)
    assert numbers(disk) == [1, 2, 3]
    assert list(disk.list("leases")) == []


def test_a_reader_that_knows_only_format_1_refuses_it_and_stays_on_the_version_before(on_disk, disk, monkeypatch):
    on_disk.publish(1, 2)
    back_to(disk, 1)
    assert b'"format":2' in read_bytes(disk, manifest_path(v(3, 2)), 1 << 20)
    monkeypatch.setattr("ckptsync.manifest.SHARED_FORMAT", None)
    with pytest.raises(UnsupportedFormat):
        Channel.open(disk).manifest(v(3, 2))
    assert Channel.open(disk).latest().id == v(2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"format": 2},
        {"format": 1, "data_of": Origin(epoch=1, number=1, nonce="n")},
        {"format": 2, "data_of": Origin(epoch=1, number=2, nonce="n")},
        {"format": 2, "data_of": Origin(epoch=1, number=-1, nonce="n")},
        {"format": 2, "data_of": Origin(epoch=1, number=1, nonce="../n")},
    ],
)
def test_a_manifest_whose_data_cannot_be_where_it_says_is_refused(wrong):
    with pytest.raises(BadManifest):
        manifest(1, 2, **wrong)


def test_a_manifest_without_the_new_fields_keeps_its_bytes():
    data = seal(manifest(1, 2))[1]
    assert b"data_of" not in data
    assert b"previous" not in data
    assert seal(decode(data))[1] == data


def test_an_export_of_it_is_a_version_like_any_other_when_it_is_imported_again(disk, tmp_path):
    publisher = TestPublisher(disk.url)
    publisher.publish()
    publisher.publish()
    new = back_to(disk, 1)
    export_version(Channel.open(disk), new, str(tmp_path / "out"))
    again = import_version(Channel.create(str(tmp_path / "other")), str(tmp_path / "out"), "run")
    assert (again.format, again.content_digest) == (1, new.content_digest)
    assert verify_version(Channel.open(str(tmp_path / "other")), again.id).ok


def test_it_can_be_pinned(on_disk, disk):
    on_disk.publish(1, 2)
    new = back_to(disk, 1)
    holds.pin(Channel.open(disk), new.id, "good")
    Trainer(Channel.open(disk)).publish(4, 5)
    assert collect(disk).versions == (v(2),)


def test_without_a_lease_on_what_it_goes_back_to_nothing_is_rolled_back(on_disk, disk):
    on_disk.publish(1, 2)
    no_lease = Failing(lambda: StoreUnavailable("no answer"), matching("write", part="leases/"))
    channel = Channel.open(HookedStore(disk, no_lease))
    with pytest.raises(StoreUnavailable):
        roll_back(channel, channel.resolve("1"))
    assert list(Channel.open(disk).claims()) == [1]
