"""Deleting: what goes in which order, who can stop it, and what a bad moment leaves behind."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptsync import holds
from ckptsync.channel import Channel
from ckptsync.collect import Collected, Collector
from ckptsync.errors import BadManifest, Conflict, NotFound, StoreDenied, StoreUnavailable, VersionGone, VersionNotFound
from ckptsync.layout import collected_path, lease_path, manifest_path
from ckptsync.retention import Retention
from ckptsync.store import LocalStore, put_bytes
from ckptsync.store.clock import StoreClock
from ckptsync.sweep import sweep_debris, unfinished_attempts
from ckptsync.testing.hooks import CHANGES, Failing, HookedStore, Recorder, matching
from ckptsync.version import VersionId

from .channels import FILES, Trainer, collect, notes, numbers, with_data


def v(number: int, epoch: int = 1) -> VersionId:
    return VersionId(epoch, number)


def held(store):
    return holds.held(store, StoreClock.ask(store, "collector"))


def test_versions_beyond_the_newest_go_with_their_data_and_the_others_are_whole(trainer, store):
    trainer.publish(1, 2, 3, 4)
    assert collect(store) == Collected((v(2), v(1)), 2 * FILES, 2 * FILES * 100, 0)
    assert numbers(store) == [3, 4]
    assert with_data(store) == {3: FILES, 4: FILES}
    assert notes(store) == []
    assert Channel.open(store).poll() == v(4)
    assert collect(store) == Collected((), 0, 0, 0)
    with pytest.raises(VersionGone):
        Channel.open(store).resolve("1")


def test_the_data_stay_for_the_grace_time(trainer, store):
    trainer.publish(1, 2, 3)
    assert collect(store, grace=3600.0) == Collected((v(1),), 0, 0, 1)
    assert numbers(store) == [2, 3]
    assert with_data(store) == {1: FILES, 2: FILES, 3: FILES}
    assert collect(store, grace=3600.0) == Collected((), 0, 0, 1)
    assert collect(store).files == FILES
    assert with_data(store) == {2: FILES, 3: FILES}


def test_case_17_the_sweep_of_a_new_attempt_leaves_data_alone_that_wait_for_their_grace_time(on_disk, disk):
    on_disk.publish(1, 2, 3)
    collect(disk, grace=3600.0)
    heir = on_disk.channel.claim_epoch("run")
    assert sweep_debris(on_disk.channel, heir, grace=-1e6).files == 0
    assert with_data(disk) == {1: FILES, 2: FILES, 3: FILES}
    assert unfinished_attempts(Channel.open(disk)) == {}


def test_case_29_a_lease_keeps_the_version(on_disk, disk):
    on_disk.publish(1, 2, 3, 4)
    on_disk.channel.lease("engine-0", v(1), 600.0)
    assert collect(disk).versions == (v(2),)
    assert numbers(disk) == [1, 3, 4]
    on_disk.channel.release("engine-0")
    assert collect(disk).versions == (v(1),)


def test_a_lease_ends_by_the_stores_clock_whatever_the_readers_says(trainer, store, monkeypatch):
    trainer.publish(1, 2, 3)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 1e6)
    trainer.channel.lease("from the future", v(1), 5.0)
    assert collect(store).versions == (v(1),)


def test_case_29_a_lease_that_came_after_the_manifest_went_keeps_the_data(trainer, store):
    trainer.publish(1)
    trainer.publish_deltas(2, 3)
    trainer.publish(4, 5)
    assert collect(store, grace=3600.0).versions == (v(3), v(2), v(1))
    trainer.channel.lease("engine-0", v(2), 600.0)
    assert collect(store).waiting == 2, "2 and the version that it is made from"
    assert with_data(store) == {1: FILES, 2: FILES, 4: FILES, 5: FILES}
    trainer.channel.release("engine-0")
    assert collect(store).files == 2 * FILES


def test_a_pin_keeps_the_version_until_it_is_taken_away(on_disk, disk):
    on_disk.publish(1, 2, 3, 4)
    holds.pin(on_disk.channel, v(1), "the paper's table 3")
    assert held(disk) == {v(1): "pinned: the paper's table 3"}
    assert collect(disk).versions == (v(2),)
    holds.unpin(on_disk.channel, v(1))
    assert collect(disk).versions == (v(1),)
    with pytest.raises(NotFound, match="not pinned"):
        holds.unpin(on_disk.channel, v(1))
    with pytest.raises(VersionNotFound):
        holds.pin(Channel.open(disk), v(1), "too late")


def test_a_pin_whose_text_is_damaged_still_keeps_its_version(on_disk, disk):
    on_disk.publish(1, 2, 3)
    put_bytes(disk, "pins/e0001-v00000001.json", b'{"torn"')
    assert collect(disk).versions == ()


def test_what_a_live_reader_serves_stays_and_what_a_dead_one_served_goes(trainer, store, monkeypatch):
    trainer.publish(1, 2, 3)
    trainer.channel.write_receipt("engine-0", {"label": "e1-v1", "state": "serving"})
    assert collect(store).versions == ()
    monkeypatch.setattr(holds, "READER_SECONDS", 5.0)
    assert collect(store).versions == (v(1),)


def test_leases_and_receipts_of_readers_that_are_long_gone_are_deleted(on_disk, disk, monkeypatch):
    on_disk.publish(1, 2)
    on_disk.channel.write_receipt("engine-0", {"label": "e1-v1"})
    on_disk.channel.lease("engine-0", v(1), 600.0)
    collect(disk)
    assert len(list(disk.list("receipts")) + list(disk.list("leases"))) == 2
    monkeypatch.setattr(holds, "FORGET_SECONDS", 5.0)
    collect(disk)
    assert list(disk.list("receipts")) + list(disk.list("leases")) == []


@pytest.mark.parametrize("path", [lease_path("r"), "receipts/r.json", collected_path(v(9))])
def test_nothing_is_deleted_when_nobody_can_tell_what_is_held(on_disk, disk, path):
    on_disk.publish(1, 2, 3)
    put_bytes(disk, path, b'{"torn')
    with pytest.raises(BadManifest, match=path):
        collect(disk)
    assert with_data(disk) == {1: FILES, 2: FILES, 3: FILES}


def test_a_pin_between_the_decision_and_the_deletion_is_seen(on_disk, disk):
    on_disk.publish(1)
    on_disk.publish_deltas(2)
    on_disk.publish(3, 4, 5)

    def pin_in_between(operation: str, path: str) -> None:
        if operation == "commit" and path == collected_path(v(1)):  # the last note
            put_bytes(disk, "pins/e0001-v00000002.json", b"{}")

    assert collect(HookedStore(disk, after=pin_in_between)).versions == (v(3),)
    assert numbers(disk) == [1, 2, 4, 5]
    assert notes(disk) == []


def test_a_pin_that_comes_after_the_note_is_refused(on_disk, disk):
    on_disk.publish(1, 2, 3)
    refused = []

    def pin_too_late(operation: str, path: str) -> None:
        if operation == "delete" and path == manifest_path(v(1)):
            with pytest.raises(VersionGone, match="at this moment") as raised:
                holds.pin(on_disk.channel, v(1), "wait")
            refused.append(raised.value)

    collect(HookedStore(disk, pin_too_late))
    assert len(refused) == 1
    assert list(disk.list("pins")) == []


def test_a_torn_manifest_is_not_deleted_and_does_not_count_as_the_newest(on_disk, disk):
    on_disk.publish(1, 2, 3)
    put_bytes(disk, manifest_path(v(4)), b'{"torn')
    put_bytes(disk, manifest_path(v(5)), b'{"format": 1}')
    assert collect(disk).versions == (v(1),)
    assert numbers(disk) == [2, 3, 4, 5]


def test_a_manifest_of_a_newer_release_keeps_what_it_may_need(on_disk, disk):
    on_disk.publish(1, 2, 3, 4)
    put_bytes(disk, manifest_path(v(2)), b'{"format": 99}')
    assert collect(disk).versions == ()
    assert numbers(disk) == [1, 2, 3, 4]


# -- a bad moment ------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process is gone: nothing that comes after has an effect either."""


