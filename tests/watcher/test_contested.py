"""Two watchers of one engine: they notice each other and say so, and do not undo each other for ever."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptsync.errors import EngineRefused, StoreDenied
from ckptsync.testing.engines import FakeEngine
from watchers import claims, serving
from watchers.claims import claimed
from watchers.watcher import Watcher

from .actions import Watch, step
from .publish import TestPublisher


def test_two_watchers_of_different_channels_fight_three_times_then_one_gives_way_and_says_why(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, tmp_path: Path
) -> None:
    publisher.publish()
    other = TestPublisher(str(tmp_path / "other"))
    for _ in range(2):
        other.publish()
    fight(engine, watch(engine), watch(engine, root=str(tmp_path / "other"), stage=str(tmp_path / "stage-2")))


def test_two_watchers_of_one_channel_that_follow_different_versions_do_the_same(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher
) -> None:
    for _ in range(2):
        publisher.publish()
    fight(engine, watch(engine), watch(engine, follow="e1-v1"))


def test_watchers_that_look_seldom_do_not_undo_each_other_for_ever_either(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, tmp_path: Path, clock: Clock
) -> None:
    publisher.publish()
    other = TestPublisher(str(tmp_path / "other"))
    for _ in range(2):
        other.publish()
    clock.each = 1000.0
    fight(engine, watch(engine), watch(engine, root=str(tmp_path / "other"), stage=str(tmp_path / "stage-2")))


def test_changes_after_a_long_peace_are_taken_back_however_many(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, clock: Clock
) -> None:
    publisher.publish()
    watcher = watch(engine)
    step(watcher)
    for _ in range(5):
        clock.now += 301
        watcher.step()
        engine.label = "mine"
        assert step(watcher).label == "e1-v1"
    assert watcher.health.ready


@dataclass
class Clock:
    now: float = 0.0
    each: float = 0.0
    """How far it goes each time that it is looked at."""

    def monotonic(self) -> float:
        self.now += self.each
        return self.now

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(serving, "time", clock)
    return clock


def fight(engine: FakeEngine, *watchers: Watcher) -> None:
    for _ in range(30):
        for watcher in watchers:
            watcher.step()
    assert engine.calls.count("pause") < 10
    (loser,) = [watcher for watcher in watchers if not watcher.health.ready]
    (winner,) = [watcher for watcher in watchers if watcher.health.ready]
    assert "Does a second watcher follow it" in loser.health.reason
    assert winner.health.version == engine.label


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where watchers of all stages meet: not those of other test runs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_claim_keeps_other_watchers_of_this_host_out_and_names_the_holder(tmp_path: Path) -> None:
    stage, url = str(tmp_path / "stage"), "http://127.0.0.1:8000"
    with claimed(stage, url, "s3://bucket/run1"):
        for theirs in (stage, str(tmp_path / "another-stage")):
            for name in (url, "http://localhost:8000/"):
                with (
                    pytest.raises(EngineRefused, match=rf"process {os.getpid()}, s3://bucket/run1"),
                    claimed(theirs, name, "b"),
                ):
                    pass
        with claimed(stage, "http://127.0.0.1:8001", "another engine"):
            pass
    with claimed(stage, url, "the next"):
        pass


def test_two_pods_that_share_a_stage_may_each_have_an_engine_at_their_own_loopback_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stage, url = str(tmp_path / "stage"), "http://127.0.0.1:8000"
    with claimed(stage, url, "one"), claimed(stage, "http://10.0.0.7:8000", "a third"):
        monkeypatch.setattr(claims, "_namespace", lambda: "net:[another]")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "their-own"))
        (tmp_path / "their-own").mkdir()
        with (
            claimed(stage, url, "two"),
            pytest.raises(EngineRefused, match="a third"),
            claimed(stage, "http://10.0.0.7:8000", "it is one engine for both"),
        ):
            pass


def test_a_name_that_is_no_url_is_another_engine_in_another_stage(tmp_path: Path) -> None:
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    with (
        claimed(ours, "rollout-0", "one job"),
        claimed(theirs, "rollout-0", "another job on this host"),
        pytest.raises(EngineRefused, match="one job"),
        claimed(ours, "rollout-0", "of the same stage"),
    ):
        pass


def test_a_folder_of_claims_that_somebody_else_made_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / f"ckptsync-engines-{os.geteuid()}").symlink_to(tmp_path)
    with pytest.raises(StoreDenied, match="not a folder of ours"), claimed(str(tmp_path / "stage"), "http://a:1", "x"):
        pass


def test_load_version_on_a_contested_engine_is_refused_until_the_engine_is_restarted(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher
) -> None:
    publisher.publish()
    watcher = watch(engine)
    step(watcher)
    for _ in range(3):
        engine.label = "theirs"
        watcher.step()
    with pytest.raises(EngineRefused, match=r"3 times, each time soon after .*, last to 'theirs'"):
        watcher.load_version("1")
    engine.restart()
    assert step(watcher).label == "e1-v1"
    assert watcher.health.ready


def test_an_engine_that_a_person_changed_once_is_taken_back(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher
) -> None:
    publisher.publish()
    watcher = watch(engine)
    step(watcher)
    engine.label = "mine"
    assert step(watcher).label == "e1-v1"
    assert watcher.health.ready
