"""Debris of dead attempts: what goes, and above all what stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from ckptsync.channel import Channel
from ckptsync.epochs import Epoch
from ckptsync.errors import StoreDenied, StoreUnavailable, VersionExists
from ckptsync.layout import manifest_path
from ckptsync.manifest import Manifest, data_folder
from ckptsync.store import LocalStore, open_store, put_bytes
from ckptsync.store.paths import temporary_name
from ckptsync.sweep import Swept, sweep_debris
from ckptsync.testing.hooks import Failing, HookedStore, matching
from ckptsync.version import VersionId

from .manifests import manifest

HOUR = 3600.0
NOTHING = Swept(0, 0, 0)


@pytest.fixture(params=["disk", pytest.param("s3", marks=pytest.mark.s3)])
def store(request, tmp_path):
    """The same rules on a folder and on a real S3 server."""
    if request.param == "disk":
        return open_store(str(tmp_path / "root"))
    root = request.getfixturevalue("s3_root")
    return open_store(root.url, options=root.options)


@pytest.fixture
def disk(tmp_path) -> LocalStore:
    return LocalStore(str(tmp_path / "root"))


def write_data(channel: Channel, version: VersionId, nonce: str, files: int = 2) -> str:
    """The data of an attempt; its folder."""
    folder = data_folder(version, nonce)
    for number in range(files):
        put_bytes(channel.store, f"{folder}/model-{number}.safetensors", bytes(100))
    return folder


def publish(channel: Channel, epoch: Epoch, number: int, nonce: str = "", value: bytes = b"\0" * 8) -> Manifest:
    nonce = nonce or f"n{epoch.number}x{number}"
    write_data(channel, VersionId(epoch.number, number), nonce)
    row = {"channel_id": channel.channel_id, "run_id": epoch.run_id, "nonce": nonce}
    return channel.commit(epoch, manifest(epoch.number, number, value, **row))


def folders(channel: Channel) -> set[str]:
    return {entry.path.rpartition("/")[0] for entry in channel.store.list("data")}


def age(store: LocalStore, seconds: float, folder: str = "data") -> None:
    """Make all files that much older."""
    for place, _, names in os.walk(os.path.join(store.url, folder)):
        for name in names:
            path = os.path.join(place, name)
            os.utime(path, (time.time(), os.stat(path).st_mtime - seconds))


def all_at_once(channel: Channel, epoch: Epoch) -> Swept:
    """A sweep to which everything is old enough: a grace time that lies in the future by more than the margin."""
    return sweep_debris(channel, epoch, grace=-HOUR)


def test_case_17_what_a_dead_attempt_left_is_swept_by_the_epoch_that_follows(store):
    channel = Channel.create(store)
    dead = channel.claim_epoch("run")
    committed = publish(channel, dead, 1)
    write_data(channel, VersionId(1, 2), "died")
    assert all_at_once(channel, dead) == NOTHING
    heir = channel.claim_epoch("run")
    assert all_at_once(channel, heir) == Swept(2, 200, 0)
    assert folders(channel) == {committed.folder}
    assert all_at_once(channel, heir) == NOTHING
    assert channel.latest().id == VersionId(1, 1)


def test_nothing_is_swept_before_the_grace_time(store):
    channel = Channel.create(store)
    channel.claim_epoch("run")
    folder = write_data(channel, VersionId(1, 1), "slow")
    heir = channel.claim_epoch("run")
    assert sweep_debris(channel, heir, grace=HOUR) == NOTHING
    assert sweep_debris(channel, heir, grace=0.0) == NOTHING, "a margin is added"
    assert folders(channel) == {folder}


def test_the_newest_file_of_a_folder_counts(disk):
    channel = Channel.create(disk)
    channel.claim_epoch("run")
    folder = write_data(channel, VersionId(1, 1), "slow")
    age(disk, 2 * HOUR)
    put_bytes(disk, f"{folder}/model-9.safetensors", b"still at it")
    heir = channel.claim_epoch("run")
    assert sweep_debris(channel, heir) == NOTHING
    age(disk, 2 * HOUR)
    assert sweep_debris(channel, heir).files == 3
    assert not os.path.exists(os.path.join(disk.url, folder))


def test_attempts_of_this_epoch_and_of_newer_ones_are_live(store):
    channel = Channel.create(store)
    first, second = channel.claim_epoch("run"), channel.claim_epoch("run")
    live = {write_data(channel, VersionId(epoch, 1), "live") for epoch in (1, 2, 3)}
    assert all_at_once(channel, first) == NOTHING
    assert folders(channel) == live
    assert all_at_once(channel, second).files == 2
    assert folders(channel) == live - {data_folder(VersionId(1, 1), "live")}


def test_case_46_the_data_of_the_attempt_that_lost_the_name_is_swept(store):
    channel = Channel.create(store)
    epoch = channel.claim_epoch("run")
    winner = publish(channel, epoch, 7, nonce="winner")
    with pytest.raises(VersionExists):
        publish(channel, epoch, 7, nonce="loser", value=b"\1" * 8)
    heir = channel.claim_epoch("run")
    assert all_at_once(channel, heir).files == 2
    assert folders(channel) == {winner.folder}


def test_case_4_leftovers_of_another_world_size_are_swept_and_the_version_stays_whole(store):
    channel = Channel.create(store)
    epoch = channel.claim_epoch("run")
    write_data(channel, VersionId(1, 7), "of-4-ranks", files=3)
    committed = publish(channel, epoch, 7, nonce="of-2-ranks")
    assert all_at_once(channel, channel.claim_epoch("run")).files == 3
    assert folders(channel) == {committed.folder}


def test_folders_of_a_version_whose_manifest_is_unreadable_stay(store, caplog):
    channel = Channel.create(store)
    epoch = channel.claim_epoch("run")
    publish(channel, epoch, 1)
    publish(channel, epoch, 2)
    write_data(channel, VersionId(1, 2), "other")
    put_bytes(store, manifest_path(VersionId(1, 2)), b'{"torn": ')
    before = folders(channel)
    channel = Channel.open(store)
    heir = channel.claim_epoch("run")
    assert all_at_once(channel, heir) == NOTHING
    assert folders(channel) == before
    assert "e1-v2 cannot be read" in caplog.text


def test_what_is_not_named_like_an_attempt_is_left_alone(store):
    channel = Channel.create(store)
    channel.claim_epoch("run")
    for path in ("data/notes.txt", "data/mine/x", "data/e1-v1-n/x", "data/e0001-v00000001/x", "data/.e0001/x"):
        put_bytes(store, path, b"x")
    before = folders(channel)
    assert all_at_once(channel, channel.claim_epoch("run")) == NOTHING
    assert folders(channel) == before


def test_nothing_is_swept_when_the_manifests_are_not_where_they_were(store, caplog):
    """An empty `manifests/` makes all data look like debris."""
    channel = Channel.create(store)
    committed = publish(channel, channel.claim_epoch("run"), 1)
    heir = channel.claim_epoch("run")
    store.delete(manifest_path(VersionId(1, 1)))
    assert all_at_once(channel, heir) == NOTHING
    assert folders(channel) == {committed.folder}
    assert "nothing is swept" in caplog.text


@pytest.mark.parametrize("mtime", [0.0, 1.0, 4e9])
@pytest.mark.parametrize("clock", [-1e9, 0.0, 1e9])
def test_case_50_wrong_times_and_clocks_never_delete_what_is_committed(disk, monkeypatch, mtime, clock):
    channel = Channel.create(disk)
    epoch = channel.claim_epoch("run")
    committed = {publish(channel, epoch, number).folder for number in (1, 2, 3)}
    fresh = write_data(channel, VersionId(1, 4), "fresh")
    for folder in committed:
        for name in os.listdir(os.path.join(disk.url, folder)):
            os.utime(os.path.join(disk.url, folder, name), (mtime, mtime))
    heir = channel.claim_epoch("run")
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + clock)
    assert sweep_debris(channel, heir, grace=60.0) == NOTHING
    assert folders(channel) == {*committed, fresh}, "this machine's clock has no say about debris either"


def test_files_that_cannot_be_deleted_do_not_keep_the_others(disk, caplog):
    channel = Channel.create(disk)
    channel.claim_epoch("run")
    write_data(channel, VersionId(1, 1), "died", files=6)
    heir = channel.claim_epoch("run")
    broken = Failing(lambda: StoreDenied("no"), matching("delete", part="safetensors"), times=2)
    channel = Channel.open(HookedStore(disk, broken))
    assert all_at_once(channel, heir).files == 4
    assert caplog.text.count("could not be deleted") == 1
    assert all_at_once(channel, heir).files == 2


@pytest.mark.parametrize("folder", ["data", "manifests"])
def test_a_store_that_cannot_be_listed_loses_nothing(disk, folder):
    channel = Channel.create(disk)
    committed = publish(channel, channel.claim_epoch("run"), 1)
    heir = channel.claim_epoch("run")
    away = Failing(lambda: StoreUnavailable("away"), matching("list", suffix=folder))
    with pytest.raises(StoreUnavailable):
        all_at_once(Channel.open(HookedStore(disk, away)), heir)
    assert folders(channel) == {committed.folder}


def test_case_17_temporary_files_of_dead_writers_go_and_those_of_live_epochs_stay(disk):
    channel = Channel.create(disk)
    for _ in range(2):
        channel.claim_epoch("run")
    dead = subprocess.run(
        [sys.executable, "-c", "from ckptsync.store.paths import temporary_name; print(temporary_name())"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    kept = {f"e0001-v00000001-a/{temporary_name()}", f"e0002-v00000001-b/{dead}"}
    for path in {f"e0001-v00000001-a/{dead}", *kept}:
        os.makedirs(os.path.join(disk.url, "data", os.path.dirname(path)), exist_ok=True)
        with open(os.path.join(disk.url, "data", path), "wb"):
            pass
    heir = Epoch(number=2, nonce="n", run_id="r", host="h", created=0.0)
    assert sweep_debris(channel, heir) == NOTHING
    age(disk, 2 * HOUR)
    assert sweep_debris(channel, heir) == Swept(0, 0, 1)
    found = {os.path.relpath(os.path.join(at, n), f"{disk.url}/data") for at, _, ns in os.walk(disk.url) for n in ns}
    assert {path for path in found if "tmp" in path} == kept


@pytest.mark.s3
@pytest.mark.parametrize("obstore", [False, True])
def test_case_17_uploads_of_dead_writers_are_aborted_and_those_of_live_epochs_stay(s3_root, obstore):
    channel = Channel.create(open_store(s3_root.url, options={**s3_root.options, "obstore": obstore}))
    channel.claim_epoch("run")
    heir = channel.claim_epoch("run")
    dead, live = (channel.store.write(f"{data_folder(VersionId(epoch, 1), 'n')}/model.safetensors") for epoch in (1, 2))
    for writer in (dead, live):
        writer.write(bytes(40 << 20))
    assert sweep_debris(channel, heir) == NOTHING
    assert all_at_once(channel, heir) == Swept(0, 0, 1)
    live.commit()
    assert folders(channel) == {data_folder(VersionId(2, 1), "n")}
    dead.abort()