def dying(at: int):
    count = 0

    def hook(operation: str, path: str) -> None:
        nonlocal count
        if operation in CHANGES:
            count += 1
            if count > at:
                raise Killed

    return hook


def test_killed_before_any_change_every_version_is_whole_and_the_next_run_finishes(tmp_path, monkeypatch):
    monkeypatch.setattr("ckptsync.collector_claim.SECONDS", 5.0)
    make(LocalStore(str(tmp_path / "before")))
    recorder = Recorder()
    collect(HookedStore(a_copy(tmp_path, "recorded"), recorder))
    for at in range(len(recorder.changes())):
        disk = a_copy(tmp_path, str(at))
        with pytest.raises(Killed):
            collect(HookedStore(disk, dying(at)))
        assert {4, 5} <= set(numbers(disk))
        assert_whole(disk)
        collect(disk)
        assert numbers(disk) == [4, 5]
        assert with_data(disk) == {4: FILES, 5: FILES}
        assert notes(disk) == []


def a_copy(tmp_path, name: str) -> LocalStore:
    shutil.copytree(tmp_path / "before", tmp_path / name)
    return LocalStore(str(tmp_path / name))


def make(disk) -> None:
    trainer = Trainer(Channel.create(disk))
    trainer.publish(1)
    trainer.publish_deltas(2, 3)
    trainer.publish(4, 5)


