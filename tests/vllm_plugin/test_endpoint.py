"""The watcher inside the API server, without vLLM: one leader, and both shapes of the engine client."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from ckptsync.channel import Channel
from ckptsync.engine import EngineStatus, StagedVersion
from ckptsync.errors import EngineDirty, EngineRefused, EngineUnavailable, InvalidInput
from ckptsync.manifest import Manifest
from ckptsync.testing.engines import FakeEngine
from tests.engines.conftest import until
from tests.watcher.publish import SCHEMA, TestPublisher
from watchers.claims import claimed
from watchers.live.receipts import RankReceipt, write_receipt
from watchers.vllm_plugin import client_engine, endpoint
from watchers.vllm_plugin.client_engine import ClientEngine
from watchers.vllm_plugin.endpoint import Follower, Settings


class Client:
    """An EngineClient of vLLM 0.26: no labels. Two ranks, which leave receipts."""

    proof: Any = "sums"

    def __init__(self, folder: str, states: tuple[str, str] = ("loaded", "loaded")) -> None:
        parallel = types.SimpleNamespace(world_size_across_dp=2)
        model = types.SimpleNamespace(model=folder)
        self.vllm_config = types.SimpleNamespace(parallel_config=parallel, model_config=model)
        self.states, self.calls, self.paused, self.session = states, [], False, False

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode} {clear_cache}")
        self.paused = True

    async def resume_generation(self) -> None:
        self.calls.append("resume")
        self.paused = False

    async def is_paused(self) -> bool:
        return self.paused

    async def start_weight_update(self) -> None:
        if self.session:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self.session = True

    async def update_weights(self, request: Any) -> None:
        info = request.update_info
        for rank, state in enumerate(self.states):
            said = {"label": info["label"], "manifest_digest": info["manifest_digest"], "state": state}
            write_receipt(info["receipts"], RankReceipt(rank=rank, path="plan", proof=self.proof, **said))
        if set(self.states) != {"loaded"}:
            self.session = False
            raise RuntimeError("a rank failed")

    async def finish_weight_update(self) -> None:
        self.calls.append("finish")
        self.session = False

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.calls.append("flush")
        return True

    async def reset_mm_cache(self) -> None:
        pass

    async def reset_encoder_cache(self) -> None:
        pass


class LabelledClient(Client):
    """Of vLLM 0.27 and later."""

    label = "default"

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await super().finish_weight_update()
        self.label = weight_version or self.label

    async def update_weight_version(self, new_version: str) -> None:
        assert not self.session
        self.label = new_version

    async def get_weight_version(self) -> str:
        return self.label


@dataclass
class Request:
    update_info: dict[str, str]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.AbstractEventLoop]:
    """The server's event loop, in its thread; and the two names that the adapter takes from vLLM."""
    module = types.ModuleType("vllm.distributed.weight_transfer.base")
    module.WeightTransferUpdateRequest = Request  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(client_engine, "asleep", lambda: False)
    monkeypatch.setattr(client_engine, "wake_ups", lambda: 0)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def version(tmp_path: Any) -> StagedVersion:
    folder = tmp_path / "channel" / "e0001-v00000002-n"
    folder.mkdir(parents=True)
    manifest = Manifest(
        channel_id="c", epoch=1, number=2, nonce="n", run_id="r", created=0.0, digest="xxh3-128", content_digest="",
        tracks={}, manifest_digest="d",
    )  # fmt: skip
    return StagedVersion(manifest=manifest, folder=str(folder))


@pytest.mark.parametrize("kind", [Client, LabelledClient])
def test_case_97_a_load_goes_through_the_engine_client_and_flushes_after_its_session(
    kind: type[Client], loop: asyncio.AbstractEventLoop, version: StagedVersion, tmp_path: Any
) -> None:
    client = kind(str(tmp_path))
    engine = ClientEngine(client, loop)
    assert engine.status().label == ""
    engine.pause()
    assert engine.status().paused
    engine.start(version)
    engine.update(version)
    engine.finish(version)
    confirmation = engine.confirm(version)
    engine.resume()
    assert client.calls == ["pause keep True", "finish", "flush", "resume"]
    assert (confirmation.label, engine.status().label) == ("e1-v2", "e1-v2")
    assert confirmation.warnings == ("rank 0, 1: loaded by the copy plan, sums of each copy were read back",)


