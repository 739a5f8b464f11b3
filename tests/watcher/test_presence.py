"""What a reader leaves in its channel while it lives: receipts that are renewed, and leases while it reads."""

from __future__ import annotations

import os
import time

from ckptsync.channel import Channel
from ckptsync.errors import StoreDenied
from ckptsync.holds import leases, readers
from ckptsync.store import LocalStore
from ckptsync.store.clock import StoreClock
from ckptsync.testing.engines import FakeEngine
from ckptsync.testing.hooks import Failing, HookedStore, Recorder, matching

from .actions import Watch, receipt_of, step
from .publish import TestPublisher


def written(recorder: Recorder) -> int:
    return recorder.seen.count(("commit", "receipts/reader-0.json"))


def test_a_receipt_is_written_again_now_and_then_although_nothing_changed(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str, monkeypatch
) -> None:
    publisher.publish()
    recorder = Recorder()
    watcher = watch(engine, root=HookedStore(LocalStore(root), recorder))
    step(watcher)
    for _ in range(5):
        watcher.step()
    assert written(recorder) == 1
    monkeypatch.setattr("watchers.presence.HEARTBEAT", 0.0)
    watcher.step()
    assert written(recorder) == 2
    receipt = receipt_of(root)
    assert (receipt["label"], receipt["confirmed"], receipt["follow"]) == ("e1-v1", "e1-v1", "latest")
    assert receipt["state"] == "serving", "how the last attempt went stays as it was"


def test_an_engine_that_lost_its_version_says_so_and_the_version_it_wants_back_stays_named(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str, monkeypatch
) -> None:
    publisher.publish()
    watcher = watch(engine)
    step(watcher)
    engine.restart()
    monkeypatch.setattr(watcher, "_attempt_what_is_due", watcher._look_at_engine)
    watcher.step()
    (reader,) = readers(LocalStore(root), StoreClock.guess())
    assert reader.label == ""
    assert reader.confirmed_version == Channel.open(root).latest().id


def test_what_a_watcher_that_was_killed_said_last_is_corrected_by_the_next_ones_first_look(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str, monkeypatch
) -> None:
    publisher.publish()
    step(watch(engine))
    engine.restart()
    again = watch(engine, reader="reader-0")
    monkeypatch.setattr(again, "_attempt_what_is_due", again._look_at_engine)
    again.step()
    (reader,) = readers(LocalStore(root), StoreClock.guess())
    assert (reader.label, reader.confirmed, [attempt.version for attempt in reader.history]) == ("", "e1-v1", ["e1-v1"])
    monkeypatch.undo()
    step(again)
    (reader,) = readers(LocalStore(root), StoreClock.guess())
    assert (reader.label, [attempt.state for attempt in reader.history]) == ("e1-v1", ["serving"] * 2)


def test_a_receipt_that_cannot_be_read_is_written_anew(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    publisher.publish()
    os.makedirs(os.path.join(root, "receipts"))
    with open(os.path.join(root, "receipts", "reader-0.json"), "w") as file:
        file.write('{"reader": "reader-0", "label": 7}')
    step(watch(engine))
    assert receipt_of(root)["label"] == "e1-v1"


def test_a_version_that_was_loaded_by_hand_is_what_the_reader_is_said_to_follow(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    publisher.publish()
    publisher.publish()
    watcher = watch(engine)
    step(watcher)
    watcher.load_version("1")
    assert watcher.step() is None
    assert receipt_of(root)["follow"] == "e1-v1"
    watcher.load_version("latest")
    watcher.step()
    assert receipt_of(root)["follow"] == "latest"


def test_a_watcher_that_waits_for_its_root_does_not_make_it(watch: Watch, engine: FakeEngine, root: str) -> None:
    assert watch(engine).step() is None
    assert not os.path.exists(root)


def test_a_channel_that_may_only_be_read_is_served_without_receipts_and_warned_of_once(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str, caplog, monkeypatch
) -> None:
    monkeypatch.setattr("watchers.presence.HEARTBEAT", 0.0)
    publisher.publish()
    read_only = Failing(lambda: StoreDenied("read-only"), matching("write", "create"))
    watcher = watch(engine, root=HookedStore(LocalStore(root), read_only))
    assert step(watcher).state == "serving"
    for _ in range(3):
        watcher.step()
    assert caplog.text.count("no receipt can be written") == 1


def test_a_reader_that_ends_withdraws_its_receipt(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    publisher.publish()
    watcher = watch(engine)
    step(watcher)
    assert [reader.label for reader in readers(LocalStore(root), StoreClock.guess())] == ["e1-v1"]
    watcher.close()
    watcher.close()
    assert readers(LocalStore(root), StoreClock.guess()) == []


def test_a_reader_that_may_not_withdraw_its_receipt_ends_all_the_same(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str, caplog
) -> None:
    publisher.publish()
    no_delete = Failing(lambda: StoreDenied("no deletes here"), matching("delete", part="receipts/"))
    watcher = watch(engine, root=HookedStore(LocalStore(root), no_delete))
    step(watcher)
    watcher.close()
    assert "its receipt stays until it is an hour old: no deletes here" in caplog.text


def test_a_lease_is_there_while_the_version_is_read_and_gone_after(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str, monkeypatch
) -> None:
    manifest = publisher.publish()
    seen = []
    progress = lambda _: seen.append(leases(LocalStore(root), StoreClock.guess()))  # noqa: E731
    step(watch(engine, progress=progress))
    assert [(lease.reader, lease.version) for lease in seen[0]] == [("reader-0", manifest.id)]
    assert leases(LocalStore(root), StoreClock.guess()) == []


def test_a_lease_that_its_reader_did_not_live_to_drop_ends_by_itself(root: str, publisher: TestPublisher) -> None:
    manifest = publisher.publish()
    publisher.channel.lease("died", manifest.id, 600.0)
    assert len(leases(LocalStore(root), StoreClock(time.time()))) == 1
    assert leases(LocalStore(root), StoreClock(time.time() + 3600.0)) == []
