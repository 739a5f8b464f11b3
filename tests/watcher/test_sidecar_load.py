"""`POST /load`: on the watcher's thread, between two steps, with a receipt or a typed error."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptsync import errors
from ckptsync.errors import CkptSyncError, EngineDirty
from ckptsync.manifest import TensorSpec
from ckptsync.testing.engines import Failing, FakeEngine
from watchers.health import Health, Receipt

from .actions import Watch, flip, shard_of, weights
from .publish import SCHEMA, SPECS, TestPublisher
from .sidecars import StandIn, running, serving, until


def test_a_load_goes_back_and_stays_there_until_latest_is_asked_for(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher, root: str
) -> None:
    first, _ = publisher.publish(), publisher.publish()
    watcher = watch(engine)
    with serving(watcher) as client, running(watcher):
        until(lambda: watcher.health.version == "e1-v2")
        receipt = client.post("/load", json={"version": "1"}).json()
        assert (receipt["state"], receipt["version"], receipt["label"]) == ("serving", "e1-v1", "e1-v1")
        assert engine.weights == weights(root, first)
        publisher.publish()
        until(lambda: watcher.health.newest == "e1-v3")
        assert client.get("/version").json()["version"] == "e1-v1", "it is not taken back by what it followed"
        assert client.get("/version").json()["follow"] == "e1-v1"
        assert client.post("/load", json={"version": "latest"}).json()["label"] == "e1-v3"
        publisher.publish()
        until(lambda: watcher.health.version == "e1-v4")
        assert watcher.health.follow == "latest"


def test_latest_goes_back_to_what_the_watcher_was_started_with(watch: Watch, publisher: TestPublisher) -> None:
    publisher.publish()
    for started, then in (("every", "every"), ("latest", "latest"), ("1", "latest")):
        watcher = watch(FakeEngine(SCHEMA), follow=started)
        watcher.load_version("1")
        assert watcher.health.follow == "e1-v1"
        watcher.load_version("latest")
        assert watcher.health.follow == then


def test_a_load_that_fails_changes_nothing_of_what_is_followed(
    watch: Watch, publisher: TestPublisher, root: str
) -> None:
    engine = Failing(SCHEMA)
    publisher.publish()
    second = publisher.publish()
    engine.fail("update", EngineDirty, only="e1-v1")
    watcher = watch(engine)
    with serving(watcher) as client, running(watcher):
        until(lambda: watcher.health.version == "e1-v2")
        answer = client.post("/load", json={"version": 1})
        assert (answer.status_code, answer.json()["kind"]) == (500, "engine-dirty")
        assert (answer.json()["version"], answer.json()["state"]) == ("e1-v2", "serving")
        assert engine.weights == weights(root, second)
        assert watcher.health.follow == "latest"


def test_it_is_loaded_by_the_watchers_own_thread_and_never_beside_another_load(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher
) -> None:
    for _ in range(3):
        publisher.publish()
    threads, inside = set(), []

    def enter() -> None:
        threads.add(threading.get_ident())
        assert not inside
        inside.append(1)
        time.sleep(0.002)
        inside.pop()

    engine.while_paused = enter
    watcher = watch(engine)
    with running(watcher), ThreadPoolExecutor(6) as pool:
        receipts = list(pool.map(watcher.load_version, ["1", "2", "3", "2", "1", "latest"]))
    assert [receipt.label for receipt in receipts] == ["e1-v1", "e1-v2", "e1-v3", "e1-v2", "e1-v1", "e1-v3"]
    assert len(threads) == 1


def test_a_hundred_requests_are_answered_while_a_load_goes_on(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher
) -> None:
    publisher.publish()
    publisher.publish()
    watcher, inside, go_on = watch(engine), threading.Event(), threading.Event()
    with serving(watcher) as client, running(watcher), ThreadPoolExecutor(101) as pool:
        until(lambda: watcher.health.ready)

        def hold() -> None:
            inside.set()
            assert go_on.wait(30)

        engine.while_paused = hold
        load = pool.submit(client.post, "/load", json={"version": "1"})
        assert inside.wait(60)
        paths = ["/healthz", "/readyz", "/readyz?min_version=2", "/version", "/metrics"] * 20
        answers = [answer.result() for answer in [pool.submit(client.get, path) for path in paths]]
        busy = client.post("/load", json={"version": "2"})
        assert not load.done()
        go_on.set()
        assert load.result().json()["label"] == "e1-v1"
    assert [answer.status_code for answer in answers] == [200] * 100
    assert (busy.status_code, busy.json()["kind"], busy.json()["retryable"]) == (409, "busy", True)


def test_who_waits_for_a_load_when_the_watcher_stops_is_told_that_nothing_was_touched(
    watch: Watch, engine: FakeEngine, publisher: TestPublisher
) -> None:
    publisher.publish()
    watcher, stop, inside, go_on = watch(engine), threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        assert go_on.wait(30)

    engine.while_paused = hold
    loop = threading.Thread(target=watcher.run, args=(stop,))
    loop.start()
    with serving(watcher) as client, ThreadPoolExecutor(1) as pool:
        assert inside.wait(60)
        load = pool.submit(client.post, "/load", json={"version": "1"})
        until(lambda: watcher._loop._calls)
        stop.set()
        go_on.set()
        assert (load.result().status_code, load.result().json()["kind"]) == (503, "engine-unavailable")
        loop.join(60)
        assert client.post("/load", json={"version": "1"}).json()["kind"] == "not-running"
    assert engine.calls.count("pause") == 1


def test_each_refusal_has_its_status(watch: Watch, publisher: TestPublisher, root: str) -> None:
    publisher.publish()
    damaged = publisher.publish()
    flip(shard_of(root, damaged))
    other = [TensorSpec("embed.weight", "F32", (4, 4)), *SPECS[1:]]
    publisher.channel.commit(publisher.epoch, publisher.write(specs=other))
    watcher = watch(FakeEngine(SCHEMA), patience=0.0, follow="1")
    with serving(watcher) as client, running(watcher):
        until(lambda: watcher.health.ready)

        def refused(version: object) -> tuple[int, str]:
            answer = client.post("/load", json={"version": version})
            assert answer.json()["version"] == "e1-v1"
            return answer.status_code, answer.json()["kind"]

        assert refused("2") == (422, "bad-shard")
        assert refused("e1-v3") == (422, "schema-mismatch")
        assert refused(9) == (404, "version-not-found")
        assert refused("newest") == (400, "invalid-name")
        assert refused(-1) == (400, "invalid-name")
        assert watcher.health.ready


@pytest.mark.parametrize(
    ("kind", "status"),
    [(errors.EngineUnavailable, 503), (errors.StoreUnavailable, 503), (errors.StoreDenied, 502),
     (errors.EngineRefused, 409), (errors.ProofFailed, 500), (errors.EngineDirty, 500), (errors.VersionGone, 404),
     (errors.Fenced, 409), (errors.UnsupportedFormat, 422), (errors.CkptSyncError, 500)],
)  # fmt: skip
def test_an_error_is_told_by_kind_and_is_retryable_where_waiting_helps(kind: type[CkptSyncError], status: int) -> None:
    def fail(_: str) -> Receipt:
        raise kind("what went wrong")

    with serving(StandIn(Health(version="e1-v1"), loads=fail)) as client:
        answer = client.post("/load", json={"version": "2"})
    assert (answer.status_code, answer.json()["kind"], answer.json()["message"]) == (
        status,
        kind.kind,
        "what went wrong",
    )
    assert answer.json()["retryable"] == (status == 503) == ("retry-after" in answer.headers)
