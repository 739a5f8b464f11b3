"""The plugin in a real vLLM server: driven over HTTP, and by the watcher inside the API server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import httpx
import pytest

from ckptsync.engine import StagedVersion
from ckptsync.errors import EngineRefused, EngineUnavailable
from tests.engines import conftest as servers
from tests.watcher.publish_folder import publish_folder
from watchers.engines.vllm_transfer import VllmTransferEngine
from watchers.watcher import Watcher

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

BACKEND = ("--weight-transfer-config", '{"backend": "ckptsync"}')


@pytest.fixture(scope="module")
def environment(plugin_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """What the servers of this module inherit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", plugin_path)
        patch.setenv("CKPTSYNC_TEST_UNPACKED", "1")
        yield patch


@pytest.fixture(scope="module")
def server(
    environment: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, folders: dict[str, str]
) -> Iterator[Any]:
    """A server with the plugin, on `a`; dev mode for its routes."""
    with ExitStack() as stack:
        yield servers._starter(tmp_path_factory.mktemp("server"), stack)("vllm", folders["a"], *BACKEND)


@pytest.fixture
def connect(server: Any) -> Iterator[Callable[[], VllmTransferEngine]]:
    with ExitStack() as stack:

        def connected() -> VllmTransferEngine:
            return stack.enter_context(closing(VllmTransferEngine(server.url)))

        yield connected


def load(engine: VllmTransferEngine, version: StagedVersion) -> Any:
    engine.pause()
    engine.start(version)
    engine.update(version)
    engine.finish(version)
    confirmation = engine.confirm(version)
    engine.resume()
    return confirmation


def test_an_update_over_http_serves_the_new_version_with_a_receipt_of_each_rank(
    server: Any, connect: Any, versions: dict[str, StagedVersion], fresh_tokens: Any
) -> None:
    engine = connect()
    for name, path in (("b", "reload"), ("c", "plan"), ("b", "plan")):
        assert engine.prepare(versions[name])
        confirmation = load(engine, versions[name])
        found = [(receipt.rank, receipt.state, receipt.path, receipt.proof) for receipt in engine.receipts]
        assert found == [(0, "loaded", path, "elements")]
        assert confirmation.label == versions[name].label
        assert path in confirmation.warnings[0]
        assert server.tokens()[:2] == fresh_tokens(name)[:2]
    assert not [name for name in os.listdir(os.path.dirname(versions["b"].folder)) if name.startswith(".update")]


def test_two_ranks_each_load_their_slices_by_the_plan_and_answer_for_themselves(
    environment: pytest.MonkeyPatch, tmp_path: Any, folders: dict[str, str], versions: dict[str, StagedVersion]
) -> None:
    """Tensor parallel: each rank copies its slices, proves them, and says so."""
    environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with ExitStack() as stack:
        server = servers._starter(tmp_path, stack)("vllm", folders["a"], "--tensor-parallel-size", "2", *BACKEND)
        engine = stack.enter_context(closing(VllmTransferEngine(server.url)))
        served = {"a": server.tokens()}
        for name, path in (("b", "reload"), ("a", "plan"), ("b", "plan")):
            load(engine, versions[name])
            found = [(receipt.rank, receipt.state, receipt.path, receipt.proof) for receipt in engine.receipts]
            assert found == [(rank, "loaded", path, "elements") for rank in (0, 1)]
            assert server.tokens() == served.setdefault(name, server.tokens())
        assert served["a"] != served["b"]
        other = StagedVersion(manifest=versions["a"].manifest, folder=versions["b"].folder)
        engine.pause()
        engine.start(other)
        with pytest.raises(EngineRefused, match=r"rank 0 refused.*rank 1 refused"):
            engine.update(other)
        engine.resume()
        assert server.tokens() == served["b"]
    environment.delenv("VLLM_CPU_OMP_THREADS_BIND")


def test_a_refusal_leaves_the_old_version_serving(
    server: Any, connect: Any, versions: dict[str, StagedVersion], fresh_tokens: Any
) -> None:
    engine = connect()
    load(engine, versions["c"])
    other = StagedVersion(manifest=versions["a"].manifest, folder=versions["b"].folder)
    engine.pause()
    engine.start(other)
    with pytest.raises(EngineRefused, match="every rank holds the version before"):
        engine.update(other)
    engine.resume()
    assert engine.status().label == versions["c"].label
    assert server.tokens()[:2] == fresh_tokens("c")[:2]


def test_a_session_that_a_dead_watcher_left_open_is_ended(
    server: Any, connect: Any, versions: dict[str, StagedVersion]
) -> None:
    engine = connect()
    engine.pause()
    engine.start(versions["b"])
    assert load(connect(), versions["b"]).label == versions["b"].label


def test_a_sleeping_engine_is_refused_and_counts_as_restarted_when_it_wakes(
    server: Any, connect: Any, versions: dict[str, StagedVersion]
) -> None:
    """The CPU worker keeps its weights; the states are those of any vLLM."""
    engine = connect()
    boot = engine.status().boot_id
    httpx.post(server.url + "/sleep", params={"level": "1"}, timeout=60).raise_for_status()
    try:
        with pytest.raises(EngineUnavailable, match="sleeps"):
            engine.status()
        with pytest.raises(EngineRefused, match="sleeps"):
            engine.start(versions["b"])
    finally:
        httpx.post(server.url + "/wake_up", timeout=60).raise_for_status()
    assert engine.status().boot_id != boot
    assert load(engine, versions["b"]).label == versions["b"].label


def test_a_watcher_drives_the_plugin(
    server: Any, connect: Any, tmp_path: Any, folders: dict[str, str], fresh_tokens: Any
) -> None:
    root = str(tmp_path / "root")
    publish_folder(root, folders["b"])
    watcher = Watcher(root, connect(), stage=str(tmp_path / "stage"), reader="r")
    assert watcher.step().state == "serving"
    publish_folder(root, folders["c"])
    receipt = watcher.step()
    watcher.close()
    assert receipt.state == "serving"
    assert receipt.fingerprint == ""
    assert server.tokens()[:2] == fresh_tokens("c")[:2]


def test_the_watcher_inside_the_api_server_follows_without_dev_mode(
    environment: pytest.MonkeyPatch, tmp_path: Any, folders: dict[str, str], fresh_tokens: Any
) -> None:
    root = str(tmp_path / "root")
    publish_folder(root, folders["b"])
    environment.setenv("VLLM_PLUGINS", "ckptsync,unpacked")
    environment.setenv("VLLM_SERVER_DEV_MODE", "0")
    environment.setenv("CKPTSYNC_ROOT", root)
    environment.setenv("CKPTSYNC_STAGE", str(tmp_path / "stage"))
    environment.setenv("CKPTSYNC_POLL", "0.2")
    with ExitStack() as stack:
        server = servers._starter(tmp_path, stack)("vllm", folders["a"], *BACKEND)

        def follows(label: str) -> bool:
            answer = httpx.get(server.url + "/plugins/ckptsync/health", timeout=5)
            return answer.status_code == 200 and answer.json()["version"] == label

        servers.until(lambda: follows("e1-v1"), 30, "the first version is followed")
        assert server.tokens()[:2] == fresh_tokens("b")[:2]
        assert httpx.get(server.url + "/is_paused", timeout=5).status_code == 404
        started = time.monotonic()
        publish_folder(root, folders["c"])
        servers.until(lambda: follows("e1-v2"), 30, "the second version is followed")
        assert time.monotonic() - started < 30
        assert server.tokens()[:2] == fresh_tokens("c")[:2]
