"""What is never loaded, and what is tried again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from ckptsync.errors import StoreDenied
from ckptsync.layout import HEAD, manifest_path
from ckptsync.manifest import Manifest, TensorSpec
from ckptsync.store import LocalStore
from ckptsync.testing.engines import FakeEngine
from ckptsync.testing.hooks import Failing as FailingHook
from ckptsync.testing.hooks import HookedStore, matching
from watchers.health import Receipt

from .actions import SHARD, Watch, flip, receipt_of, run_until, shard_of, step, weights
from .publish import SPECS, TestPublisher


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
    from ckptsync.canonical import canonical
    from ckptsync.digest import sha256

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


def link(path: str) -> None:
    os.rename(path, path + ".real")
    os.symlink(path + ".real", path)


def swell(path: str) -> None:
    with open(path, "ab") as file:
        file.write(b"x")


DAMAGES: dict[str, Callable[[str], None]] = {
    "bit flip": flip,
    "case 2: truncated": lambda path: os.truncate(path, os.path.getsize(path) - 1),
    "case 78: missing": os.unlink,
    "case 85: symbolic link": link,
    "case 80: trailing byte": swell,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_version_is_refused_the_old_one_serves_and_the_next_good_one_is_loaded(
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
    assert "model-00002-of-00002" in watcher.health.reason
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


@pytest.mark.parametrize("follow", ["latest", "every"])
def test_case_49_when_the_patience_passes_there_is_one_warning(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str, follow: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    os.unlink(shard_of(root, publisher.publish()))
    patient, hasty = watch(engine, follow=follow), watch(engine, follow=follow, patience=0.0)
    for watcher, warnings in ((patient, 0), (hasty, 1)):
        for _ in range(5):
            watcher.step()
        given_up = [r for r in caplog.records if "e1-v1 is not waited for any longer" in r.getMessage()]
        assert len(given_up) == warnings


def test_case_85_a_symbolic_link_is_tried_again_when_a_file_takes_its_place(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    shard, receipts = shard_of(root, publisher.publish()), []
    link(shard)
    watcher = watch(engine, on_receipt=receipts.append)
    assert step(watcher).error == receipt_of(root)["error"]
    assert receipt_of(root)["error"]["kind"] == "not-a-file"
    for _ in range(50):
        watcher.step()
    assert len(receipts) == 1
    os.replace(shard + ".real", shard)
    run_until(watcher, lambda: engine.label == "e1-v1")


def test_a_file_that_may_not_be_read_is_tried_again_though_the_listing_stays_and_warned_of_once(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A `chmod` does not show in a listing."""
    publisher.publish()
    denied = FailingHook(lambda: StoreDenied("permission denied"), matching("open", suffix=SHARD), times=3)
    watcher = watch(engine, root=HookedStore(LocalStore(root), denied))
    assert step(watcher).state == "refused"
    assert receipt_of(root)["error"]["kind"] == "denied-file"
    run_until(watcher, lambda: engine.label == "e1-v1")
    assert denied.times == 0
    assert len([r for r in caplog.records if "e1-v1 is not loaded" in r.getMessage()]) == 1


def test_in_order_a_file_that_stays_denied_holds_the_line_only_for_the_patience(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    shard = os.path.relpath(shard_of(root, publisher.publish()), root)
    publisher.publish()
    denied = FailingHook(lambda: StoreDenied("permission denied"), matching("open", suffix=shard))
    store = HookedStore(LocalStore(root), denied)
    patient = watch(engine, root=store, follow="every")
    hasty = watch(engine, root=store, follow="every", patience=0.0)
    step(patient)
    assert patient.step() is None
    step(hasty)
    assert step(hasty).label == "e1-v2"


def test_a_newer_version_that_is_refused_while_an_older_one_waits_has_its_receipt_and_stays_the_reason(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    publisher.publish()
    newer, receipts = [], []

    def progress(_: int) -> None:
        if not newer:
            newer.append(publisher.publish())
            flip(shard_of(root, newer[0]))

    watcher = watch(engine, progress=progress, on_receipt=receipts.append)
    assert step(watcher).label == "e1-v1"
    assert [(r.version, r.state) for r in receipts] == [("e1-v2", "refused"), ("e1-v1", "serving")]
    assert watcher.health.ready
    assert "xxh3-128" in watcher.health.reason


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
