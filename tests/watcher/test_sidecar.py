"""What probes and people are told."""

from __future__ import annotations

import threading

import pytest

from ckptsync.errors import EngineUnavailable
from ckptsync.testing.engines import Failing, FakeEngine
from watchers.health import Health
from watchers.sidecar import STALLED_SECONDS, WORKING_STALLED_SECONDS

from .actions import Watch, step
from .publish import SCHEMA, TestPublisher
from .sidecars import StandIn, running, serving, until

READY = Health(ready=True, version="e2-v41", state="serving", reason="", newest="e2-v43", lag=2)


def test_it_is_ready_only_with_a_confirmed_version(watch: Watch, engine: FakeEngine, root: str) -> None:
    watcher = watch(engine)
    with serving(watcher) as client, running(watcher):
        before = client.get("/readyz")
        assert (before.status_code, before.json()["kind"]) == (503, "not-ready")
        assert before.json()["message"] == "no version has been loaded yet"
        assert before.headers["retry-after"] == "1"
        TestPublisher(root).publish()
        until(lambda: client.get("/readyz").status_code == 200)
        assert client.get("/readyz").json() == {"ready": True, "version": "e1-v1", "state": "serving"}


def test_an_engine_that_goes_away_is_not_ready_and_the_reason_says_so(watch: Watch, publisher: TestPublisher) -> None:
    engine = Failing(SCHEMA)
    publisher.publish()
    watcher = watch(engine)
    step(watcher)
    with serving(watcher) as client:
        assert client.get("/readyz").status_code == 200
        engine.fail("status", EngineUnavailable)
        watcher.step()
        answer = client.get("/readyz")
        assert (answer.status_code, answer.json()["message"]) == (503, "injected at status")


@pytest.mark.parametrize(
    ("least", "status"),
    [("41", 200), ("e2-v41", 200), ("v40", 200), ("e1-v99", 200), ("42", 409), ("e2-v42", 409), ("e3-v1", 409)],
)
def test_a_ready_engine_below_the_version_that_is_asked_for_answers_to_try_again(least: str, status: int) -> None:
    with serving(StandIn(READY)) as client:
        answer = client.get("/readyz", params={"min_version": least})
    assert answer.status_code == status
    assert answer.json()["version"] == "e2-v41"
    if status == 409:
        assert answer.headers["retry-after"] == "1"
        assert (answer.json()["retryable"], answer.json()["min_version"]) == (True, least)
        assert answer.json()["message"] == f"serves e2-v41, which is below {least}"


@pytest.mark.parametrize("query", ["min_version=latest", "min_version=", "min_version=v1.0", "min_versoin=42",
                                   "min_version=1&min_version=2", "min_version", "x=1", "a&b"])  # fmt: skip
def test_a_question_that_cannot_be_understood_never_passes_for_ready(query: str) -> None:
    with serving(StandIn(READY)) as client:
        answer = client.get(f"/readyz?{query}")
    assert answer.status_code == 400
    assert answer.json()["kind"] in {"invalid-input", "invalid-name"}
    assert not answer.json()["retryable"]


def test_version_tells_where_the_engine_stands_in_the_channel(watch: Watch, publisher: TestPublisher) -> None:
    engine = FakeEngine(SCHEMA)
    for _ in range(3):
        publisher.publish()
    watcher = watch(engine, follow="1")
    step(watcher)
    with serving(watcher) as client:
        said = client.get("/version").json()
    assert {name: said[name] for name in ("version", "newest", "lag", "follow", "state", "ready")} == {
        "version": "e1-v1", "newest": "e1-v3", "lag": 2, "follow": "1", "state": "serving", "ready": True,
    }  # fmt: skip
    assert said["since"] == watcher.health.since
    assert said["engines"]["fake"]["version"] == "e1-v1"


def test_a_pinned_watcher_still_sees_how_far_it_falls_behind(watch: Watch, publisher: TestPublisher) -> None:
    publisher.publish()
    watcher = watch(FakeEngine(SCHEMA), follow="e1-v1")
    step(watcher)
    assert (watcher.health.newest, watcher.health.lag) == ("e1-v1", 0)
    publisher.publish()
    assert watcher.step() is None
    assert (watcher.health.newest, watcher.health.lag) == ("e1-v2", 1)


def test_versions_that_a_resumed_trainer_left_behind_are_no_lag(
    watch: Watch, publisher: TestPublisher, root: str
) -> None:
    versions = [publisher.publish() for _ in range(5)]
    watcher = watch(FakeEngine(SCHEMA), follow="2")
    step(watcher)
    resumed = TestPublisher(root, resumed_from=versions[2].id)
    resumed.publish()
    watcher.step()
    assert (watcher.health.newest, watcher.health.lag) == ("e2-v4", 2)


def test_alive_means_that_the_loop_turns(watch: Watch, engine: FakeEngine) -> None:
    watcher = watch(engine)
    with serving(watcher) as client:
        assert (client.get("/healthz").status_code, client.get("/healthz").json()["kind"]) == (503, "not-running")
        with running(watcher):
            assert client.get("/healthz").json()["alive"]
        assert client.get("/healthz").status_code == 503


def test_a_bug_that_ends_the_loop_ends_liveness(watch: Watch, publisher: TestPublisher) -> None:
    publisher.publish()

    def bug(_: object) -> None:
        raise RuntimeError("a bug in a listener")

    watcher = watch(FakeEngine(SCHEMA), on_receipt=bug)
    with serving(watcher) as client:
        with pytest.raises(RuntimeError, match="a bug in a listener"):
            watcher.run(threading.Event())
        assert client.get("/healthz").json()["kind"] == "not-running"


@pytest.mark.parametrize(
    ("state", "limit"), [("serving", STALLED_SECONDS), ("idle", STALLED_SECONDS),
                         ("staging", WORKING_STALLED_SECONDS), ("loading", WORKING_STALLED_SECONDS)],
)  # fmt: skip
def test_a_loop_that_hangs_is_told_after_a_stated_time(state: str, limit: float) -> None:
    hung = StandIn(Health(state=state), silence=limit - 1)  # type: ignore[arg-type]
    with serving(hung) as client:
        assert client.get("/healthz").status_code == 200
        hung.silence = limit + 1
        answer = client.get("/healthz")
    assert (answer.status_code, answer.json()["kind"]) == (503, "stalled")
    assert f"{limit + 1:.0f} s in state {state!r}" in answer.json()["message"]


def test_bytes_that_come_in_are_signs_of_life_and_a_long_poll_is_no_silence(
    watch: Watch, publisher: TestPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish()
    clock, silences = [1000.0], []
    monkeypatch.setattr("watchers.loop.time.monotonic", lambda: clock[0])

    def slowly(_: int) -> None:
        clock[0] += 200
        silences.append(watcher.silence)

    watcher = watch(FakeEngine(SCHEMA), progress=slowly, poll=900.0)
    stop = threading.Event()
    watcher._wake.wait = lambda stop, seconds: (clock.append(seconds), stop.set())  # type: ignore[method-assign,assignment]
    watcher.run(stop)
    assert len(silences) > 2
    assert set(silences) == {200}, "each arrival sets it back"
    with watcher._loop.running():
        watcher._loop.beat(rest=900.0)
        clock[0] += 1000
        assert watcher.silence == 100


def test_wake_ends_the_wait_for_the_next_look(watch: Watch, publisher: TestPublisher) -> None:
    watcher = watch(FakeEngine(SCHEMA), poll=600.0)
    with serving(watcher) as client, running(watcher):
        publisher.publish()
        assert client.post("/wake").status_code == 202
        until(lambda: client.get("/readyz").status_code == 200)
