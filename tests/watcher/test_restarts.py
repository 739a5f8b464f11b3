"""Proof of what the engine holds, engines that restart or die, receipts."""

from __future__ import annotations

import pytest

from ckptsync.errors import (
    AlreadyExists,
    EngineUnavailable,
    NotFound,
    ProofFailed,
    SchemaMismatch,
    StoreDenied,
    StoreUnavailable,
)
from ckptsync.store import LocalStore
from ckptsync.testing.engines import Dies, Failing, FakeEngine, KeepsLabel, OtherWeights
from ckptsync.testing.hooks import Failing as FailingHook
from ckptsync.testing.hooks import HookedStore, matching
from watchers.stage import Stage

from .actions import Watch, flip, run_until, shard_of, step, weights
from .conftest import staged_folders
from .publish import SCHEMA, SPECS, TestPublisher


def test_case_105_an_engine_that_does_not_take_the_label_is_never_ready(watch: Watch, publisher: TestPublisher) -> None:
    publisher.publish()
    watcher = watch(KeepsLabel(SCHEMA))
    receipt = step(watcher)
    assert receipt.error is not None
    assert (receipt.state, receipt.error["kind"]) == ("dirty", "proof-failed")
    assert not watcher.health.ready


def test_going_back_must_give_the_same_weights(watch: Watch, publisher: TestPublisher) -> None:
    for _ in range(2):
        publisher.publish()
    watcher = watch(OtherWeights(SCHEMA))
    watcher.load_version("1")
    watcher.load_version("2")
    with pytest.raises(ProofFailed, match="e1-v1 has fingerprint other"):
        watcher.load_version("1")


def test_a_restarted_engine_gets_the_current_version_before_it_is_ready(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    manifest = publisher.publish()
    seen: list[tuple[bool, str]] = []
    watcher = watch(engine, on_change=lambda health: seen.append((health.ready, engine.weights)))
    step(watcher)
    seen.clear()
    engine.restart()
    assert step(watcher).label == "e1-v1"
    assert seen[0] == (False, "base")
    assert {held for ready, held in seen if ready} == {weights(root, manifest)}


def test_an_engine_that_restarts_while_a_version_is_staged_gets_it_next_and_the_stage_does_not_keep_it_for_ever(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, folder: str
) -> None:
    manifest, restarts = publisher.publish(), []

    def restart(_: int) -> None:
        if not restarts:
            restarts.append(engine.restart())

    watcher = watch(engine, progress=restart)
    assert watcher.step() is None
    assert engine.calls == []
    Stage(folder).evict(manifest.channel_id, 0)
    assert staged_folders(folder) == []
    assert step(watcher).label == "e1-v1"


def test_a_restarted_engine_is_served_from_the_stage_while_the_store_is_down(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    publisher.publish()
    outage = FailingHook(lambda: StoreUnavailable("down"), matching("open", "list", "write", "delete"), times=0)
    watcher = watch(engine, root=HookedStore(LocalStore(root), outage))
    step(watcher)
    outage.times = 1 << 30
    engine.restart()
    assert step(watcher).label == "e1-v1"
    assert watcher.health.ready


def test_weights_that_somebody_else_loaded_are_replaced(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    manifest = publisher.publish()
    watcher = watch(engine)
    step(watcher)
    engine.label, engine.weights = "mine", "mine"
    assert step(watcher).label == "e1-v1"
    assert engine.weights == weights(root, manifest)


def test_an_engine_that_is_away_for_a_moment_is_not_loaded_again(watch: Watch, publisher: TestPublisher) -> None:
    engine = Failing(SCHEMA)
    publisher.publish()
    watcher = watch(engine)
    step(watcher)
    engine.fail("status", EngineUnavailable)
    assert watcher.step() is None
    assert not watcher.health.ready
    assert watcher.step() is None
    assert watcher.health.ready
    assert engine.calls.count("pause") == 1


def test_an_engine_that_died_in_mid_load_is_brought_to_the_version_after_its_restart(
    watch: Watch, publisher: TestPublisher
) -> None:
    engine = Dies(SCHEMA, only="e1-v2", deaths=1)
    publisher.publish()
    watcher = watch(engine)
    step(watcher)
    publisher.publish()
    assert step(watcher).state == "dirty"
    assert watcher.step() is None
    assert not watcher.health.ready
    engine.restart()
    run_until(watcher, lambda: engine.label == "e1-v2")


def test_an_engine_that_died_is_not_called_paused(
    watch: Watch, publisher: TestPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    engine, dead = Dies(SCHEMA, only="e1-v1", deaths=1), []
    publisher.publish()
    step(watch(engine, on_dead=lambda health: dead.append(health.reason)))
    assert dead[0].startswith("it does not answer: ")
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "CRITICAL"]
    assert "does not answer" in said
    assert "paused" not in said


def test_an_engine_that_was_restarted_in_mid_load_is_said_to_be(watch: Watch, publisher: TestPublisher) -> None:
    engine, dead = FakeEngine(SCHEMA), []
    publisher.publish()
    engine.while_paused = engine.restart
    step(watch(engine, on_dead=lambda health: dead.append(health.reason)))
    assert dead[0].startswith("it was restarted in mid-load: ")


def test_a_version_that_kills_the_engine_twice_is_given_up(watch: Watch, publisher: TestPublisher) -> None:
    engine = Dies(SCHEMA, only="e1-v2", deaths=2)
    publisher.publish()
    watcher = watch(engine)
    step(watcher)
    publisher.publish()
    step(watcher)
    engine.restart()
    assert step(watcher).label == "e1-v1"
    assert step(watcher).state == "dirty"
    engine.restart()
    assert step(watcher).label == "e1-v1"
    for _ in range(20):
        assert watcher.step() is None
    publisher.publish()
    assert step(watcher).label == "e1-v3"


def test_a_receipt_that_cannot_be_written_does_not_matter(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    denied = FailingHook(lambda: StoreDenied("read-only"), matching("write", "delete"))
    watcher = watch(engine, root=HookedStore(LocalStore(root), denied))
    for _ in range(2):
        publisher.publish()
        assert step(watcher).state == "serving"
    assert len([r for r in caplog.records if "no receipt can be written" in r.getMessage()]) == 1


def test_receipts_alone_may_be_denied_and_every_version_is_loaded_all_the_same(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    denied, receipts = FailingHook(lambda: StoreDenied("read-only"), matching("write", part="receipts/")), []
    watcher = watch(engine, root=HookedStore(LocalStore(root), denied), on_receipt=receipts.append)
    for damaged in (False, True, False):
        manifest = publisher.publish()
        if damaged:
            flip(shard_of(root, manifest))
        step(watcher)
    assert [receipt.state for receipt in receipts] == ["serving", "refused", "serving"]
    assert engine.label == "e1-v3"
    assert len([r for r in caplog.records if "no receipt can be written" in r.getMessage()]) == 1


def test_a_bucket_that_is_gone_or_contended_does_not_matter_to_a_receipt_either(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    errors = iter([NotFound("no such bucket"), AlreadyExists("409")])
    odd = FailingHook(lambda: next(errors), matching("write", part="receipts/"), times=2)
    watcher = watch(engine, root=HookedStore(LocalStore(root), odd))
    for _ in range(2):
        publisher.publish()
        assert step(watcher).state == "serving"
    assert odd.times == 0


def test_load_version_refuses_what_does_not_fit(watch: Watch, engine: FakeEngine, publisher: TestPublisher) -> None:
    publisher.publish(specs=SPECS[:-1])
    with pytest.raises(SchemaMismatch):
        watch(engine).load_version("latest")
    assert engine.calls == []
