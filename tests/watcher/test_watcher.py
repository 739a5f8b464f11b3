"""The good way: what is loaded when, in which order, and what the receipt says."""

from __future__ import annotations

import os
import threading
import time

import pytest

from ckptsync.errors import (
    BadShard,
    EngineDirty,
)
from ckptsync.manifest import Manifest
from ckptsync.testing.engines import Failing, FakeEngine
from watchers.loop import Loop

from .actions import Watch, receipt_of, shard_of, step, weights
from .publish import SCHEMA, TestPublisher


def test_it_is_not_ready_before_the_first_confirmed_load(watch: Watch, engine: FakeEngine, root: str) -> None:
    watcher = watch(engine)
    assert watcher.step() is None
    assert not watcher.health.ready
    manifest = TestPublisher(root).publish()
    assert step(watcher).state == "serving"
    assert watcher.health.ready
    assert watcher.health.version == "e1-v1"
    assert engine.weights == weights(root, manifest)
    assert not engine.paused


def test_run_needs_no_event_and_a_bug_ends_it(watch: Watch, engine: FakeEngine, publisher: TestPublisher) -> None:
    publisher.publish()
    with pytest.raises(ZeroDivisionError):
        watch(engine, on_receipt=lambda _: 1 / 0).run()


def test_a_loop_does_not_begin_in_the_middle_of_a_load_by_hand() -> None:
    order: list[str] = []
    loop = Loop(lambda: None)

    def run() -> None:
        with loop.running():
            order.append("the loop")

    thread = threading.Thread(target=run)

    def load() -> None:
        thread.start()
        thread.join(0.2)  # it would be through by now, on most machines
        order.append("the load")

    loop.call(load)
    thread.join(60)
    assert order == ["the load", "the loop"]


def test_the_engine_is_called_in_the_contracts_order(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher
) -> None:
    publisher.publish()
    states: list[str] = []
    step(watch(engine, on_change=lambda health: states.append(health.state)))
    assert engine.calls == ["pause", "start e1-v1", "update e1-v1", "finish e1-v1", "confirm e1-v1", "resume"]
    order = ["staging", "staged", "paused", "loading", "confirmed", "recorded", "serving"]
    assert states == order


def test_the_receipt_says_what_was_loaded_and_how_long_it_took(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    manifest = publisher.publish()
    watcher, started = watch(engine), time.monotonic()
    said = step(watcher)
    elapsed = time.monotonic() - started
    assert (said.created, said.proof) == (manifest.created, watcher.proof)
    receipt = receipt_of(root)
    assert (receipt["reader"], receipt["version"], receipt["label"]) == ("reader-0", "e1-v1", "e1-v1")
    assert (receipt["state"], receipt["error"]) == ("serving", None)
    assert receipt["bytes"] == manifest.nbytes
    assert receipt["fingerprint"] == engine.weights
    assert elapsed > receipt["pause_seconds"] >= receipt["load_seconds"] > 0
    assert elapsed > receipt["stage_seconds"] > 0


def test_health_says_what_is_followed_and_how_many_versions_the_engine_is_behind(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher
) -> None:
    watcher = watch(engine)
    assert (watcher.health.follow, watcher.health.newest, watcher.health.lag) == ("latest", "", 0)
    publisher.publish()
    step(watcher)
    assert (watcher.health.newest, watcher.health.lag) == ("e1-v1", 0)
    publisher.publish()
    watcher.channel.poll()
    assert (watcher.health.newest, watcher.health.lag) == ("e1-v2", 1)


def test_a_burst_is_skipped_to_its_end(watch: Watch, engine: FakeEngine, publisher: TestPublisher) -> None:
    for _ in range(5):
        publisher.publish()
    watcher = watch(engine)
    assert step(watcher).version == "e1-v5"
    assert watcher.step() is None
    assert engine.calls.count("pause") == 1


def test_what_comes_while_it_stages_is_loaded_instead(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher
) -> None:
    publisher.publish()
    later: list[Manifest] = []

    def progress(_: int) -> None:
        if not later:
            later.append(publisher.publish())

    assert step(watch(engine, progress=progress)).version == "e1-v2"
    assert engine.calls.count("pause") == 1


def test_a_publisher_that_is_faster_than_staging_does_not_starve_the_engine(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher
) -> None:
    publisher.publish()
    watcher = watch(engine, progress=lambda _: publisher.publish() and None)
    assert step(watcher).state == "serving"


def test_every_follows_each_version_in_order(watch: Watch, engine: FakeEngine, publisher: TestPublisher) -> None:
    for _ in range(3):
        publisher.publish()
    watcher = watch(engine, follow="every")
    assert [step(watcher).version for _ in range(3)] == ["e1-v1", "e1-v2", "e1-v3"]
    assert watcher.step() is None


def test_an_exact_version_is_waited_for_and_kept(watch: Watch, engine: FakeEngine, publisher: TestPublisher) -> None:
    publisher.publish()
    watcher = watch(engine, follow="e1-v2")
    assert watcher.step() is None
    publisher.publish()
    publisher.publish()
    assert step(watcher).version == "e1-v2"
    assert watcher.step() is None


def test_a_resumed_trainer_leaves_versions_behind_and_the_watcher_goes_back_with_it(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    versions = [publisher.publish() for _ in range(9)]
    watcher = watch(engine)
    step(watcher)
    resumed = TestPublisher(root, resumed_from=versions[4].id)
    assert step(watcher).version == "e1-v5"
    resumed.publish()
    assert step(watcher).version == "e2-v6"
    assert watcher.step() is None


def test_load_version_goes_back_and_forward_and_raises_what_goes_wrong(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    manifests = {n: publisher.publish() for n in range(1, 8)}
    watcher = watch(engine)
    for number in (7, 3, 7):
        assert watcher.load_version(number).label == f"e1-v{number}"
        assert engine.weights == weights(root, manifests[number])
    os.unlink(shard_of(root, manifests[5]))
    with pytest.raises(BadShard, match="model-00002-of-00002"):
        watch(engine, patience=0.0).load_version("5")
    assert engine.label == "e1-v7"


def test_a_new_watcher_of_an_old_engine_can_still_go_back(watch: Watch, publisher: TestPublisher, root: str) -> None:
    """The engine outlived its watcher: what it serves is in the stage, and is where a failed load returns
    to."""
    engine = Failing(SCHEMA)
    first = publisher.publish()
    step(watch(engine))
    publisher.publish()
    engine.fail("update", EngineDirty, only="e1-v2")
    watcher = watch(engine)
    assert step(watcher).state == "failed"
    assert (engine.label, engine.weights, engine.paused) == ("e1-v1", weights(root, first), False)
    assert watcher.health.ready