def assert_whole(disk) -> None:
    """Each version that is there has its data, and so has what it is made from."""
    channel, data = Channel.open(disk), with_data(disk)
    for version in channel.committed():
        manifest = channel.manifest(version)
        assert data[version.number] == FILES
        assert manifest.parent is None or data[manifest.parent.number] == FILES


def test_case_30_a_claim_that_a_dead_collector_left_is_taken_over_when_it_is_old(on_disk, disk, monkeypatch):
    on_disk.publish(1, 2, 3)
    with pytest.raises(Killed):
        collect(HookedStore(disk, dying(6)))
    with pytest.raises(Conflict, match="is collecting versions"):
        collect(disk)
    monkeypatch.setattr("ckptsync.collector_claim.SECONDS", 5.0)
    assert collect(disk).versions == (v(1),)
    assert list(disk.list("collector")) == []


def test_case_30_a_claim_of_a_process_of_this_host_that_has_died_is_taken_over_at_once(on_disk, disk, monkeypatch):
    on_disk.publish(1, 2, 3)
    dead = subprocess.Popen(["true"])
    dead.wait()
    for pid, is_dead in ((dead.pid, True), (os.getppid(), False)):
        claim = {"nonce": "another", "host": f"{socket.gethostname()}:{pid}", "written": time.time()}
        put_bytes(disk, "collector/claim.json", json.dumps(claim).encode())
        with contextlib.nullcontext() if is_dead else pytest.raises(Conflict):
            collect(disk)


def test_case_30_of_four_collectors_at_once_one_works_and_none_fails(trainer, store):
    trainer.publish(*range(1, 9))
    barrier = threading.Barrier(4)

    def one(_: int) -> tuple[VersionId, ...]:
        barrier.wait()
        try:
            return collect(store).versions
        except Conflict:
            return ()

    with ThreadPoolExecutor(4) as pool:
        ended = [version for versions in pool.map(one, range(4)) for version in versions]
    assert sorted(ended) == [v(n) for n in range(1, 7)], "each by one"
    assert numbers(store) == [7, 8]
    collect(store)  # on a busy machine a note is younger than the moment at which its run asked for the time
    assert with_data(store) == {7: FILES, 8: FILES}


