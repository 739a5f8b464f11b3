"""The pause: what a failure in it leaves behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptsync.errors import (
    EngineDirty,
    EngineRefused,
    EngineUnavailable,
    ProofFailed,
)
from ckptsync.store import LocalStore
from ckptsync.testing.engines import Failing, FakeEngine, LyingRefusal
from ckptsync.testing.hooks import HookedStore

from .actions import Watch, receipt_of, run_until, step, weights
from .publish import SCHEMA, TestPublisher


def test_the_store_is_not_touched_while_the_engine_is_paused(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    def forbid(operation: str, path: str) -> None:
        assert not engine.paused, f"{operation} {path} while paused"

    watcher = watch(engine, root=HookedStore(LocalStore(root), forbid))
    for _ in range(3):
        publisher.publish()
        assert step(watcher).state == "serving"


def test_everything_is_on_this_host_and_sealed_before_the_pause(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str, tmp_path: Any
) -> None:
    manifest = publisher.publish()
    folder = tmp_path / "stage" / manifest.channel_id / f"{manifest.id.stem}-{manifest.nonce}"
    seen: list[bool] = []
    engine.while_paused = lambda: seen.append((folder / "ckptsync.json").exists())
    step(watch(engine))
    assert seen
    assert all(seen)


@pytest.mark.parametrize("place", ["pause", "start", "update", "finish", "confirm"])
@pytest.mark.parametrize("error", [EngineDirty, EngineRefused, EngineUnavailable, ProofFailed, TypeError])
def test_case_101_whatever_fails_between_pause_and_resume_the_engine_ends_resumed_on_the_old_weights(
    watch: Watch, publisher: TestPublisher, root: str, place: str, error: type[Exception]
) -> None:
    engine = Failing(SCHEMA)
    good = publisher.publish()
    watcher = watch(engine)
    step(watcher)
    engine.fail(place, error)
    publisher.publish()
    receipt = step(watcher)
    assert receipt.state in {"refused", "failed"}
    assert (receipt.version, receipt.label) == ("e1-v2", "e1-v1")
    assert receipt.error is not None
    assert f"injected at {place}" in receipt.error["message"]
    assert (engine.label, engine.weights, engine.paused) == ("e1-v1", weights(root, good), False)
    assert watcher.health.ready
    publisher.publish()
    assert step(watcher).label == "e1-v3"


def test_case_58_a_failed_load_never_counts_as_applied(watch: Watch, publisher: TestPublisher, root: str) -> None:
    engine = Failing(SCHEMA)
    publisher.publish()
    watcher = watch(engine)
    step(watcher)
    engine.fail("update", EngineRefused)
    publisher.publish()
    assert step(watcher).state == "refused"
    assert watcher.health.version == receipt_of(root)["label"] == "e1-v1"
    assert engine.calls[-2:] == ["confirm e1-v1", "resume"]


def test_case_94_after_a_half_applied_load_the_last_good_version_is_loaded_whole(
    watch: Watch, publisher: TestPublisher
) -> None:
    engine = Failing(SCHEMA)
    publisher.publish()
    watcher = watch(engine)
    step(watcher)
    engine.calls.clear()
    engine.fail("update", EngineDirty)
    publisher.publish()
    assert step(watcher).state == "failed"
    assert engine.calls == [
        "pause", "start e1-v2", "update fails",
        "start e1-v1", "update e1-v1", "finish e1-v1", "confirm e1-v1", "resume",
    ]  # fmt: skip
    assert watcher.step() is None


def test_case_94_an_engine_that_claims_to_have_refused_is_read_back(
    watch: Watch, publisher: TestPublisher, root: str
) -> None:
    engine = LyingRefusal(SCHEMA)
    good = publisher.publish()
    watcher = watch(engine)
    step(watcher)
    publisher.publish()
    engine.calls += ["-"] * 7
    assert step(watcher).state == "failed"
    assert engine.weights == weights(root, good)


def test_case_94_if_the_way_back_fails_too_it_is_left_paused_not_ready_and_reported_once(
    watch: Watch, publisher: TestPublisher, root: str
) -> None:
    engine, dead = Failing(SCHEMA), []
    publisher.publish()
    watcher = watch(engine, poll=60.0, on_dead=dead.append)
    step(watcher)
    engine.fail("update", EngineDirty, times=2)
    publisher.publish()
    receipt = step(watcher)
    assert (receipt.state, receipt.label) == ("dirty", "")
    assert engine.paused
    assert engine.calls[-1] != "resume"
    assert not watcher.health.ready
    assert watcher.health.state == "dirty"
    assert len(dead) == 1
    assert receipt_of(root)["state"] == "dirty"
    watcher.step()
    assert engine.paused
    publisher.publish()
    assert step(watcher).label == "e1-v3"
    assert not engine.paused
    assert len(dead) == 1


def test_a_dirty_engine_is_brought_back_to_the_last_good_version_later(
    watch: Watch, publisher: TestPublisher, root: str
) -> None:
    engine = Failing(SCHEMA)
    good = publisher.publish()
    watcher = watch(engine)
    step(watcher)
    engine.fail("update", EngineUnavailable, times=2)
    publisher.publish()
    step(watcher)
    assert engine.paused
    run_until(watcher, lambda: watcher.health.ready)
    assert engine.weights in {weights(root, good), weights(root, publisher.channel.latest())}


def test_an_engine_that_does_not_hear_the_resume_is_told_again(watch: Watch, publisher: TestPublisher) -> None:
    engine = Failing(SCHEMA)
    publisher.publish()
    watcher = watch(engine)
    engine.fail("resume", EngineUnavailable, times=3)
    step(watcher)
    assert engine.paused
    assert not watcher.health.ready
    watcher.step()
    assert not engine.paused
    assert watcher.health.ready
    assert engine.calls.count("update e1-v1") == 1


def test_an_interrupt_in_mid_load_is_raised_again_after_the_way_back(
    watch: Watch, publisher: TestPublisher, root: str
) -> None:
    engine = Failing(SCHEMA)
    good = publisher.publish()
    watcher = watch(engine)
    step(watcher)
    publisher.publish()
    engine.fail("finish", KeyboardInterrupt)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        watcher.step()
    assert (engine.weights, engine.paused) == (weights(root, good), False)
    assert (watcher.health.ready, watcher.health.version, watcher.health.state) == (True, "e1-v1", "serving")
    assert watcher.health.reason == "KeyboardInterrupt while e1-v2 was being loaded"
    receipt = receipt_of(root)
    assert (receipt["version"], receipt["state"], receipt["label"]) == ("e1-v2", "failed", "e1-v1")
    assert step(watcher).label == "e1-v2", "an interrupt says nothing about the version"


@pytest.mark.parametrize(("place", "state"), [("pause", "refused"), ("start", "failed"), ("resume", "serving")])
def test_an_interrupt_anywhere_in_the_pause_leaves_an_engine_that_serves_and_a_health_that_says_so(
    watch: Watch, publisher: TestPublisher, root: str, place: str, state: str
) -> None:
    engine = Failing(SCHEMA)
    publisher.publish()
    watcher = watch(engine)
    step(watcher)
    publisher.publish()
    engine.fail(place, KeyboardInterrupt)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        watcher.step()
    assert not engine.paused
    assert watcher.health.ready
    assert watcher.health.version == engine.label
    assert receipt_of(root)["state"] == state


def test_a_second_interrupt_on_the_way_back_leaves_it_paused_and_not_ready(
    watch: Watch, publisher: TestPublisher, root: str
) -> None:
    engine = Failing(SCHEMA)
    publisher.publish()
    watcher = watch(engine)
    step(watcher)
    publisher.publish()
    engine.fail("finish", KeyboardInterrupt, times=2)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        watcher.step()
    assert engine.paused
    assert (watcher.health.ready, watcher.health.state) == (False, "dirty")
    assert receipt_of(root)["state"] == "dirty"


def test_an_interrupt_while_it_stages_leaves_health_as_it_was(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher
) -> None:
    publisher.publish()
    watcher = watch(engine)
    step(watcher)
    before = watcher.health

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    watcher._progress = interrupt
    publisher.publish()
    with pytest.raises(KeyboardInterrupt):
        watcher.step()
    assert replace(watcher.health, since=before.since, newest="e1-v1", lag=0) == before


def test_an_engine_found_paused_whose_first_load_fails_stays_paused_and_one_that_works_is_resumed(
    watch: Watch, publisher: TestPublisher, root: str
) -> None:
    """Whoever was here before may have died in the middle of a load: nothing says that its weights are whole."""
    engine = Failing(SCHEMA)
    engine.paused = True
    publisher.publish()
    engine.fail("update", EngineDirty)
    watcher = watch(engine)
    assert step(watcher).state == "dirty"
    assert engine.paused
    publisher.publish()
    assert step(watcher).label == "e1-v2"
    assert not engine.paused
