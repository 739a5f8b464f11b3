"""The state machine: what is loaded when, what a failure leaves behind, what is never done."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from ckptsync.errors import (
    BadShard,
    EngineDirty,
    EngineRefused,
    EngineUnavailable,
    ProofFailed,
    SchemaMismatch,
    StoreDenied,
    StoreUnavailable,
)
from ckptsync.layout import HEAD, manifest_path
from ckptsync.manifest import Manifest, TensorSpec
from ckptsync.store import LocalStore
from ckptsync.store.base import put_bytes
from tests.faults.engines import Dies, Failing, FakeEngine, KeepsLabel, LyingRefusal, OtherWeights, weights_of
from tests.faults.store import Failing as FailingHook
from tests.faults.store import HookedStore, matching
from watchers.health import Receipt
from watchers.watcher import Watcher

from .publish import SCHEMA, SPECS, TestPublisher

Watch = Callable[..., Watcher]


def weights(root: str, manifest: Manifest) -> str:
    return weights_of(os.path.join(root, manifest.folder))


def receipt_of(root: str, reader: str = "reader-0") -> dict[str, Any]:
    with open(f"{root}/receipts/{reader}.json", encoding="utf-8") as file:
        return dict(json.load(file))


def step(watcher: Watcher) -> Receipt:
    receipt = watcher.step()
    assert receipt is not None
    return receipt


def shard_of(root: str, manifest: Manifest) -> str:
    return os.path.join(root, manifest.folder, "model-00002-of-00002.safetensors")


# -- the good way ----------------------------------------------------------------------------------------


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
    step(watch(engine))
    receipt = receipt_of(root)
    assert (receipt["reader"], receipt["version"], receipt["label"]) == ("reader-0", "e1-v1", "e1-v1")
    assert (receipt["state"], receipt["error"]) == ("serving", None)
    assert receipt["bytes"] == manifest.nbytes
    assert receipt["fingerprint"] == engine.weights
    assert receipt["pause_seconds"] >= receipt["load_seconds"] > 0
    assert receipt["stage_seconds"] > 0


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
        assert watcher.load_version(str(number)).label == f"e1-v{number}"
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


# -- discovery -------------------------------------------------------------------------------------------


def run_until(watcher: Watcher, done: Callable[[], bool], seconds: float = 20.0) -> None:
    stop, deadline = threading.Event(), time.monotonic() + seconds
    thread = threading.Thread(target=watcher.run, args=(stop,))
    thread.start()
    try:
        while not done() and time.monotonic() < deadline:
            time.sleep(0.005)
        assert done()
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive()


def test_case_53_polling_alone_finds_what_is_published(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher
) -> None:
    watcher = watch(engine, events=False)
    publisher.publish()
    run_until(watcher, lambda: engine.label == "e1-v1")


def test_events_end_a_long_wait_at_once(watch: Watch, engine: FakeEngine, publisher: TestPublisher) -> None:
    """With a poll of ten minutes only an event can bring the second version within the test's deadline."""
    publisher.publish()
    watcher = watch(engine, events=True, poll=600.0)

    def publish_second() -> bool:
        if engine.label == "e1-v1" and publisher.number == 2:
            publisher.publish()
        return engine.label == "e1-v2"

    run_until(watcher, publish_second)


