"""The Grafana dashboard's queries, asked of a real Prometheus that scrapes a real publisher and a real sidecar.

Grafana itself is not tried: what is asked is what its panels would ask.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.conftest import free_port
from tests.envs import prometheus as environment
from tests.waiting import until

from .grafana import DASHBOARD, Scene, on_the_air, plain, queries

pytestmark = pytest.mark.slow

QUIET = {"State"}
"""Panels that show nothing while all is well."""


@contextmanager
def prometheus(folder: Path, scene: Scene) -> Iterator[httpx.Client]:
    """A client of its HTTP API."""
    targets = {"trainer": scene.trainer, "sidecar": scene.sidecar}
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s"},
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [url.removeprefix("http://")]}]}
            for job, url in targets.items()
        ],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    port, binary = free_port(), environment.executable()
    assert binary is not None
    command = [
        binary, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    with open(folder / "prometheus.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as client:
            until(lambda: is_ready(process, client), 60, "Prometheus is ready")
            yield client
    finally:
        process.terminate()
        process.wait(30)


def is_ready(process: subprocess.Popen[bytes], client: httpx.Client) -> bool:
    assert process.poll() is None, "Prometheus has ended"
    try:
        return client.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def ask(client: httpx.Client, expression: str) -> list[Any]:
    """The series, each with its value now. A query that Prometheus refuses fails the test."""
    answer = client.get("/api/v1/query", params={"query": expression})
    assert answer.status_code == 200, f"{expression}: {answer.text}"
    found: list[Any] = answer.json()["data"]["result"]
    return found


def shows(series: list[Any]) -> bool:
    """Is there something to draw? A quotient of nothing is NaN."""
    return any(each["value"][1] != "NaN" for each in series)


@pytest.fixture(scope="module", autouse=True)
def binaries() -> None:
    if environment.executable() is None:
        message = "no Prometheus on this machine: `make prometheus` gets one where there is apt"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)


def test_every_panel_variable_and_annotation_gets_its_series_from_a_real_prometheus(tmp_path):
    with on_the_air(str(tmp_path)) as scene, prometheus(tmp_path, scene) as client:
        until(lambda: len(ask(client, "up == 1")) == 2, 60, "both were scraped")
        scene.go_on()  # rates are of what happens between two scrapes
        asked = {expression: title for title, expression, _ in queries()}

        dark: set[str] = set()

        def all_show() -> bool:
            nonlocal dark
            dark = {title for expression, title in asked.items() if not shows(ask(client, expression))} - QUIET
            return not dark

        deadline = time.monotonic() + 60
        while not all_show() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert dark == set(), "panels with nothing to draw"
        assert ask(client, "ckptsync_state == 1"), "and the one that is quiet asks for a series that is there"
        for variable in DASHBOARD["templating"]["list"]:
            if variable["type"] == "query":
                series, label = variable["definition"].removeprefix("label_values(").rstrip(")").split(", ")
                found = client.get(f"/api/v1/label/{label}/values", params={"match[]": series}).json()["data"]
                assert found, variable["definition"]
        for annotation in DASHBOARD["annotations"]["list"]:
            ask(client, plain(annotation["expr"]))


def test_promtool_finds_no_fault_with_what_either_side_exposes(tmp_path):
    promtool = environment.executable("promtool")
    assert promtool is not None
    with on_the_air(str(tmp_path)) as scene:
        for url in (scene.trainer, scene.sidecar):
            text = httpx.get(f"{url}/metrics", trust_env=False, timeout=30).content
            checked = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, check=False)
            assert (checked.returncode, checked.stderr.decode()) == (0, ""), url
