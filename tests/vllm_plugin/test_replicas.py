"""Data-parallel replicas behind one vLLM server: a label is set when every one of them has confirmed, not before."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ckptsync.engine import StagedVersion
from ckptsync.errors import EngineDirty
from tests.engines import conftest as servers
from tests.engines.conftest import PROMPTS, Server, load, queues_of
from tests.waiting import until
from tests.watcher.publish_folder import publish_folder
from watchers.engines.vllm_transfer import VllmTransferEngine
from watchers.watcher import Watcher

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

REPLICAS = ("--data-parallel-size", "2")
BACKEND = ("--weight-transfer-config", '{"backend": "ckptsync"}')
GUESSING = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}')
"""Tokens guessed from the text so far: vLLM calls the target the draft model of that, which has no weights."""


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def started(plugin_path: str, folders: dict[str, str], faults: Path, tmp_path_factory: Any) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("PYTHONPATH", plugin_path)
        patch.setenv("CKPTSYNC_TEST_UNPACKED", "1")
        patch.setenv("CKPTSYNC_TEST_FAULTS", str(faults))
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        start = servers._starter(tmp_path_factory.mktemp("replicas"), stack)
        queues: set[str] = set()
        stack.callback(lambda: [os.unlink(path) for path in queues if os.path.exists(path)])
        server = start("vllm", folders["a"], *REPLICAS, *GUESSING, *BACKEND)
        assert server.process is not None
        queues |= queues_of(server.process.pid)
        yield server


@pytest.fixture
def server(started: Server) -> Server:
    """Two replicas, started on `a`."""
    assert started.process is not None
    if started.process.poll() is not None:
        started.restart()
    return started


def tokens_of(server: Server, replica: int) -> list[int]:
    path, body = server.request(PROMPTS[0], 16)
    answer = httpx.post(server.url + path, json=body, headers={"X-data-parallel-rank": str(replica)}, timeout=120)
    return list(answer.raise_for_status().json()["choices"][0]["token_ids"])


def test_every_replica_loads_by_the_plan_and_answers_for_itself(
    server: Server, versions: dict[str, StagedVersion], fresh_tokens: Any
) -> None:
    with closing(VllmTransferEngine(server.url)) as engine:
        for name in ("b", "c", "b"):
            assert load(engine, versions[name]).label == versions[name].label
            said = [(receipt.rank, receipt.state, receipt.proof) for receipt in engine.receipts]
            assert said == [(replica, "loaded", "elements") for replica in (0, 1)]
            assert [tokens_of(server, replica) for replica in (0, 1)] == [fresh_tokens(name)[0]] * 2
        assert {receipt.path for receipt in engine.receipts} == {"plan"}


def test_a_replica_that_fails_keeps_the_label_off_and_the_engine_unready(
    server: Server, tmp_path: Path, folders: dict[str, str], faults: Path, fresh_tokens: Any
) -> None:
    """One that cannot go back either, then one that can again, then one that is gone."""
    root = str(tmp_path / "root")
    for name in "bc":
        publish_folder(root, folders[name])
    with closing(Watcher(root, VllmTransferEngine(server.url), stage=str(tmp_path / "stage"), reader="r")) as watcher:
        for label in "21":
            watcher.load_version(label)
        plant(faults, "copy", "load")
        with pytest.raises(EngineDirty, match="rank 0 loaded; rank 1 dirty"):
            watcher.load_version("2")
        assert not watcher.health.ready
        assert "rank 1" in watcher.health.reason
        assert watcher.engine.status().label == "e1-v1"
        assert watcher.engine.status().paused

        (faults / "load-1").unlink()
        assert watcher.load_version("2").state == "serving"
        assert watcher.health.ready
        assert [tokens_of(server, replica) for replica in (0, 1)] == [fresh_tokens("c")[0]] * 2

        plant(faults, "copy")
        with pytest.raises(EngineDirty, match="rank 0 loaded; rank 1 restored"):
            watcher.load_version("1")
        assert (watcher.health.ready, watcher.health.version) == (True, "e1-v2"), "it went back on both"
        assert [tokens_of(server, replica) for replica in (0, 1)] == [fresh_tokens("c")[0]] * 2

        os.kill(worker_of(server, replica=1), signal.SIGKILL)
        until(lambda: watcher.step() is None and not watcher.health.ready, 60, "it is not ready any more")
        assert watcher.health.reason


def plant(faults: Path, *what: str) -> None:
    for each in what:
        (faults / f"{each}-1").touch()


def worker_of(server: Server, replica: int) -> int:
    assert server.process is not None
    children = psutil.Process(server.process.pid).children(recursive=True)
    return next(child.pid for child in children if f"EngineCore_DP{replica}" in child.name())
