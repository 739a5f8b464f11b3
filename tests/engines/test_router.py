"""Real SGLang workers behind a real SGLang router (sglang-router 0.3.2), followed as they come and go there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from ckptsync.export.source import CheckpointSource
from ckptsync.publish import Publisher
from tests.waiting import running, until
from watchers.engines.sglang import SglangEngine
from watchers.fleet import Fleet
from watchers.roster import Roster
from watchers.roster import Router as RouterSource

from .conftest import Server, aborted_at, free_port, models

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(900)]


class Router(Server):
    """To a client it looks like an SGLang server, since that is what it stands for."""

    def start(self) -> None:
        argv = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(self.port)]
        argv += ["--prometheus-port", str(free_port()), "--policy", "round_robin", *self.extra]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
        until(self._answers, 60, "the router answers")

    def _answers(self) -> bool:
        try:
            return bool(self.workers())
        except httpx.TransportError:
            return False

    def workers(self) -> dict[str, str]:
        """URL -> id."""
        answer = httpx.get(self.url + "/workers", timeout=60).raise_for_status()
        return {worker["url"]: worker["id"] for worker in answer.json()["workers"]}

    def add(self, worker: Server) -> None:
        httpx.post(self.url + "/workers", json={"url": worker.url}, timeout=60).raise_for_status()
        until(lambda: worker.url in self.workers(), 60, "the router has added it")

    def remove(self, worker: Server) -> None:
        httpx.delete(f"{self.url}/workers/{self.workers()[worker.url]}", timeout=60).raise_for_status()
        until(lambda: worker.url not in self.workers(), 60, "the router has removed it")


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Callable[..., Router]]:
    """`router(server, ...)` starts one in front of these."""
    with ExitStack() as stack:

        def start(*workers: Server) -> Router:
            urls = ["--worker-urls", *(worker.url for worker in workers)]
            router = Router("sglang", "", str(tmp_path / "router.log"), free_port(), urls)
            stack.callback(router.stop)
            router.start()
            return router

        yield start


@pytest.fixture
def publish(tmp_path: Path) -> Iterator[Callable[[], str]]:
    """The label of one more version."""
    with Publisher(str(tmp_path / "root")) as publisher:

        def one_more() -> str:
            folder = models.tiny_model(str(tmp_path / f"model{len(publish_seeds)}"), publish_seeds.pop())
            return publisher.publish(CheckpointSource(folder), assets=folder).version.label

        publish_seeds = [74, 73, 72, 71]
        yield one_more


def served_by(server: Server) -> str:
    return str(httpx.get(server.url + "/model_info", timeout=60).json()["weight_version"])


def answer(server: Server) -> tuple[list[int], list[str]]:
    """A few tokens, and the versions that computed them."""
    path, body = server.request([5, 6, 7], 6)
    found = httpx.post(server.url + path, json=body, timeout=120).raise_for_status().json()
    return found["output_ids"], [span["version"] for span in found["meta_info"]["weight_versions"]]


@contextmanager
def watch(root: str, router: Router, stage: str, stdout: str) -> Iterator[str]:
    """`ckptsync watch --router`; the URL of its sidecar."""
    command = ["watch", root, "--engine", "sglang", "--router", router.url, "--stage", stage, "--reader", "fleet"]
    command += ["--poll", "0.2", "--json", "--serve", ":0"]
    with open(stdout, "wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "ckptsync.cli", *command], stdout=out, stderr=subprocess.PIPE, text=True
        )
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.search(r"http://\S+", line)
        assert found, line
        yield found[0]
    finally:
        process.terminate()
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_every_worker_behind_the_router_serves_each_version_and_a_request_through_it_names_both(
    sglang_server: Server, second_sglang: Server, router: Callable[..., Router], publish: Any, tmp_path: Path
) -> None:
    workers = [sglang_server, second_sglang]
    door, receipts = router(*workers), tmp_path / "receipts"
    with watch(str(tmp_path / "root"), door, str(tmp_path / "stage"), str(receipts)) as sidecar:

        def ready(number: int) -> bool:
            return httpx.get(f"{sidecar}/readyz?min_version={number}", timeout=60).status_code == 200

        first = publish()
        until(lambda: ready(1), 120, "both serve the first version")
        tokens, versions = answer(door)
        assert versions == [first]
        assert [answer(server) for server in (door, *workers)] == [(tokens, [first])] * 3, "the router takes turns"

        with door.running_request() as lines:
            second = publish()
            last = aborted_at(second, lines, *workers)
        assert [span["version"] for span in last["weight_versions"]] == [first, second]
        until(lambda: ready(2), 120, "both serve the second version")
        of_second, versions = answer(door)
        assert (versions, of_second != tokens) == ([second], True)
        assert [answer(server) for server in (door, *workers)] == [(of_second, [second])] * 3
    said = [json.loads(line) for line in receipts.read_text().splitlines()]
    assert sorted((each["version"], each["state"]) for each in said) == [
        (version, "serving") for version in (first, first, second, second)
    ]
    assert len({(each["version"], each["fingerprint"]) for each in said}) == 2, "and both have the same checksum"


def test_a_worker_is_picked_up_when_the_router_gets_it_and_let_go_when_it_loses_it_and_no_router_is_no_harm(
    sglang_server: Server, second_sglang: Server, router: Callable[..., Router], publish: Any, tmp_path: Path
) -> None:
    door = router(sglang_server)
    fleet = Fleet(
        str(tmp_path / "root"), Roster([RouterSource(door.url)]), SglangEngine,
        stage=str(tmp_path / "stage"), reader="fleet", poll=0.1,
    )  # fmt: skip

    def serves(worker: Server, label: str) -> bool:
        health = fleet.members().get(f"sglang@{worker.url}")
        return health is not None and (health.ready, health.version, served_by(worker)) == (True, label, label)

    with running(fleet):
        first = publish()
        until(lambda: serves(sglang_server, first), 120, "the only worker serves it")
        assert len(fleet.members()) == 1
        door.add(second_sglang)
        until(lambda: serves(second_sglang, first), 120, "the new worker is brought to it")

        door.remove(second_sglang)
        until(lambda: len(fleet.members()) == 1, 60, "the removed worker is not of the fleet any more")
        second = publish()
        until(lambda: serves(sglang_server, second), 120, "who is left serves the next version")
        assert served_by(second_sglang) == first

        door.stop()
        until(lambda: f"router {door.url}" in fleet.health.reason, 60, "the absent router is named")
        assert fleet.health.ready
        third = publish()
        until(lambda: serves(sglang_server, third) and fleet.health.version == third, 120, "versions still come")
        assert fleet.health.ready
