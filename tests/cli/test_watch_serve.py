"""`ckptsync watch --serve` as a process, beside a real (embedded) engine server."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ckptsync.export.source import CheckpointSource
from ckptsync.publish import Publisher
from tests.envs.models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [tiny_model(str(folder / str(seed)), seed) for seed in range(3)]


@pytest.fixture
def root(tmp_path: Path) -> str:
    """Empty: the trainer has yet to start."""
    (tmp_path / "channel").mkdir()
    return str(tmp_path / "channel")


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Start a module; the process, and the URL in the first line of one of its outputs."""
    started: list[subprocess.Popen[str]] = []

    def begin(*command: str, stream: str = "stderr") -> tuple[subprocess.Popen[str], str]:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, stream: subprocess.PIPE}
        process = subprocess.Popen([sys.executable, "-m", *command], text=True, **pipes)
        started.append(process)
        line = getattr(process, stream).readline()
        found = re.search(r"http://\S+", line)
        assert found, line
        return process, found[0]

    yield begin
    for process in started:
        process.terminate()
        process.communicate(timeout=60)


def sidecar_of(start: Any, root: str, engine: str, stage: Any, *more: str) -> tuple[subprocess.Popen[str], str]:
    command = ["watch", root, "--engine", "module", "--url", engine, "--stage", str(stage), "--poll", "0.1"]
    process, url = start("ckptsync.cli", *command, "--json", "--serve", ":0", *more)
    return process, url


def until(url: str, path: str, status: int) -> httpx.Response:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        answer = httpx.get(url + path, trust_env=False, timeout=60)
        if answer.status_code == status:
            return answer
        time.sleep(0.05)
    raise AssertionError(f"{path} never answered {status}: {answer.text}")


def test_probes_loads_and_metrics_of_a_real_engine_and_sigterm_ends_it(models, root, start, tmp_path) -> None:
    _, engine = start("watchers.engines.embedded_server", models[0], "--port", "0", stream="stdout")
    watch, sidecar = sidecar_of(start, root, engine, tmp_path / "stage")
    assert httpx.get(f"{sidecar}/healthz", trust_env=False, timeout=60).status_code in {200, 503}
    until(sidecar, "/healthz", 200)
    assert httpx.get(f"{sidecar}/readyz", trust_env=False, timeout=60).status_code == 503
    with Publisher(root) as publisher:
        publisher.publish(CheckpointSource(models[1]), assets=models[1])
        until(sidecar, "/readyz?min_version=1", 200)
        assert httpx.get(f"{sidecar}/readyz?min_version=2", trust_env=False, timeout=60).status_code == 409
        publisher.publish(CheckpointSource(models[2]), assets=models[2])
        until(sidecar, "/readyz?min_version=2", 200)
    assert httpx.get(f"{engine}/status", trust_env=False, timeout=60).json()["label"] == "e1-v2"

    back = httpx.post(f"{sidecar}/load", json={"version": "1"}, timeout=60, trust_env=False)
    assert (back.status_code, back.json()["label"]) == (200, "e1-v1")
    assert back.json()["fingerprint"]
    assert httpx.get(f"{engine}/status", trust_env=False, timeout=60).json()["label"] == "e1-v1"
    text = until(sidecar, "/metrics", 200).text
    samples = {s.name: s for family in text_string_to_metric_families(text) for s in family.samples}
    assert samples["ckptsync_publish_to_live_seconds_count"].value == 2
    assert samples["ckptsync_publish_to_live_seconds_count"].labels == {"engine": engine}
    assert samples["ckptsync_version_number"].value == 1
    assert samples["ckptsync_lag_versions"].value == 1

    watch.send_signal(signal.SIGTERM)
    assert watch.wait(60) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{sidecar}/healthz", trust_env=False, timeout=60)


def test_what_cannot_be_served_is_said_at_once_and_is_exit_code_2(ckptsync, root, tmp_path, monkeypatch) -> None:
    def refused(*more: str) -> str:
        ran = ckptsync("watch", root, "--engine", "module", "--url", "http://127.0.0.1:9", "--stage", tmp_path, *more)
        assert ran.code == 2
        return str(ran.err)

    handlers = [signal.getsignal(sig) for sig in (signal.SIGINT, signal.SIGTERM)]
    try:
        assert "CKPTSYNC_SIDECAR_TOKEN" in refused("--serve", "0.0.0.0:0")
        assert "[HOST]:PORT" in refused("--serve", "8080")
        monkeypatch.setenv("CKPTSYNC_SIDECAR_TOKEN", "secret\n")
        assert "token" in refused("--serve", ":0")
    finally:
        for sig, handler in zip((signal.SIGINT, signal.SIGTERM), handlers, strict=True):
            signal.signal(sig, handler)


def test_the_token_comes_from_the_environment(models, root, start, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CKPTSYNC_SIDECAR_TOKEN", "secret")
    _, url = sidecar_of(start, root, "http://127.0.0.1:9", tmp_path / "stage")
    until(url, "/healthz", 200)
    assert httpx.get(f"{url}/readyz", trust_env=False, timeout=60).status_code == 401
    ready = httpx.get(f"{url}/readyz", headers={"Authorization": "Bearer secret"}, trust_env=False, timeout=60)
    assert (ready.status_code, ready.json()["kind"]) == (503, "not-ready")
