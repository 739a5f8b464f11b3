"""A trainer brings weights to an engine past its watcher: whose turn is it, and what the watcher believes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ckptsync.channel import Channel
from ckptsync.testing.engines import FakeEngine
from ckptsync.transports.handover import FILES, sent_by
from ckptsync.version import VersionId
from tests.waiting import until
from watchers.watcher import Watcher

from .publish import TestPublisher

Watch = Callable[..., Watcher]


def sent(root: str, number: int, epoch: int = 1) -> str:
    """As a trainer announces it."""
    version = VersionId(epoch, number)
    Channel.open(root).note_sent(version)
    return version.label


def test_a_version_that_was_sent_is_served_and_not_loaded_from_files(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    publisher.publish()
    watcher = watch(engine)
    watcher.step()
    engine.calls.clear()
    engine.label = sent(root, 2)
    publisher.publish()  # e1-v2, persisted behind the fast path
    assert watcher.step() is None
    assert (watcher.health.version, watcher.health.ready, engine.calls) == ("e1-v2", True, [])
    publisher.publish()
    receipt = watcher.step()
    assert receipt is not None
    assert receipt.label == engine.label == "e1-v3"


def test_a_first_version_that_was_sent_is_not_loaded_again_though_its_files_were_there_before_the_watcher_looked(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    Channel.create(root)
    watcher = watch(engine)
    watcher.step()
    engine.calls.clear()
    engine.label = sent(root, 1)
    publisher.publish()
    assert watcher.step() is None
    assert (watcher.health.version, watcher.health.ready, engine.calls) == ("e1-v1", True, [])


def test_a_label_that_a_watcher_finds_when_it_starts_is_loaded_again_if_there_are_files_of_it(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    publisher.publish()
    engine.label = sent(root, 1)  # or by the files, by a watcher that died before its canary was replayed
    receipt = watch(engine).step()
    assert receipt is not None
    assert (receipt.state, receipt.label) == ("serving", "e1-v1")


def test_a_watcher_that_starts_later_believes_it_too(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    publisher.publish()
    engine.label = sent(root, 5)
    watcher = watch(engine)
    assert watcher.step() is None
    assert (watcher.health.version, watcher.health.ready, engine.calls) == ("e1-v5", True, [])


@pytest.mark.parametrize(("announced", "label"), [((1, 2), "e1-v3"), ((2, 9), "e1-v3"), (None, "e1-v3"), ((1, 9), "x")])
def test_a_label_that_no_trainer_of_the_channel_announced_is_not_believed(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str, announced: tuple[int, int] | None, label: str
) -> None:
    publisher.publish()
    watcher = watch(engine)
    watcher.step()
    if announced is not None:
        sent(root, announced[1], announced[0])
    engine.label = label
    receipt = watcher.step()
    assert receipt is not None
    assert receipt.label == engine.label == "e1-v1"


def test_an_engine_that_is_being_sent_to_is_left_alone_whatever_comes_by_files(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    publisher.publish()
    watcher = watch(engine)
    watcher.step()
    engine.calls.clear()
    engine.paused, engine.label = True, ""  # in mid-send
    publisher.publish()
    for _ in range(3):
        assert watcher.step() is None
    assert engine.calls == []
    engine.paused, engine.label = False, sent(root, 3)
    assert watcher.step() is None
    assert watcher.health.version == "e1-v3"


def test_a_version_that_takes_over_is_loaded_at_once_and_resumes_the_engine(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    publisher.publish()
    watcher = watch(engine)
    watcher.step()
    engine.paused, engine.label, engine.weights = True, "", "a mix"
    assert watcher.step() is None
    second = publisher.publish(metadata=sent_by(FILES))
    receipt = watcher.step()
    assert receipt is not None
    assert (receipt.state, engine.label, engine.paused) == ("serving", second.id.label, False)
    assert engine.weights != "a mix"


def test_a_takeover_that_fails_leaves_the_mix_paused(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    sent(root, 1)
    Channel.create(root)
    publisher.publish()
    watcher = watch(engine)
    watcher.step()
    engine.paused, engine.label, engine.weights = True, "", "a mix"
    watcher.step()
    publisher.publish(metadata=sent_by(FILES))
    engine.start = refuse  # type: ignore[method-assign]
    receipt = watcher.step()
    assert receipt is not None
    assert receipt.state == "dirty"
    assert engine.paused
    assert not watcher.health.ready


def refuse(version: object) -> None:
    from ckptsync.errors import EngineRefused

    raise EngineRefused("not today")


def test_an_engine_that_was_left_paused_for_too_long_is_loaded_again(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher
) -> None:
    publisher.publish()
    watcher = watch(engine, yields=0.0)
    watcher.step()
    engine.paused, engine.weights = True, "a mix"
    receipt = watcher.step()
    assert receipt is not None
    assert (receipt.state, engine.paused, engine.weights == "a mix") == ("serving", False, False)


def test_two_sends_that_both_were_found_under_way_are_not_one_long_pause(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = 0.0
    monkeypatch.setattr("watchers.fast_path.time", SimpleNamespace(monotonic=lambda: seconds))
    publisher.publish()
    watcher = watch(engine, yields=300.0)
    watcher.step()
    engine.calls.clear()
    engine.paused = True  # e1-v2 is being sent
    watcher.step()
    engine.label = sent(root, 2)  # has come; it computes, and now e1-v3 is being sent, all since the last look
    seconds = 500.0
    assert watcher.step() is None
    assert engine.calls == [], "the trainer is alive: nothing is loaded under its hands"
    seconds = 801.0
    receipt = watcher.step()
    assert receipt is not None
    assert (receipt.label, engine.paused) == ("e1-v1", False), "and if it dies now, it is given up in the end"


def test_an_engine_that_was_restarted_gets_the_newest_files_and_says_that_it_is_behind(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    publisher.publish()
    watcher = watch(engine)
    watcher.step()
    engine.label = sent(root, 7)
    watcher.step()
    engine.restart()
    receipt = watcher.step()
    assert receipt is not None
    assert engine.label == "e1-v1"
    assert watcher.health.ready
    assert watcher.health.reason.startswith("behind: e1-v7 came to the engine without files")
    engine.label = sent(root, 8)
    watcher.step()
    assert (watcher.health.version, watcher.health.reason) == ("e1-v8", "")


def test_a_label_that_changes_back_to_nothing_is_loaded_from_files_though_nothing_ever_was(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    first = publisher.publish()
    engine.label = sent(root, 4)
    watcher = watch(engine)
    watcher.step()
    assert watcher.health.version == "e1-v4"
    engine.label = ""
    until(lambda: watcher.step() is not None)
    assert engine.label == first.id.label


def test_a_watcher_that_starts_in_mid_send_leaves_the_engine_alone_then_and_in_the_next_send(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    Channel.create(root)
    first = sent(root, 1)
    engine.paused = True
    watcher = watch(engine)
    assert watcher.step() is None
    publisher.publish()  # e1-v1, persisted behind the fast path
    assert watcher.step() is None
    engine.paused, engine.label = False, first
    assert watcher.step() is None
    assert (watcher.health.version, watcher.health.ready) == ("e1-v1", True)
    sent(root, 2)
    engine.paused, engine.label = True, ""
    assert watcher.step() is None
    publisher.publish()
    assert watcher.step() is None
    assert engine.calls == []


def test_a_version_that_arrives_at_an_engine_that_was_found_paused_makes_it_whole(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    Channel.create(root)
    engine.paused = True
    watcher = watch(engine)
    assert watcher.step() is None
    engine.paused, engine.label = False, sent(root, 1)
    assert watcher.step() is None
    engine.paused, engine.label = True, ""  # the next one is being sent
    publisher.publish()
    assert watcher.step() is None
    assert engine.calls == []


def test_an_engine_that_is_found_paused_in_a_send_that_never_ends_is_loaded_in_the_end(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    publisher.publish()
    sent(root, 2)
    engine.paused, engine.weights = True, "a mix"
    watcher = watch(engine, yields=0.01)
    until(lambda: watcher.step() is not None)
    assert (engine.label, engine.paused, engine.weights == "a mix") == ("e1-v1", False, False)


def test_an_engine_that_was_restarted_and_is_being_sent_to_when_it_is_seen_again_is_left_alone(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    publisher.publish()
    watcher = watch(engine)
    watcher.step()
    engine.restart()
    engine.paused, second = True, sent(root, 2)
    engine.calls.clear()
    assert watcher.step() is None
    assert not watcher.health.ready
    engine.paused, engine.label = False, second
    assert watcher.step() is None
    assert (watcher.health.version, watcher.health.ready, engine.calls) == ("e1-v2", True, [])


def test_answers_of_before_and_after_the_end_of_a_send_are_not_taken_for_somebody_elses_load(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    publisher.publish()
    watcher = watch(engine)
    watcher.step()
    engine.calls.clear()
    engine.label = sent(root, 2)
    whole, torn = engine.status, replace(engine.status(), label="")
    answers = iter([torn])
    engine.status = lambda: next(answers, None) or whole()  # type: ignore[method-assign]
    assert watcher.step() is None
    assert watcher.step() is None
    assert (watcher.health.version, watcher.health.ready, engine.calls) == ("e1-v2", True, [])
