"""What a publisher tells Prometheus is what it did, by its own account."""

from __future__ import annotations

import os
import threading

import httpx
import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from ckptsync import metrics
from ckptsync.delta.policy import DeltaPolicy
from ckptsync.errors import InvalidInput
from ckptsync.publish import Publisher


def test_a_publishers_scrape_says_what_publish_reported(tmp_path):
    with Publisher(str(tmp_path), delta=DeltaPolicy()) as publisher, metrics.serve(publisher.metrics, ":0") as server:
        weights = {"w": torch.zeros(4096)}
        first = publisher.publish(weights)
        second = publisher.publish({"w": weights["w"] + 1}, background=True).result(60)
        with pytest.raises(InvalidInput):
            publisher.publish({})
        text = httpx.get(f"{server.url}/metrics", trust_env=False, timeout=30)
        assert text.headers["content-type"] == metrics.CONTENT_TYPE
        assert httpx.get(f"{server.url}/else", trust_env=False, timeout=30).status_code == 404
    samples = {(s.name, *(v for k, v in sorted(s.labels.items()) if k != "channel")): s.value
               for family in text_string_to_metric_families(text.text) for s in family.samples}  # fmt: skip
    assert {done.manifest.kind for done in (first, second)} == {"full", "delta"}
    for phase in ("gather", "encode", "write", "commit"):
        spent = first.seconds[phase] + second.seconds[phase]
        assert samples["ckptsync_publish_phase_seconds_sum", phase] == pytest.approx(spent)
        assert samples["ckptsync_publish_phase_seconds_count", phase] == 2
    assert samples["ckptsync_publish_phase_seconds_sum", "snapshot"] == second.seconds["snapshot"] > 0
    assert second.seconds["encode"] > 0
    written = first.manifest.stored_bytes + second.manifest.stored_bytes
    assert samples["ckptsync_publish_written_bytes_total",] == written
    assert samples["ckptsync_publish_version_bytes",] == second.nbytes
    assert [samples["ckptsync_publish_versions_total", kind] for kind in ("full", "delta", "adapter")] == [1, 1, 0]
    assert samples["ckptsync_publish_failures_total", "invalid-input"] == 1
    assert (samples["ckptsync_publish_version_epoch",], samples["ckptsync_publish_version_number",]) == (1, 2)
    assert samples["ckptsync_publish_last_seconds",] == second.manifest.created
    assert samples["ckptsync_publish_pending",] == 0


def test_a_pending_publish_and_one_that_is_skipped_are_told(tmp_path):
    release, begun = threading.Event(), threading.Event()

    def hold(_: int) -> None:
        begun.set()
        release.wait(60)

    told = metrics.Metrics()
    with Publisher(str(tmp_path), pending="skip", metrics=told) as publisher:
        assert publisher.metrics is told
        handle = publisher.publish({"w": torch.zeros(8)}, background=True, progress=hold)
        try:
            assert begun.wait(60)
            assert publisher.publish({"w": torch.zeros(8)}, background=True).skipped
            text = told.render().decode()
        finally:
            release.set()
        handle.result(60)
    label = f'{{channel="{publisher.channel.store.url}"}}'
    assert f"ckptsync_publish_pending{label} 1.0" in text
    assert f"ckptsync_publish_skipped_total{label} 1.0" in text
    assert f"ckptsync_publish_pending{label} 0.0" in told.render().decode()


def test_a_retry_counts_once_and_a_registry_of_ones_own_is_used(tmp_path):
    registry = CollectorRegistry()
    with Publisher(str(tmp_path), metrics=metrics.Metrics(registry)) as publisher:
        for _ in range(2):
            publisher.publish({"w": torch.zeros(8)}, number=1)
    assert b'_versions_total{channel="%s",kind="full"} 1.0' % os.fsencode(tmp_path) in generate_latest(registry)
    assert b"ckptsync" not in generate_latest()


def test_others_may_scrape_only_with_a_token():
    with pytest.raises(InvalidInput, match="give a token"), metrics.serve(metrics.Metrics(), "0.0.0.0:0"):
        pass
    with metrics.serve(metrics.Metrics(), ":0", token="secret") as server:
        url = f"{server.url}/metrics"
        assert httpx.get(url, trust_env=False, timeout=30).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert httpx.get(url, headers=headers, trust_env=False, timeout=30).status_code == 200