def test_case_30_files_that_vanish_meanwhile_are_no_error(on_disk, disk):
    on_disk.publish(1, 2, 3)

    def somebody_else_first(operation: str, path: str) -> None:
        if operation == "delete":
            disk.delete(path)

    assert collect(HookedStore(disk, somebody_else_first)).versions == (v(1),)
    assert with_data(disk) == {2: FILES, 3: FILES}


def test_files_that_cannot_be_deleted_keep_only_themselves_and_are_tried_again(on_disk, disk, caplog):
    on_disk.publish(1, 2, 3, 4)
    denied = Failing(lambda: StoreDenied("no"), matching("delete", suffix="v00000001-nonce1x1/model.safetensors"))
    collector = Collector(Channel.open(HookedStore(disk, denied)), Retention(keep_last=2, grace=0.0))
    for _ in range(2):
        assert collector.collect().waiting == 1
    assert caplog.text.count("cannot be deleted and stays") == 1
    assert with_data(disk) == {1: 1, 3: FILES, 4: FILES}
    denied.times = 0
    assert collector.collect() == Collected((), 1, 100, 0)
    assert with_data(disk) == {3: FILES, 4: FILES}


def test_a_manifest_that_cannot_be_deleted_keeps_what_its_version_is_made_from(on_disk, disk, caplog):
    on_disk.publish(1)
    on_disk.publish_deltas(2, 3)
    on_disk.publish(4, 5)
    denied = Failing(lambda: StoreDenied("no"), matching("delete", suffix=manifest_path(v(2))))
    assert collect(HookedStore(disk, denied)).versions == (v(3),)
    assert numbers(disk) == [1, 2, 4, 5]
    assert with_data(disk) == {1: FILES, 2: FILES, 4: FILES, 5: FILES}
    assert notes(disk) == []


def test_a_store_that_goes_away_ends_the_run_and_the_next_one_finishes(on_disk, disk, monkeypatch):
    monkeypatch.setattr("ckptsync.collector_claim.SECONDS", 5.0)
    on_disk.publish(1, 2, 3, 4)
    away = Failing(lambda: StoreUnavailable("away"), matching("delete", part="data/"))
    with pytest.raises(StoreUnavailable):
        collect(HookedStore(disk, away))
    assert collect(disk).files == 2 * FILES
    assert with_data(disk) == {3: FILES, 4: FILES}


@pytest.mark.parametrize("mtime", [0.0, 1.0, 4e9])
@pytest.mark.parametrize("clock", [-1e9, 0.0, 1e9])
def test_case_50_wrong_times_and_clocks_never_end_the_newest_nor_what_is_held(on_disk, disk, monkeypatch, mtime, clock):
    on_disk.publish(1, 2, 3, 4, 5)
    on_disk.channel.lease("engine-0", v(2), 600.0)
    for folder, _, names in os.walk(disk.url):
        for name in names:
            if "leases" not in folder:
                os.utime(os.path.join(folder, name), (mtime, mtime))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + clock)
    collect(disk, max_age=100.0)
    assert {2, 4, 5} <= set(numbers(disk))
    assert_whole(disk)


def test_bytes_are_counted_where_they_lie(on_disk, disk):
    on_disk.publish(*range(1, 7))
    collect(disk, max_bytes=4 * FILES * 100)
    assert numbers(disk) == [3, 4, 5, 6]


def test_nothing_is_warned_of_when_all_is_well(on_disk, disk, caplog):
    on_disk.publish(1, 2, 3)
    with caplog.at_level(logging.WARNING):
        collect(disk)
    assert caplog.text == ""


def test_a_collector_forgets_what_another_one_has_buried(on_disk, disk):
    on_disk.publish(1, 2, 3)
    waiting = Collector(Channel.open(disk), Retention(keep_last=2, grace=3600.0))
    assert waiting.collect().waiting == 1
    assert list(waiting._notes) == [v(1)]
    data = [entry.path for entry in disk.list("data") if "v00000001" in entry.path]
    for path in (collected_path(v(1)), *data):
        disk.delete(path)
    waiting.collect()
    assert not waiting._notes
