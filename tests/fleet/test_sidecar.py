"""One sidecar for a whole fleet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptsync.errors import EngineDirty, EngineUnavailable
from ckptsync.testing.engines import Failing
from tests.watcher.publish import SCHEMA, TestPublisher
from tests.watcher.sidecars import serving, until
from tests.watcher.test_metrics import parse, value
from watchers.metrics import Metrics

from .conftest import Replicas


def test_probes_loads_and_metrics_of_a_fleet(replicas: Callable[..., Replicas], publisher: TestPublisher) -> None:
    metrics = Metrics()
    engines = {name: Failing(SCHEMA) for name in "abc"}
    engines["c"].fail("update", EngineDirty, times=99, only="e1-v2")
    publisher.publish()
    fleet = replicas({"on_failure": metrics.failed}, **engines)
    with serving(fleet.fleet, metrics) as client:
        until(lambda: fleet.serve("e1-v1"))
        until(lambda: client.get("/readyz?min_version=1").status_code == 200)
        assert client.get("/readyz?min_version=2").status_code == 409
        publisher.publish()
        assert client.post("/wake").status_code == 202
        until(lambda: fleet.serve("e1-v2", "a", "b") and fleet.serve("e1-v1", "c"))
        until(lambda: client.get("/readyz?min_version=2").status_code == 200)
        said: dict[str, Any] = client.get("/version").json()
        assert (said["version"], said["newest"], said["lag"], said["follow"]) == ("e1-v2", "e1-v2", 0, "latest")
        assert {name: each["lag"] for name, each in said["engines"].items()} == {"a": 0, "b": 0, "c": 1}
        engines["a"].fail("status", EngineUnavailable)
        until(
            lambda: value(parse(client.get("/metrics").text), "failures_total", engine="a", kind="engine-unavailable")
        )
        until(lambda: fleet.serve("e1-v2", "a"))
        for receipt in list(fleet.receipts):
            metrics.observe(receipt)
        samples = parse(client.get("/metrics").text)
        for name, number in (("a", 2), ("b", 2), ("c", 1)):
            assert value(samples, "version_number", engine=name) == number
            assert value(samples, "lag_versions", engine=name) == 2 - number
        assert value(samples, "failures_total", engine="c", kind="engine-dirty")

        assert client.post("/load", json={"version": "1"}).json()["version"] == "e1-v1"
        until(lambda: fleet.serve("e1-v1"))
        publisher.publish()
        until(lambda: fleet.fleet.health.newest == "e1-v3")
        assert client.get("/version").json()["follow"] == "e1-v1"
        assert client.post("/load", json={"version": "latest"}).status_code == 200
        until(lambda: fleet.serve("e1-v3"))
        assert client.get("/healthz").status_code == 200
        for name in "bc":
            engines[name].fail("status", EngineUnavailable, times=1 << 30)
        answer = client.post("/load", json={"version": "1"})
        assert (answer.status_code, answer.json()["kind"]) == (503, "engine-unavailable")
        assert "b: injected at status" in answer.json()["message"]