@pytest.mark.parametrize(
    ("states", "error"),
    [
        (("refused", "restored"), EngineRefused),
        (("loaded", "refused"), EngineDirty),
        (("dirty", "loaded"), EngineDirty),
    ],
)
def test_what_the_ranks_say_decides_what_a_failure_means(
    states: tuple[str, str],
    error: type[Exception],
    loop: asyncio.AbstractEventLoop,
    version: StagedVersion,
    tmp_path: Any,
) -> None:
    engine = ClientEngine(Client(str(tmp_path), states), loop)
    engine.pause()
    engine.start(version)
    with pytest.raises(error, match="rank 0"):
        engine.update(version)
    engine.resume()


def test_behind_an_outer_load_balancer_each_server_answers_for_its_own_replicas(
    loop: asyncio.AbstractEventLoop, version: StagedVersion, tmp_path: Any
) -> None:
    """Of 8 ranks, in 4 replicas, a call to this API server reaches 2."""
    client = Client(str(tmp_path))
    client.vllm_config.parallel_config = types.SimpleNamespace(
        world_size=2, world_size_across_dp=8, data_parallel_size_local=1, local_engines_only=True
    )
    engine = ClientEngine(client, loop)
    engine.pause()
    engine.start(version)
    engine.update(version)
    engine.finish(version)
    assert engine.confirm(version).label == "e1-v2"


def test_a_session_that_nobody_ended_is_ended(
    loop: asyncio.AbstractEventLoop, version: StagedVersion, tmp_path: Any
) -> None:
    client = Client(str(tmp_path))
    ClientEngine(client, loop).start(version)
    ClientEngine(client, loop).start(version)
    assert client.calls == ["finish"]