def test_case_54_a_head_that_is_replaced_many_times_does_not_blind_it(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    watcher = watch(engine, events=True)
    publisher.publish()

    def replace_head() -> bool:
        with open(f"{root}/{HEAD}", "rb") as file:
            head = file.read()
        for _ in range(50):
            put_bytes(LocalStore(root), HEAD, head)
        if engine.label == "e1-v1" and publisher.number == 2:
            publisher.publish()
        return engine.label == "e1-v2"

    run_until(watcher, replace_head)


def test_an_observer_that_cannot_start_leaves_polling_and_one_line(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def limit(*_: object, **__: object) -> None:
        raise OSError(28, "inotify watch limit reached")

    monkeypatch.setattr("watchers.discover.Wake._schedule", limit)
    publisher.publish()
    run_until(watch(engine, events=True), lambda: engine.label == "e1-v1")
    assert len([r for r in caplog.records if "polling alone" in r.message]) == 1


def test_a_store_that_comes_and_goes_does_not_end_the_loop(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    publisher.publish()
    outage = FailingHook(lambda: StoreUnavailable("down"), matching("open", "list"), times=7)
    watcher = watch(engine, root=HookedStore(LocalStore(root), outage))
    run_until(watcher, lambda: engine.label == "e1-v1")
    assert outage.times == 0
    assert watcher.health.reason == ""


# -- what is never loaded --------------------------------------------------------------------------------


def test_case_1_a_version_without_a_manifest_is_not_a_version(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher
) -> None:
    publisher.publish()
    publisher.write()  # killed before the commit
    watcher = watch(engine)
    assert step(watcher).version == "e1-v1"
    assert watcher.step() is None


def test_case_2_a_folder_made_by_hand_is_ignored(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    os.makedirs(f"{root}/data/v00000009")
    os.makedirs(f"{root}/v00000009")
    with open(f"{root}/data/v00000009/model.safetensors", "wb") as file:
        file.write(b"half")
    publisher.publish()
    assert step(watch(engine)).version == "e1-v1"


@pytest.mark.parametrize("harm", ["torn", "emptied", "not JSON", "other format", "parent folder in a name"])
def test_case_13_a_bad_manifest_is_passed_over_by_name_and_the_next_good_version_is_loaded(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str, harm: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    publisher.publish()
    spoil(os.path.join(root, manifest_path(publisher.publish().id)), harm)
    watcher = watch(engine)
    assert step(watcher).version == "e1-v1"
    for _ in range(12):
        assert watcher.step() is None
    named = [r for r in caplog.records if "e0001-v00000002" in r.getMessage()]
    assert len(named) == 1
    publisher.publish()
    assert step(watcher).version == "e1-v3"


def spoil(path: str, harm: str) -> None:
    with open(path, "rb") as file:
        data = file.read()
    changed = {
        "torn": data[: len(data) // 2],
        "emptied": b"",
        "not JSON": b"\xff\x00 no",
        "other format": data.replace(b'"format":1', b'"format":2'),
        "parent folder in a name": resealed(data),
    }[harm]
    assert changed != data
    with open(path, "wb") as file:
        file.write(changed)


def resealed(data: bytes) -> bytes:
    """Another's manifest, right in every digest, whose first file is `../x`."""
    from ckptsync.digest import sha256
    from ckptsync.manifest import canonical

    body = json.loads(data.replace(b"model-00001-of-00002.safetensors", b"../x"))
    body.pop("manifest_digest")
    return canonical({**body, "manifest_digest": sha256(canonical(body))})


def test_a_torn_head_is_only_a_hint(watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str) -> None:
    watcher = watch(engine)
    for torn in (b"", b'{"epoch": 1, "num', b"\x00" * 40):
        manifest = publisher.publish()
        with open(f"{root}/{HEAD}", "wb") as file:
            file.write(torn)
        assert step(watcher).version == manifest.id.label


def flip(path: str) -> None:
    with open(path, "r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def link(path: str) -> None:
    os.rename(path, path + ".real")
    os.symlink(path + ".real", path)


def swell(path: str) -> None:
    with open(path, "ab") as file:
        file.write(b"x")


DAMAGES: dict[str, Callable[[str], None]] = {
    "bit flip": flip,
    "truncated": lambda path: os.truncate(path, os.path.getsize(path) - 1),
    "missing": os.unlink,
    "symbolic link": link,
    "trailing byte": swell,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_case_78_a_damaged_version_is_refused_the_old_one_serves_and_the_next_good_one_is_loaded(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str, damage: str
) -> None:
    good = publisher.publish()
    watcher = watch(engine)
    step(watcher)
    calls = list(engine.calls)
    DAMAGES[damage](shard_of(root, publisher.publish()))
    receipt = step(watcher)
    assert (receipt.state, receipt.version, receipt.label) == ("refused", "e1-v2", "e1-v1")
    assert receipt.error is not None
    assert "model-00002-of-00002.safetensors" in receipt.error["message"]
    assert receipt_of(root)["error"] == receipt.error
    assert engine.calls == calls
    assert engine.weights == weights(root, good)
    assert watcher.health.ready
    assert "model-00002" in watcher.health.reason
    publisher.publish()
    assert step(watcher).label == "e1-v3"
    assert watcher.health.reason == ""


def test_case_93_a_version_that_does_not_fit_is_refused_before_the_pause_and_before_any_byte(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str, tmp_path: Any
) -> None:
    publisher.publish()
    watcher = watch(engine)
    step(watcher)
    publisher.publish(specs=[*SPECS[:-1], TensorSpec("norm.weight", "F32", (16,))])
    receipt = step(watcher)
    assert receipt.error is not None
    assert (receipt.state, receipt.error["kind"]) == ("refused", "schema-mismatch")
    assert engine.calls.count("pause") == 1
    assert len(os.listdir(tmp_path / "stage" / publisher.channel.channel_id)) == 4
    assert watcher.step() is None
    publisher.publish()
    assert step(watcher).label == "e1-v3"


def test_a_broken_newest_version_does_not_leave_a_fresh_engine_without_any(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    publisher.publish()
    flip(shard_of(root, publisher.publish()))
    watcher = watch(engine)
    assert step(watcher).state == "refused"
    assert step(watcher).label == "e1-v1"
    assert watcher.step() is None


def test_a_refused_version_is_not_tried_in_a_hot_loop(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    publisher.publish()
    watcher = watch(engine)
    step(watcher)
    flip(shard_of(root, publisher.publish()))
    receipts: list[Receipt] = []
    watcher._on_receipt = receipts.append
    for _ in range(200):
        watcher.step()
    assert len(receipts) == 1


def test_case_49_files_that_come_late_are_waited_for(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    shard = shard_of(root, publisher.publish())
    os.rename(shard, shard + ".late")
    watcher = watch(engine)
    receipt = step(watcher)
    assert receipt.error is not None
    assert receipt.error["kind"] == "missing-file"
    os.rename(shard + ".late", shard)
    run_until(watcher, lambda: engine.label == "e1-v1")


def test_case_49_while_one_version_is_waited_for_a_newer_one_is_taken(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    os.unlink(shard_of(root, publisher.publish()))
    watcher = watch(engine)
    step(watcher)
    publisher.publish()
    assert step(watcher).label == "e1-v2"


def test_case_49_in_order_a_version_is_skipped_only_after_the_patience(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    os.unlink(shard_of(root, publisher.publish()))
    publisher.publish()
    patient, hasty = watch(engine, follow="every"), watch(engine, follow="every", patience=0.0)
    step(patient)
    assert patient.step() is None
    step(hasty)
    assert step(hasty).label == "e1-v2"


def test_case_29_a_version_collected_before_it_was_read_gives_way_to_the_newest(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    publisher.publish()
    doomed: list[Manifest] = [publisher.publish()]

    def collect(operation: str, path: str) -> None:
        if doomed and operation == "open" and path.startswith(doomed[0].folder):
            gone = doomed.pop()
            LocalStore(root).delete(manifest_path(gone.id))
            for entry in list(LocalStore(root).list(gone.folder)):
                LocalStore(root).delete(entry.path)

    watcher = watch(engine, root=HookedStore(LocalStore(root), collect))
    receipt = step(watcher)
    assert receipt.error is not None
    assert receipt.error["kind"] == "version-gone"
    assert step(watcher).label == "e1-v1"


# -- the pause -------------------------------------------------------------------------------------------


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


# -- proof and restarts ----------------------------------------------------------------------------------


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


def test_load_version_refuses_what_does_not_fit(watch: Watch, engine: FakeEngine, publisher: TestPublisher) -> None:
    publisher.publish(specs=SPECS[:-1])
    with pytest.raises(SchemaMismatch):
        watch(engine).load_version("latest")
    assert engine.calls == []
