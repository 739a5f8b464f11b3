"""One watcher over real servers of both kinds: rolling, with equal checksums, and a replica that is killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ckptsync.engine import Engine
from ckptsync.export.source import CheckpointSource
from ckptsync.publish import Publisher
from tests.waiting import until
from watchers.engines.sglang import SglangEngine
from watchers.engines.vllm import VllmEngine
from watchers.fleet import Fleet
from watchers.health import Receipt
from watchers.roster import Given, Roster

from .conftest import Server, models

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(1200)]


@contextmanager
def running(fleet: Fleet) -> Iterator[Fleet]:
    stop = threading.Event()
    thread = threading.Thread(target=fleet.run, args=(stop,))
    thread.start()
    try:
        yield fleet
    finally:
        stop.set()
        thread.join(60)
        fleet.close()


def test_three_real_replicas_are_rolled_one_by_one_and_one_that_is_killed_holds_nobody(
    vllm_server: Server, sglang_server: Server, second_sglang: Server, tmp_path: Path
) -> None:
    folders = [models.tiny_model(str(tmp_path / f"seed{seed}"), seed) for seed in (61, 62, 63)]
    servers = [vllm_server, sglang_server, second_sglang]
    kinds = {server.url: server.engine for server in servers}

    def connect(url: str) -> Engine:
        return VllmEngine(url) if kinds[url] == "vllm" else SglangEngine(url)

    receipts: list[Receipt] = []
    fleet = Fleet(
        str(tmp_path / "root"), Roster([Given(list(kinds))]), connect,
        stage=str(tmp_path / "stage"), reader="fleet", poll=0.2, at_once=1, deadline=120, on_receipt=receipts.append,
    )  # fmt: skip

    def serve(label: str, *urls: str) -> bool:
        found = {name.partition("@")[2]: health for name, health in fleet.members().items()}
        return all(url in found and found[url].ready and found[url].version == label for url in urls)

    with Publisher(str(tmp_path / "root")) as publisher, running(fleet):

        def publish(folder: str) -> str:
            return publisher.publish(CheckpointSource(folder), assets=folder).version.label

        for folder in folders[:2]:
            label = publish(folder)
            until(lambda label=label: serve(label, *kinds), 120, f"all serve {label}")  # type: ignore[misc]
            checksums = {r.fingerprint for r in receipts if r.version == label and r.engine.startswith("sglang")}
            assert len(checksums) == 1
            assert servers[1].tokens() == servers[2].tokens()

        killed = servers[2]
        assert killed.process is not None
        os.killpg(killed.process.pid, signal.SIGKILL)
        killed.process.wait()
        label = publish(folders[2])
        until(lambda: serve(label, servers[0].url, servers[1].url), 120, "the others serve the next version")
        until(lambda: killed.url in fleet.health.reason and fleet.health.version == label, 60, "the dead one is named")
        assert fleet.health.ready

        killed.restart()
        until(lambda: serve(label, *kinds), 120, "it is brought to the version after its restart")
        assert killed.tokens() == servers[1].tokens()