def test_a_sleeping_engine_is_left_alone_and_is_another_when_it_wakes(
    loop: asyncio.AbstractEventLoop, version: StagedVersion, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ClientEngine(Client(str(tmp_path)), loop)
    before = engine.status().boot_id
    with monkeypatch.context() as asleep:
        asleep.setattr(client_engine, "asleep", lambda: True)
        with pytest.raises(EngineUnavailable, match="sleeps"):
            engine.status()
        with pytest.raises(EngineRefused, match="sleeps"):
            engine.start(version)
    assert engine.status().boot_id != before


def test_a_sleep_that_nobody_saw_is_seen_when_it_is_over(
    loop: asyncio.AbstractEventLoop, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ClientEngine(Client(str(tmp_path)), loop)
    before = engine.status().boot_id
    monkeypatch.setattr(client_engine, "wake_ups", lambda: 1)
    assert engine.status().boot_id != before


def test_caches_are_kept_where_that_was_asked_for(
    loop: asyncio.AbstractEventLoop, version: StagedVersion, tmp_path: Any
) -> None:
    client = LabelledClient(str(tmp_path))
    engine = ClientEngine(client, loop, cache="keep")
    engine.pause()
    engine.start(version)
    engine.update(version)
    engine.finish(version)
    assert client.calls == ["pause keep False", "finish"]


@pytest.mark.parametrize(("proof", "how"), [("sums", "values"), ("none", "none")])
def test_whether_values_were_read_back_is_what_the_ranks_say(
    proof: str, how: str, loop: asyncio.AbstractEventLoop, version: StagedVersion, tmp_path: Any
) -> None:
    client = LabelledClient(str(tmp_path))
    client.proof = proof
    engine = ClientEngine(client, loop)
    assert engine.read_back() == "values"
    engine.start(version)
    engine.update(version)
    engine.finish(version)
    assert engine.confirm(version).read_back is (proof == "sums")
    assert engine.read_back() == how


def test_the_watcher_inside_is_told_its_level_by_the_environment() -> None:
    environ = {"CKPTSYNC_ROOT": "/r"}
    assert endpoint.settings_from(environ) == Settings(root="/r", proof=2)
    assert endpoint.settings_from({**environ, "CKPTSYNC_PROOF": "4"}) == Settings(root="/r", proof=4)
    signed = endpoint.settings_from({**environ, "CKPTSYNC_REQUIRE_SIGNATURE": "/keys.pub"})
    assert signed == Settings(root="/r", proof=2, require_signature="/keys.pub")
    for wrong in ("0", "five"):
        with pytest.raises(InvalidInput, match="CKPTSYNC_PROOF"):
            endpoint.settings_from({**environ, "CKPTSYNC_PROOF": wrong})


def test_an_engine_that_does_not_answer_is_given_up(
    loop: asyncio.AbstractEventLoop, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent(Client):
        async def is_paused(self) -> bool:
            await asyncio.sleep(3600)
            return False

    engine = ClientEngine(Silent(str(tmp_path)), loop)
    with pytest.raises(EngineUnavailable, match="did not answer"):
        engine._ask("status", Silent(str(tmp_path)).is_paused(), 0.05)
    assert engine.name == "vllm"


class Gone:
    """An engine that does not answer: its watcher runs, and waits."""

    name = "gone"

    def status(self) -> EngineStatus:
        raise EngineUnavailable("gone")


@pytest.fixture(autouse=True)
def claims_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def followers(tmp_path: Any, *addresses: str) -> list[Follower]:
    settings = Settings(root=str(tmp_path / "root"), stage=str(tmp_path / "stage"), reader="r", poll=0.02)
    found = [Follower(settings, Gone(), address) for address in addresses]  # type: ignore[arg-type]
    for follower in found:
        follower.start()
    return found


def leaders(found: list[Follower]) -> list[Follower]:
    return [follower for follower in found if follower.health()["state"] != "waiting"]


def test_one_of_several_api_servers_leads_and_another_takes_over(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "RETRY_SECONDS", 0.02)
    servers = followers(tmp_path, "http://host:8000", "http://host:8000")
    until(lambda: len(leaders(servers)) == 1, 60, "one leads")
    first = leaders(servers)[0]
    other = next(server for server in servers if server is not first)
    until(lambda: "another API server of this engine leads" in other.health()["reason"], 60, "the other waits")
    assert (other.health()["ready"], other.health()["state"]) == (False, "waiting")
    first.stop()
    until(lambda: other in leaders(servers), 60, "the other takes over")
    other.stop()


def test_a_watcher_beside_the_engine_and_the_one_inside_do_not_undo_each_other(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "RETRY_SECONDS", 0.02)
    with claimed(str(tmp_path / "another-stage"), "http://localhost:8000", "s3://bucket/theirs"):
        (inside,) = followers(tmp_path, "http://0.0.0.0:8000")
        until(lambda: "s3://bucket/theirs" in inside.health()["reason"], 60, "the one beside it is named")
        assert leaders([inside]) == []
    until(lambda: leaders([inside]) == [inside], 60, "it takes over when that one ends")
    inside.stop()


def test_a_stage_that_cannot_be_used_for_a_while_does_not_end_the_follower(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "RETRY_SECONDS", 0.02)
    in_the_way = tmp_path / "stage"
    in_the_way.write_text("a file", encoding="utf-8")
    (server,) = followers(tmp_path, "http://host:8000")
    until(lambda: str(in_the_way) in server.health()["reason"], 60, "the stage is named")
    in_the_way.unlink()
    until(lambda: leaders([server]) == [server], 60, "it follows")
    server.stop()


def test_engines_of_different_ports_do_not_wait_for_each_other(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "RETRY_SECONDS", 0.02)
    servers = followers(tmp_path, "http://host:8000", "http://host:8001")
    until(lambda: len(leaders(servers)) == 2, 60, "both lead")
    for server in servers:
        server.stop()


def test_a_server_that_ends_gives_its_watcher_a_moment_to_withdraw_its_receipt(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr(endpoint.atexit, "register", lambda *call: at_exit.append(call))
    root, stage = str(tmp_path / "root"), str(tmp_path / "stage")
    TestPublisher(root).publish()
    settings = Settings(root=root, stage=stage, reader="r", poll=0.02)
    follower = Follower(settings, FakeEngine(SCHEMA), "host:8000")  # type: ignore[arg-type]
    follower.start()
    until(lambda: Channel.open(root).receipt("r"), 120, "it has loaded")
    ((stop, seconds),) = at_exit
    assert seconds < 10, "a server that is ended is not kept waiting"
    stop(30)
    assert Channel.open(root).receipt("r") == {}
