"""What a watcher or a fleet has done, and how its engines stand, for Prometheus. One label throughout: the engine, by
its address where it has one.

Durations and counts come from receipts as they are made; versions, lag and states are taken at each scrape.
Nothing goes into the library's global registry: an engine's own server, or a trainer, has that one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import get_args

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ckptsync.errors import CkptSyncError
from ckptsync.version import VersionId, parse_label

from .health import Health, Receipt, State

__all__ = ["CONTENT_TYPE", "Metrics"]

_LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)
_SHORT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """One process's metrics, from any thread. A watcher's `on_receipt` is `observe`, its `on_failure` is `failed`."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._began = time.time()
        self._live: dict[str, VersionId] = {}
        self._publish_to_live = self._histogram(
            "ckptsync_publish_to_live_seconds",
            "From the commit of a version (by the trainer's clock) until an engine serves it; each version once",
            _LONG,
        )
        self._stage = self._histogram("ckptsync_stage_seconds", "Staging and verifying, while the engine serves", _LONG)
        self._pause = self._histogram("ckptsync_pause_seconds", "The engine computes nothing", _SHORT)
        self._load = self._histogram("ckptsync_load_seconds", "From start to confirmed, within the pause", _SHORT)
        self._attempts = self._counter("ckptsync_attempts", "Attempts to load a version, by how they ended", "state")
        self._failures = self._counter("ckptsync_failures", "Failed attempts, and outages of store or engine", "kind")
        self._bytes = self._counter("ckptsync_loaded_bytes", "Bytes of the versions that engines came to serve")

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ["engine"], buckets=buckets, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ["engine", *labels], registry=self._registry)

    def observe(self, receipt: Receipt) -> None:
        """One attempt. What it did not come to is no duration of zero: it does not count."""
        engine = _address(receipt.engine)
        self._attempts.labels(engine, receipt.state).inc()
        if receipt.error is not None:
            self._failures.labels(engine, receipt.error["kind"]).inc()
        if receipt.stage_seconds > 0:
            self._stage.labels(engine).observe(receipt.stage_seconds)
        if receipt.load_seconds > 0:
            self._pause.labels(engine).observe(receipt.pause_seconds)
            self._load.labels(engine).observe(receipt.load_seconds)
        if receipt.state == "serving":
            self._bytes.labels(engine).inc(receipt.bytes)
        if receipt.state == "serving" and receipt.error is None and self._is_news(receipt):
            self._publish_to_live.labels(engine).observe(max(0.0, receipt.since - receipt.created))

    def failed(self, engine: str, error: CkptSyncError) -> None:
        """The store or the engine was away, so that nothing could be attempted."""
        self._failures.labels(_address(engine), error.kind).inc()

    def _is_news(self, receipt: Receipt) -> bool:
        """Not a way back, a load after a restart, or what was there when this process began: those are old on
        purpose, and would drown the delays of fresh versions."""
        version = parse_label(receipt.version)
        if version is None or receipt.created < self._began or version <= self._live.get(receipt.engine, (0, -1)):
            return False
        self._live[receipt.engine] = version
        return True

    def render(self, members: Mapping[str, Health], silence: float | None) -> bytes:
        """The text format, for CONTENT_TYPE. `silence`: seconds, as `Watcher.silence`."""
        now = CollectorRegistry()
        now.register(_Standing(members, silence))
        return generate_latest(self._registry) + generate_latest(now)


class _Standing(Collector):
    """How the engines stand at one moment. A version's gauges are absent while an engine serves none."""

    def __init__(self, members: Mapping[str, Health], silence: float | None) -> None:
        self._members = {_address(engine): health for engine, health in members.items()}
        self._silence = silence

    def collect(self) -> Iterable[GaugeMetricFamily]:
        yield self._gauge("ckptsync_ready", "1 if the engine serves a confirmed version", lambda h: h.ready)
        yield self._gauge("ckptsync_lag_versions", "Live versions newer than the one served", lambda h: h.lag)
        yield self._gauge("ckptsync_state_since_seconds", "When the state was entered, since 1970", lambda h: h.since)
        for which, label_of in (("version", lambda h: h.version), ("newest_version", lambda h: h.newest)):
            for part, text in (("epoch", "trainer attempt"), ("number", "number")):
                yield self._version(f"ckptsync_{which}_{part}", text, label_of)
        yield self._states()
        if self._silence is not None:
            yield GaugeMetricFamily(
                "ckptsync_loop_silence_seconds", "Since the watch loop should have shown a sign of life", self._silence
            )

    def _gauge(self, name: str, text: str, value: Callable[[Health], float]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=["engine"])
        for engine, health in self._members.items():
            family.add_metric([engine], value(health))
        return family

    def _version(self, name: str, text: str, label_of: Callable[[Health], str]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, f"The {text} of the version", labels=["engine"])
        for engine, health in self._members.items():
            if (version := parse_label(label_of(health))) is not None:
                family.add_metric([engine], version.epoch if name.endswith("epoch") else version.number)
        return family

    def _states(self) -> GaugeMetricFamily:
        family = GaugeMetricFamily("ckptsync_state", "1 for the state that it is in", labels=["engine", "state"])
        for engine, health in self._members.items():
            for state in get_args(State):
                family.add_metric([engine, state], health.state == state)
        return family


def _address(engine: str) -> str:
    """Receipts name the adapter too (`vllm@http://10.0.0.7:8000`), a fleet lists addresses."""
    return engine.partition("@")[2] or engine
