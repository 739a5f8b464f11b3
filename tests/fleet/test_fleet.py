"""Many replicas under one watcher: one bad one is named and isolated, and holds nobody."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ckptsync.engine import EngineStatus, StagedVersion
from ckptsync.errors import EngineDirty, EngineRefused, EngineUnavailable, SchemaMismatch, StoreUnavailable
from ckptsync.manifest import TensorSpec
from ckptsync.store import LocalStore
from ckptsync.testing.engines import Dies, Failing, FakeEngine, KeepsLabel
from ckptsync.testing.hooks import Failing as FailingHook
from ckptsync.testing.hooks import HookedStore, matching
from tests.waiting import until
from tests.watcher.actions import flip, shard_of, weights
from tests.watcher.conftest import CountingStore, staged_folders
from tests.watcher.publish import SCHEMA, SPECS, TestPublisher
from watchers.rollout import LOOKS_TO_BE_AWAY, Quorum

from .conftest import Hanging, Replicas, fakes

Fleets = Callable[..., Replicas]

EVERYBODY = {"quorum": Quorum.parse("100%")}


def failing(engine: FakeEngine) -> Failing:
    assert isinstance(engine, Failing)
    return engine


def test_all_members_serve_the_version_and_the_store_is_read_once(
    replicas: Fleets, publisher: TestPublisher, root: str
) -> None:
    manifest, store = publisher.publish(), CountingStore(root)
    fleet = replicas({"store": store}, **fakes("a", "b", "c"))
    until(lambda: fleet.serve("e1-v1"))
    assert {engine.weights for engine in fleet.engines.values()} == {weights(root, manifest)}
    assert store.read == manifest.nbytes
    until(lambda: fleet.fleet.health.reason == "")
    health = fleet.fleet.health
    assert (health.ready, health.version, health.state) == (True, "e1-v1", "serving")


def test_each_member_writes_receipts_under_a_name_of_its_own(
    replicas: Fleets, publisher: TestPublisher, root: str
) -> None:
    publisher.publish()
    urls = ("http://10.0.0.1:8000", "http://10.0.0.2:8000/engine")
    fleet = replicas(None, **fakes(*urls))
    until(lambda: fleet.serve("e1-v1") and len(fleet.receipts) == 2)
    found = sorted(os.listdir(f"{root}/receipts"))
    assert found == ["fleet.10.0.0.1-8000.json", "fleet.10.0.0.2-8000-engine.json"]
    with open(f"{root}/receipts/{found[0]}", encoding="utf-8") as file:
        assert json.load(file)["state"] == "serving"


def test_case_104_a_version_that_one_replica_refuses_is_not_the_fleets_and_the_straggler_is_named(
    replicas: Fleets, publisher: TestPublisher
) -> None:
    fleet = replicas(EVERYBODY, **fakes("a", "b"))
    publisher.publish()
    until(lambda: fleet.serve("e1-v1"))
    failing(fleet["b"]).fail("update", EngineRefused, only="e1-v2")
    publisher.publish()
    until(lambda: fleet.serve("e1-v2", "a") and "b: injected at update" in fleet.fleet.health.reason)
    assert fleet.serve("e1-v1", "b"), "it was not touched, and serves on"
    assert fleet.fleet.health.version == "e1-v1"


def test_a_quorum_makes_a_version_the_fleets_though_one_replica_refuses_it(
    replicas: Fleets, publisher: TestPublisher
) -> None:
    fleet = replicas(None, **fakes("a", "b", "c"))
    publisher.publish()
    until(lambda: fleet.serve("e1-v1"))
    failing(fleet["b"]).fail("update", EngineRefused, only="e1-v2")
    publisher.publish()
    until(lambda: fleet.fleet.health.version == "e1-v2" and "b: injected" in fleet.fleet.health.reason)
    assert fleet.fleet.health.ready


def test_case_94_a_half_applied_load_is_undone_on_its_replica_alone(
    replicas: Fleets, publisher: TestPublisher, root: str
) -> None:
    first = publisher.publish()
    fleet = replicas(None, **fakes("a", "b", "c"))
    until(lambda: fleet.serve("e1-v1"))
    failing(fleet["b"]).fail("update", EngineDirty, only="e1-v2")
    publisher.publish()
    until(lambda: fleet.serve("e1-v2", "a", "c") and fleet.serve("e1-v1", "b"))
    assert fleet["b"].weights == weights(root, first), "the last good version, whole"
    assert not fleet["b"].paused
    until(lambda: fleet.fleet.health.version == "e1-v2" and "b: injected at update" in fleet.fleet.health.reason)


def test_case_94_a_replica_that_dies_is_out_and_comes_back_on_the_newest_version(
    replicas: Fleets, publisher: TestPublisher
) -> None:
    dies = Dies(SCHEMA, only="e1-v2", deaths=1)
    fleet = replicas(None, **fakes("a", "b"), c=dies)
    publisher.publish()
    until(lambda: fleet.serve("e1-v1"))
    publisher.publish()
    until(lambda: fleet.serve("e1-v2", "a", "b") and dies.dead)
    until(lambda: not fleet.fleet.members()["c"].ready and fleet.fleet.health.ready)
    dies.restart()
    until(lambda: fleet.serve("e1-v2"))


def test_case_105_a_replica_that_never_takes_the_label_does_not_count(
    replicas: Fleets, publisher: TestPublisher
) -> None:
    fleet = replicas(EVERYBODY, **fakes("a"), b=KeepsLabel(SCHEMA))
    publisher.publish()
    until(lambda: fleet.serve("e1-v1", "a") and bool(fleet.fleet.rollout and fleet.fleet.rollout.failed))
    assert not fleet.fleet.health.ready
    assert fleet.fleet.health.version == ""
    until(lambda: "b: the engine reports 'no version'" in fleet.fleet.health.reason)


def test_case_106_a_replica_that_cannot_flush_goes_back_and_no_other_waits_for_it(
    replicas: Fleets, publisher: TestPublisher
) -> None:
    fleet = replicas(None, **fakes("a", "b", "c"))
    publisher.publish()
    until(lambda: fleet.serve("e1-v1"))
    failing(fleet["a"]).fail("finish", EngineDirty, only="e1-v2")
    publisher.publish()
    until(lambda: fleet.serve("e1-v2", "b", "c") and fleet.serve("e1-v1", "a"))
    publisher.publish()
    until(lambda: fleet.serve("e1-v3"), what="the next version reaches all again")


def test_a_replica_that_hangs_holds_nobody_and_is_reported_after_its_deadline(
    replicas: Fleets, publisher: TestPublisher
) -> None:
    hangs = Hanging("e1-v2")
    fleet = replicas({"deadline": 0.2}, **fakes("a", "b"), c=hangs)
    publisher.publish()
    until(lambda: fleet.serve("e1-v1"))
    publisher.publish()
    assert hangs.hangs.wait(60)
    until(lambda: fleet.serve("e1-v2", "a", "b"))
    until(lambda: "c: nothing was heard of it" in fleet.fleet.health.reason)
    until(lambda: not fleet.fleet.members()["c"].ready and fleet.fleet.health.ready)
    publisher.publish()
    until(lambda: fleet.serve("e1-v3", "a", "b"))
    hangs.let_go.set()
    until(lambda: fleet.serve("e1-v3"), what="it goes on once it answers")


def test_a_version_that_does_not_fit_one_replica_is_refused_there_before_its_pause(
    replicas: Fleets, publisher: TestPublisher
) -> None:
    other = Failing({spec.name: spec for spec in SPECS[:-1]})
    fleet = replicas(None, **fakes("a", "b"), c=other)
    publisher.publish()
    until(lambda: fleet.serve("e1-v1", "a", "b") and "does not fit" in fleet.fleet.health.reason)
    until(lambda: [receipt.error["kind"] for receipt in fleet.receipts if receipt.error] == [SchemaMismatch.kind])
    assert other.calls == []


def test_a_damaged_version_touches_no_engine_and_the_fleet_says_why(
    replicas: Fleets, publisher: TestPublisher, root: str
) -> None:
    fleet = replicas(None, **fakes("a", "b"))
    publisher.publish()
    until(lambda: fleet.serve("e1-v1"))
    manifest = publisher.write()
    flip(shard_of(root, manifest))
    publisher.channel.commit(publisher.epoch, manifest)
    until(lambda: manifest.id.label in [receipt.version for receipt in fleet.receipts])
    assert [engine.calls.count("pause") for engine in fleet.engines.values()] == [1, 1]
    until(lambda: "in the manifest" in fleet.fleet.health.reason)
    assert fleet.fleet.health.ready
    publisher.publish()
    until(lambda: fleet.serve(f"e1-v{publisher.number - 1}"))


def test_a_fleet_whose_only_version_is_damaged_goes_on_saying_so(
    replicas: Fleets, publisher: TestPublisher, root: str
) -> None:
    flip(shard_of(root, publisher.publish()))
    fleet = replicas(None, **fakes("a"))
    until(lambda: fleet.receipts)
    for _ in range(3):
        fleet.fleet.step()
    assert "in the manifest" in fleet.fleet.health.reason
    assert not fleet.fleet.health.ready


def test_a_late_joiner_is_brought_up_before_it_counts_as_ready(replicas: Fleets, publisher: TestPublisher) -> None:
    fleet = replicas(None, **fakes("a"))
    publisher.publish()
    until(lambda: fleet.serve("e1-v1"))
    late = FakeEngine(SCHEMA)
    ready_with: list[str] = []
    late.while_paused = lambda: ready_with.append(late.label) if fleet.fleet.members()["b"].ready else None
    fleet.engines["b"] = late
    fleet.source.listed.append("b")
    until(lambda: fleet.serve("e1-v1", "b"))
    assert ready_with == []


def test_a_late_joiner_is_served_from_the_stage_while_the_store_is_down(
    replicas: Fleets, publisher: TestPublisher, root: str
) -> None:
    outage = FailingHook(lambda: StoreUnavailable("down"), matching("open", "list", "write", "delete"), times=0)
    fleet = replicas({"store": HookedStore(LocalStore(root), outage)}, **fakes("a"))
    publisher.publish()
    until(lambda: fleet.serve("e1-v1"))
    outage.times = 1 << 30
    fleet.engines["b"] = FakeEngine(SCHEMA)
    fleet.source.listed.append("b")
    until(lambda: fleet.serve("e1-v1", "b"))


def test_a_member_that_vanishes_is_left_alone_and_its_stage_released(
    replicas: Fleets, publisher: TestPublisher
) -> None:
    fleet = replicas(None, **fakes("a", "b"))
    publisher.publish()
    until(lambda: fleet.serve("e1-v1"))
    fleet.source.listed.remove("b")
    until(lambda: set(fleet.fleet.members()) == {"a"})
    for _ in range(3):
        manifest = publisher.publish()
        until(lambda label=manifest.id.label: fleet.serve(label, "a"))  # type: ignore[misc]
    until(lambda: fleet["b"].label == "e1-v1")
    assert not any("-1-" in name for name in staged_folders(fleet.fleet.stage.folder)), "nobody holds the first one"


def test_a_member_that_is_not_listed_for_one_look_stays(replicas: Fleets, publisher: TestPublisher) -> None:
    fleet = replicas({"poll": 0.05}, **fakes("a", "b"))
    publisher.publish()
    until(lambda: fleet.serve("e1-v1"))
    (member,) = [each for each in fleet.fleet._members.present() if each.url == "b"]
    fleet.source.listed.remove("b")
    until(lambda: member.missed > 0)
    fleet.source.listed.append("b")
    until(lambda: member.missed == 0 or member not in fleet.fleet._members.present())
    assert member in fleet.fleet._members.present()


def test_two_fleets_on_one_host_do_not_share_an_engine_though_channel_and_stage_differ(
    replicas: Fleets, publisher: TestPublisher, root: str, tmp_path: Path
) -> None:
    publisher.publish()
    TestPublisher(str(tmp_path / "other")).publish()
    a, b, c = "http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://10.0.0.3:8000"
    first = replicas(None, **fakes(a, b))
    until(lambda: first.serve("e1-v1"))
    second = replicas({"store": str(tmp_path / "other"), "reader": "second"}, **{a: first[a], c: FakeEngine(SCHEMA)})
    until(lambda: second.serve("e1-v1", c))
    assert set(second.fleet.members()) == {c}
    until(lambda: f"{a} is followed by another watcher on this host" in second.fleet.health.reason)
    assert f"process {os.getpid()}, {root}" in second.fleet.health.reason, "its channel is named"
    first.source.listed.remove(a)
    until(lambda: set(second.fleet.members()) == {a, c}, what="it is taken over when it is let go of")


def test_an_engine_that_another_watcher_lets_go_of_is_taken_over_soon_though_news_are_looked_for_every_ten_minutes(
    replicas: Fleets, publisher: TestPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("watchers.fleet.AWAY", 0.1)
    publisher.publish()
    a, b = "http://10.0.0.1:8000", "http://10.0.0.2:8000"
    first = replicas(None, **fakes(a, b))
    until(lambda: first.serve("e1-v1"))
    second = replicas({"poll": 600.0, "reader": "second"}, **{a: first[a]})
    until(lambda: "is followed by another watcher" in second.fleet.health.reason)
    first.source.listed.remove(a)
    until(lambda: set(second.fleet.members()) == {a}, 30)


def test_a_restarted_replica_gets_the_version_back_by_itself(replicas: Fleets, publisher: TestPublisher) -> None:
    fleet = replicas(None, **fakes("a", "b"))
    publisher.publish()
    until(lambda: fleet.serve("e1-v1"))
    fleet["b"].restart()
    until(lambda: fleet.serve("e1-v1"))


def test_every_is_followed_in_order_by_all(replicas: Fleets, publisher: TestPublisher) -> None:
    fleet = replicas({"follow": "every"}, **fakes("a", "b"))
    publisher.publish()
    until(lambda: fleet.serve("e1-v1"))
    for _ in range(4):
        publisher.publish()
    until(lambda: fleet.serve("e1-v5"))
    for engine in fleet.engines.values():
        assert [call for call in engine.calls if call.startswith("update")] == [f"update e1-v{n}" for n in range(1, 6)]


def test_load_version_goes_back_everywhere_and_stays_there_until_it_is_told_latest(
    replicas: Fleets, publisher: TestPublisher, root: str, tmp_path: Path
) -> None:
    for _ in range(3):
        publisher.publish()
    fleet = replicas(EVERYBODY, **fakes("a", "b"))
    until(lambda: fleet.serve("e1-v3"))
    receipt = fleet.fleet.load_version("2")
    assert (receipt.state, receipt.label, receipt.proof) == ("serving", "e1-v2", 2)
    assert receipt.created > 0
    assert fleet.serve("e1-v2")
    publisher.publish()
    fleet.fleet.step()
    assert fleet.fleet.rollout is not None
    assert fleet.fleet.rollout.target.id.label == "e1-v2", "it stays there"
    assert fleet.fleet.load_version("latest").label == "e1-v4"
    publisher.publish()
    until(lambda: fleet.serve("e1-v5"))


def test_load_version_says_who_would_not(replicas: Fleets, publisher: TestPublisher) -> None:
    for _ in range(2):
        publisher.publish()
    fleet = replicas({"follow": "e1-v1", **EVERYBODY}, **fakes("a", "b"))
    until(lambda: fleet.serve("e1-v1"))
    failing(fleet["b"]).fail("update", EngineDirty, only="e1-v2")
    with pytest.raises(EngineDirty, match="b: injected at update"):
        fleet.fleet.load_version("2")


def test_load_version_ends_as_soon_as_engines_that_do_not_answer_leave_no_quorum(
    replicas: Fleets, publisher: TestPublisher
) -> None:
    for _ in range(2):
        publisher.publish()
    fleet = replicas(None, **fakes("a", "b"))
    until(lambda: fleet.serve("e1-v2"))
    failing(fleet["b"]).fail("status", EngineUnavailable, times=1 << 30)
    until(lambda: "b: injected at status" in fleet.fleet.health.reason)
    began = time.monotonic()
    with pytest.raises(EngineUnavailable, match=r"e1-v1 has no quorum: .* b: injected at status"):
        fleet.fleet.load_version("1")
    assert time.monotonic() - began < 300, "and not at the deadline of 600 s"
    assert str(fleet.fleet._following.name) == "latest"
    until(lambda: fleet.serve("e1-v2", "a"), what="what was followed is as it was")


def test_load_version_is_dirty_only_where_an_engine_was_touched(replicas: Fleets, publisher: TestPublisher) -> None:
    for _ in range(2):
        publisher.publish()
    fleet = replicas(EVERYBODY, **fakes("a", "b", "c"))
    until(lambda: fleet.serve("e1-v2"))
    failing(fleet["b"]).fail("update", EngineRefused, times=99, only="e1-v1")
    with pytest.raises(EngineRefused, match="b: injected at update"):
        fleet.fleet.load_version("1")
    failing(fleet["c"]).fail("status", EngineUnavailable, times=1 << 30)
    failing(fleet["a"]).fail("update", EngineDirty, times=99, only="e1-v1")
    until(lambda: fleet.serve("e1-v2", "a", "b"))
    with pytest.raises(EngineDirty, match="a: injected at update"):
        fleet.fleet.load_version("1")


def test_an_engine_is_named_once_by_itself_or_by_the_fleet(replicas: Fleets, publisher: TestPublisher) -> None:
    urls = ["http://10.0.0.1:80", "http://10.0.0.1:8000"]
    fleet = replicas(EVERYBODY, **fakes(*urls))
    failing(fleet[urls[0]]).fail("start", EngineRefused, times=99, says=f"start: {urls[0]} has a draft model")
    failing(fleet[urls[1]]).fail("start", EngineRefused, times=99, says=f"start: not {urls[0]}")
    publisher.publish()
    expected = f"start: {urls[0]} has a draft model; {urls[1]}: start: not {urls[0]}"
    until(lambda: fleet.fleet.health.reason.endswith(f"of 2; {expected}"))


def test_it_shows_a_sign_of_life_while_it_runs_though_a_member_hangs(
    replicas: Fleets, publisher: TestPublisher
) -> None:
    hangs = Hanging("e1-v1")
    fleet = replicas(None, **fakes("a"), b=hangs)
    publisher.publish()
    assert hangs.hangs.wait(60)
    until(lambda: fleet.serve("e1-v1", "a"))
    assert fleet.fleet.silence is not None
    assert fleet.fleet.silence < 10
    fleet.close()
    assert fleet.fleet.silence is None


class GoneAtItsTurn(FakeEngine):
    """Says that it is well, and does not answer when its turn comes, so many times."""

    misses = 1 << 30

    def schema(self) -> Mapping[str, TensorSpec] | None:
        if self.misses > 0:
            self.misses -= 1
            self.calls.append("schema")
            raise EngineUnavailable("gone")
        return super().schema()


def test_a_member_that_is_gone_when_its_turn_comes_does_not_stop_the_rollout(
    replicas: Fleets, publisher: TestPublisher
) -> None:
    gone = GoneAtItsTurn(SCHEMA)
    fleet = replicas({"at_once": 1}, a=gone, **fakes("b", "c"))
    publisher.publish()
    until(lambda: fleet.serve("e1-v1", "b", "c"))
    assert len(gone.calls) < 10, "it is asked less and less often"
    gone.misses = 0
    until(lambda: fleet.serve("e1-v1"))


def test_load_version_counts_a_member_that_comes_back_in_time(replicas: Fleets, publisher: TestPublisher) -> None:
    for _ in range(2):
        publisher.publish()
    gone = GoneAtItsTurn(SCHEMA)
    gone.misses = 0
    fleet = replicas(EVERYBODY, a=gone, **fakes("b"))
    until(lambda: fleet.serve("e1-v2"))
    gone.misses = LOOKS_TO_BE_AWAY - 1
    assert fleet.fleet.load_version(1).label == "e1-v1"
    assert gone.calls.count("schema") == LOOKS_TO_BE_AWAY - 1


def test_an_engine_that_is_away_from_the_start_holds_nobody(replicas: Fleets, publisher: TestPublisher) -> None:
    away = Failing(SCHEMA)
    away.fail("status", EngineUnavailable, times=1 << 30)
    fleet = replicas({"at_once": 1}, **fakes("a", "b"), c=away)
    publisher.publish()
    until(lambda: fleet.serve("e1-v1", "a", "b"))
    publisher.publish()
    until(lambda: fleet.serve("e1-v2", "a", "b"))
    until(lambda: fleet.fleet.health.ready and "c: injected at status" in fleet.fleet.health.reason)


def test_rolling_pauses_so_many_at_once_and_no_more(replicas: Fleets, publisher: TestPublisher) -> None:
    engines = fakes(*"abcde")
    most = [0]

    def count() -> None:
        most[0] = max(most[0], sum(engine.paused for engine in engines.values()))
        time.sleep(0.01)  # a load that takes its time, so that others would be seen beside it

    for engine in engines.values():
        engine.while_paused = count
    fleet = replicas({"at_once": 2}, **engines)
    for number in (1, 2, 3):
        publisher.publish()
        until(lambda label=f"e1-v{number}": fleet.serve(label))  # type: ignore[misc]
    assert 0 < most[0] <= 2


def test_a_rollout_whose_first_batch_fails_stops_and_the_others_serve_on(
    replicas: Fleets, publisher: TestPublisher
) -> None:
    fleet = replicas({"at_once": 1}, **fakes("a", "b", "c"))
    publisher.publish()
    until(lambda: fleet.serve("e1-v1"))
    for engine in fleet.engines.values():
        failing(engine).fail("update", EngineDirty, times=9, only="e1-v2")
    publisher.publish()
    until(lambda: "stopped at its first batch" in fleet.fleet.health.reason)
    until(lambda: fleet.serve("e1-v1") and fleet.fleet.health.ready)
    tried = [call for engine in fleet.engines.values() for call in engine.calls if call == "update fails"]
    assert len(tried) == 1
    publisher.publish()
    until(lambda: fleet.serve("e1-v3"), what="a newer version is tried anew")


def test_who_joins_while_a_rollout_is_stopped_gets_the_version_before(
    replicas: Fleets, publisher: TestPublisher
) -> None:
    fleet = replicas({"at_once": 1}, **fakes("a", "b"))
    publisher.publish()
    until(lambda: fleet.serve("e1-v1"))
    for engine in fleet.engines.values():
        failing(engine).fail("update", EngineDirty, times=9, only="e1-v2")
    publisher.publish()
    until(lambda: "stopped at its first batch" in fleet.fleet.health.reason)
    fleet.engines["c"] = FakeEngine(SCHEMA)
    fleet.source.listed.append("c")
    until(lambda: fleet.serve("e1-v1", "c"))


def test_a_bad_member_in_a_later_batch_holds_nobody(replicas: Fleets, publisher: TestPublisher) -> None:
    fleet = replicas({"at_once": 1, "deadline": 0.3}, **fakes("a", "b", "c"))
    publisher.publish()
    until(lambda: fleet.serve("e1-v1"))
    done: list[str] = []

    def second_fails(version: StagedVersion, engine: Failing, update: Callable[[StagedVersion], None]) -> None:
        if version.label == "e1-v2":
            done.append("")
            if len(done) == 2:
                engine.fail("update", EngineDirty)
        update(version)

    for each in fleet.engines.values():
        engine = failing(each)
        engine.update = (  # type: ignore[method-assign]
            lambda version, engine=engine, update=engine.update: second_fails(version, engine, update)
        )
    publisher.publish()
    until(lambda: sorted(fleet.labels().values()) == ["e1-v1", "e1-v2", "e1-v2"])


class Buggy(Failing):
    """Its adapter says once what no adapter may say."""

    def __init__(self) -> None:
        super().__init__(SCHEMA)
        self.bugs = [TypeError("a bug")]

    def status(self) -> EngineStatus:
        if self.called == "b" and self.bugs:
            raise self.bugs.pop()
        return super().status()


def test_a_member_whose_watcher_was_ended_by_a_bug_gets_another_one(
    replicas: Fleets, publisher: TestPublisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("watchers.members.ANEW_SECONDS", float("inf"))
    publisher.publish()
    fleet = replicas(None, a=Failing(SCHEMA), b=Buggy())
    until(lambda: "TypeError: a bug" in fleet.fleet.health.reason)
    monkeypatch.setattr("watchers.members.ANEW_SECONDS", 0.0)
    until(lambda: fleet.serve("e1-v1"))
    publisher.publish()
    until(lambda: fleet.serve("e1-v2"))
    assert "watch-ended" in [getattr(record, "event", "") for record in caplog.records]


@pytest.mark.parametrize("moment", ["status", "start"])
def test_a_replica_that_failed_for_a_moment_is_tried_again_soon_though_news_are_looked_for_every_ten_minutes(
    replicas: Fleets, publisher: TestPublisher, moment: str
) -> None:
    publisher.publish()
    engines = fakes("a", "b")
    failing(engines["b"]).fail(moment, EngineUnavailable)
    fleet = replicas({"poll": 600.0}, **engines)
    until(lambda: fleet.serve("e1-v1"), 30)
