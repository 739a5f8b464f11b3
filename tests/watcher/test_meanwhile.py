"""What changes between two looks of a watcher, and what its receipts and its health say of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from ckptsync.channel import Channel
from ckptsync.errors import EngineDirty, InvalidName, SchemaMismatch
from ckptsync.manifest import TensorSpec
from ckptsync.testing.engines import Failing, FakeEngine
from ckptsync.transports.handover import FILES, sent_by
from ckptsync.version import VersionId
from watchers.stage import MissingFile

from .actions import Watch, shard_of, step
from .publish import SCHEMA, SPECS, TestPublisher


def once(act: Callable[[], object]) -> Callable[[int], None]:
    """As bytes arrive in the stage, at the first of them."""
    done: list[object] = []
    return lambda _: None if done else done.append(act())


def pause(engine: FakeEngine) -> None:
    engine.paused = True


def test_an_engine_that_somebody_else_pauses_while_a_version_is_staged_is_left_alone(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher
) -> None:
    publisher.publish()
    watcher = watch(engine, progress=once(lambda: pause(engine)))
    assert watcher.step() is None
    assert (engine.calls, engine.paused) == ([], True)


def test_a_version_that_takes_over_is_loaded_though_the_engine_was_paused_while_it_was_staged(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher
) -> None:
    publisher.publish(metadata=sent_by(FILES))
    watcher = watch(engine, progress=once(lambda: pause(engine)))
    assert step(watcher).label == "e1-v1"
    assert not engine.paused


def test_a_version_that_takes_over_waits_too_if_the_engine_was_restarted_while_it_was_staged(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher
) -> None:
    publisher.publish(metadata=sent_by(FILES))
    watcher = watch(engine, progress=once(engine.restart))
    assert watcher.step() is None
    assert engine.calls == []


def test_what_comes_while_it_stages_and_does_not_fit_is_refused_and_what_was_staged_is_loaded(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher
) -> None:
    publisher.publish()
    watcher = watch(engine, progress=once(lambda: publisher.publish(specs=SPECS[:-1])))
    assert step(watcher).label == "e1-v1"
    assert "e1-v2" in watcher.health.reason


def test_a_restarted_engine_that_fails_its_own_version_is_dirty_since_there_is_nothing_older_to_go_back_to(
    watch: Watch, publisher: TestPublisher
) -> None:
    engine = Failing(SCHEMA)
    publisher.publish()
    watcher = watch(engine)
    step(watcher)
    engine.restart()
    engine.fail("update", EngineDirty)
    again = step(watcher)
    assert (again.state, again.stage_seconds) == ("dirty", 0.0), "it was on this host"
    assert engine.calls.count("update e1-v1") == 1


def test_a_receipt_tells_seconds_of_staging_and_no_fingerprint_of_what_was_not_loaded(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher
) -> None:
    publisher.publish()
    watcher = watch(engine)
    assert 0 < watcher.load_version("1").stage_seconds < 60
    watcher.load_version("latest")
    publisher.publish(specs=SPECS[:-1])
    refused = step(watcher)
    assert (refused.state, refused.stage_seconds, refused.fingerprint) == ("refused", 0.0, "")


def test_an_engine_that_is_not_proven_is_as_many_versions_behind_as_there_are(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        publisher.publish()
    watcher = watch(engine)
    step(watcher)
    assert watcher.health.lag == 0
    engine.restart()
    monkeypatch.setattr(watcher, "_attempt_what_is_due", watcher._look_at_engine)
    watcher.step()
    assert (watcher.health.version, watcher.health.lag) == ("", 3)


def test_before_any_files_a_version_that_was_sent_is_believed(watch: Watch, engine: FakeEngine, root: str) -> None:
    channel = Channel.create(root)
    watcher = watch(engine)
    watcher.step()
    channel.note_sent(VersionId(1, 1))
    engine.label = "e1-v1"
    watcher.step()
    assert watcher.health.version == "e1-v1"


def test_a_file_that_comes_late_is_waited_for_when_a_version_is_asked_for_by_name(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    path = shard_of(root, publisher.publish())
    os.rename(path, path + ".late")
    with pytest.raises(MissingFile):
        watch(engine, patience=0.0).load_version("1")
    come = threading.Timer(0.3, os.rename, (path + ".late", path))
    come.start()
    try:
        assert watch(engine).load_version("1").label == "e1-v1"
    finally:
        come.join()


def test_a_dtype_that_differs_is_refused_unless_a_cast_is_allowed(watch: Watch, publisher: TestPublisher) -> None:
    narrow = {name: TensorSpec(name, "BF16", spec.shape) for name, spec in SCHEMA.items()}
    publisher.publish()
    with pytest.raises(SchemaMismatch):
        watch(FakeEngine(narrow)).load_version("1")
    assert watch(FakeEngine(narrow), allow_cast=True).load_version("1").state == "serving"


def test_a_reader_is_a_plain_name(watch: Watch, engine: FakeEngine) -> None:
    with pytest.raises(InvalidName, match="reader"):
        watch(engine, reader="../else")
