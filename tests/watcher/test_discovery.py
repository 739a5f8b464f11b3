"""How the watcher finds out: polling, events, heads that lie, stores that come and go."""

from __future__ import annotations

import pytest

from ckptsync.errors import EngineUnavailable, StoreUnavailable
from ckptsync.layout import HEAD
from ckptsync.store import LocalStore
from ckptsync.store.base import put_bytes
from ckptsync.testing.engines import Failing, FakeEngine
from ckptsync.testing.hooks import Failing as FailingHook
from ckptsync.testing.hooks import HookedStore, matching

from .actions import Watch, run_until
from .publish import SCHEMA, TestPublisher


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


@pytest.mark.parametrize("moment", ["status", "start"])
def test_what_failed_for_a_moment_is_tried_again_soon_though_news_are_looked_for_every_ten_minutes(
    watch: Watch, publisher: TestPublisher, moment: str
) -> None:
    publisher.publish()
    engine = Failing(SCHEMA)
    engine.fail(moment, EngineUnavailable)
    watcher = watch(engine, poll=600.0)
    run_until(watcher, lambda: watcher.health.ready)
    assert engine.label == "e1-v1"
