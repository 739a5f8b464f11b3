"""An adapter that is pointed at a server of another kind says so, before anything is paused."""

from __future__ import annotations

from contextlib import closing

import pytest

from ckptsync.errors import EngineRefused
from watchers.engines.embedded import EmbeddedEngine
from watchers.engines.sglang import SglangEngine
from watchers.engines.vllm import VllmEngine
from watchers.engines.vllm_transfer import VllmTransferEngine

from .fakes import FakeEmbedded, FakeEngine, FakeSglang, FakeVllm, FakeWebsite

URL = "http://engine:8000"
ADAPTERS = {
    "vllm": VllmEngine,
    "vllm-plugin": VllmTransferEngine,
    "sglang": SglangEngine,
    "module": EmbeddedEngine,
}
SERVERS = {"vllm": FakeVllm, "sglang": FakeSglang, "module": FakeEmbedded}


def look(adapter: str, server: FakeEngine) -> str:
    """What the first look says, which every watcher and every load begins with."""
    with closing(ADAPTERS[adapter](URL, transport=server.transport)) as engine:
        with pytest.raises(EngineRefused) as refused:
            engine.status()
        assert not any(call.startswith("POST") for call in server.seen)
    return str(refused.value)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("server", SERVERS)
def test_an_engine_of_another_kind_is_named_with_the_option_to_use(adapter: str, server: str) -> None:
    if adapter.startswith(server):
        with closing(ADAPTERS[adapter](URL, transport=SERVERS[server]().transport)) as engine:
            assert not engine.status().paused
        return
    said = look(adapter, SERVERS[server]())
    assert f"{URL} does not look like" in said
    assert f"try --engine {server}." in said


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_server_that_is_no_engine_is_told_too(adapter: str) -> None:
    assert "check its url and --engine" in look(adapter, FakeWebsite())


def test_a_vllm_without_its_development_routes_is_still_a_vllm() -> None:
    server = FakeVllm()
    server.answers["GET /weight_info"] = (404, {"detail": "Not Found"})
    said = look("vllm", server)
    assert "VLLM_SERVER_DEV_MODE=1" in said
    assert "does not look like" not in said


def test_another_servers_status_is_not_taken_for_the_embedded_ones() -> None:
    server = FakeWebsite()
    server.answers["GET /status"] = (200, {"status": "green"})
    assert "check its url and --engine" in look("module", server)
