"""What Prometheus reads, through its own parser."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, get_args

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ckptsync.errors import EngineDirty, EngineUnavailable, StoreUnavailable
from ckptsync.testing.engines import Failing, FakeEngine
from watchers.health import Health, Receipt, State
from watchers.metrics import CONTENT_TYPE, Metrics

from .actions import Watch, flip, shard_of, step
from .publish import SCHEMA, TestPublisher
from .sidecars import serving

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: str) -> Samples:
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    assert all(family.documentation and family.name.startswith("ckptsync_") for family in families)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((f"ckptsync_{name}", frozenset(labels.items())))


def of(metrics: Metrics, watcher: Any) -> Samples:
    return parse(metrics.render(watcher.members(), watcher.silence).decode())


def receipt(version: str, **changes: Any) -> Receipt:
    now = time.time()
    made = Receipt(version=version, state="serving", label=version, since=now + 3, created=now + 1, engine="fake")
    return replace(made, **changes)


def delays(metrics: Metrics, engine: str = "fake") -> tuple[float | None, float | None]:
    samples = parse(metrics.render({}, None).decode())
    found = value(samples, "publish_to_live_seconds_count", engine=engine)
    return found, value(samples, "publish_to_live_seconds_sum", engine=engine)


def test_a_good_load_is_told_in_full(watch: Watch, engine: FakeEngine, root: str) -> None:
    metrics = Metrics()
    manifest = TestPublisher(root).publish()
    watcher = watch(engine, on_receipt=metrics.observe)
    made = step(watcher)
    with serving(watcher, metrics) as client:
        answer = client.get("/metrics")
    assert (answer.status_code, answer.headers["content-type"]) == (200, CONTENT_TYPE)
    samples = parse(answer.text)
    for name in ("publish_to_live", "stage", "pause", "load"):
        assert value(samples, f"{name}_seconds_count", engine="fake") == 1
        assert value(samples, f"{name}_seconds_bucket", engine="fake", le="+Inf") == 1
    assert value(samples, "publish_to_live_seconds_sum", engine="fake") == made.since - manifest.created
    assert value(samples, "stage_seconds_sum", engine="fake") == made.stage_seconds
    assert value(samples, "pause_seconds_sum", engine="fake") == made.pause_seconds
    assert value(samples, "load_seconds_sum", engine="fake") == made.load_seconds
    assert value(samples, "loaded_bytes_total", engine="fake") == manifest.nbytes
    assert value(samples, "attempts_total", engine="fake", state="serving") == 1
    assert value(samples, "ready", engine="fake") == 1
    assert value(samples, "lag_versions", engine="fake") == 0
    assert (value(samples, "version_epoch", engine="fake"), value(samples, "version_number", engine="fake")) == (1, 1)
    assert value(samples, "state_since_seconds", engine="fake") == watcher.health.since
    states = {dict(labels)["state"]: on for (name, labels), on in samples.items() if name == "ckptsync_state"}
    assert [state for state, on in states.items() if on] == ["serving"]
    assert set(states) == set(get_args(State))


def test_an_engine_that_serves_nothing_has_no_version_and_is_behind_by_all(
    watch: Watch, publisher: TestPublisher
) -> None:
    publisher.publish()
    flip(shard_of(publisher.channel.store.url, publisher.publish()))
    engine, metrics = Failing(SCHEMA), Metrics()
    engine.fail("update", EngineDirty, times=9)
    watcher = watch(engine, on_receipt=metrics.observe, patience=0.0)
    assert step(watcher).state == "refused"
    assert step(watcher).state == "dirty"
    samples = of(metrics, watcher)
    assert value(samples, "ready", engine="fake") == 0
    assert value(samples, "version_number", engine="fake") is None
    assert value(samples, "newest_version_number", engine="fake") == 2
    assert value(samples, "lag_versions", engine="fake") == 2
    assert value(samples, "state", engine="fake", state="dirty") == 1
    assert value(samples, "failures_total", engine="fake", kind="bad-shard") == 1
    assert value(samples, "failures_total", engine="fake", kind="engine-dirty") == 1
    assert value(samples, "attempts_total", engine="fake", state="dirty") == 1
    assert value(samples, "loaded_bytes_total", engine="fake") is None
    assert value(samples, "publish_to_live_seconds_count", engine="fake") is None


def test_outages_that_keep_it_from_any_attempt_are_failures_too(watch: Watch, publisher: TestPublisher) -> None:
    engine, metrics = Failing(SCHEMA), Metrics()
    watcher = watch(engine, on_failure=metrics.failed)
    engine.fail("status", EngineUnavailable, times=2)
    watcher.step()
    watcher.step()
    engine.fail("status", StoreUnavailable)
    watcher.step()
    samples = of(metrics, watcher)
    assert value(samples, "failures_total", engine="fake", kind="engine-unavailable") == 2
    assert value(samples, "failures_total", engine="fake", kind="store-unavailable") == 1


def test_only_fresh_versions_count_as_published_to_live_and_each_once() -> None:
    metrics = Metrics()
    before = time.time() - 3600
    metrics.observe(receipt("e1-v7", created=before))
    assert delays(metrics) == (None, None), "it was there before this process"
    metrics.observe(receipt("e1-v8"))
    assert delays(metrics) == (1, pytest.approx(2, abs=0.01))
    metrics.observe(receipt("e1-v8", since=time.time() + 5000))
    assert delays(metrics)[0] == 1, "loaded again after a restart"
    metrics.observe(receipt("e1-v9", state="failed"))
    metrics.observe(receipt("e1-v9", error={"kind": "engine-unavailable", "message": "cannot be resumed"}))
    assert delays(metrics)[0] == 1, "it does not serve"
    metrics.observe(receipt("e1-v9"))
    metrics.observe(receipt("e1-v8"))
    assert delays(metrics)[0] == 2, "the way back"
    metrics.observe(receipt("e2-v5"))
    assert delays(metrics)[0] == 3, "a newer epoch is newer"


def test_a_trainers_clock_that_is_ahead_gives_no_negative_delay() -> None:
    metrics = Metrics()
    metrics.observe(receipt("e1-v1", created=time.time() + 500))
    assert delays(metrics) == (1, 0)


def test_members_of_a_fleet_are_told_apart_by_their_addresses() -> None:
    metrics = Metrics()
    metrics.observe(receipt("e1-v1", engine="vllm@http://a:8000"))
    metrics.observe(receipt("e1-v1", engine="vllm@http://b:8000"))
    metrics.failed("vllm@http://b:8000", EngineUnavailable("no answer"))
    members = {"http://a:8000": Health(ready=True, version="e1-v1"), "http://b:8000": Health(lag=1)}
    samples = parse(metrics.render(members, 1.5).decode())
    for engine, ready in (("http://a:8000", 1), ("http://b:8000", 0)):
        assert value(samples, "publish_to_live_seconds_count", engine=engine) == 1
        assert value(samples, "ready", engine=engine) == ready
    assert value(samples, "failures_total", engine="http://b:8000", kind="engine-unavailable") == 1
    assert value(samples, "lag_versions", engine="http://b:8000") == 1
    assert value(samples, "loop_silence_seconds") == 1.5


def test_nothing_goes_into_the_registry_of_the_whole_process() -> None:
    before = prometheus_client.generate_latest()
    Metrics().observe(receipt("e1-v1"))
    Metrics().observe(receipt("e1-v1"))
    assert b"ckptsync" not in prometheus_client.generate_latest()
    assert b"ckptsync" not in before
