"""An engine in an actor, loaded or sent to by calls: a torch module, a server of its own, a fake that goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import ray
from torch import nn

from ckptsync.engine import StagedVersion
from ckptsync.engine_http import Call, Touch
from ckptsync.errors import EngineDirty, EngineRefused, EngineUnavailable, InvalidInput, NoTransport
from ckptsync.sync import WeightSync
from ckptsync.transports import Checkpoint, Gloo, Patience, VllmGloo, VllmIpc
from tests.transports.receivers import FileDevices, TransferVllm
from tests.transports.sends import Small, same, weights
from tests.waiting import until
from tests.watcher.publish import SCHEMA, SPECS, TestPublisher
from watchers.engines.module import ModuleEngine
from watchers.engines.vllm import VllmEngine, VllmOptions
from watchers.ray import EngineActor, RayEngine
from watchers.stage import Stage
from watchers.watcher import Watcher

from .actors import Fake, call, is_up, kill, start

pytestmark = pytest.mark.slow


class Tiny(nn.Module):
    """What the test publisher publishes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])
        self.norm = nn.RMSNorm(8)


class Rollout(EngineActor):
    """Computes with a torch module, for as long as the test wants."""

    def __init__(self) -> None:
        self.anew()

    def anew(self) -> None:
        self.engine: Any = ModuleEngine(Tiny())
        self.begun, self.end = threading.Event(), threading.Event()

    def serve(self) -> None:
        """From now on its engine is a server, which only this process reaches."""
        self.server = TransferVllm(["GPU-0"])
        self.engine = VllmEngine("http://127.0.0.1:1", VllmOptions(attempts=1), transport=self.server.transport)

    def break_next(self, call: str, how: str = "refused") -> None:
        def hang() -> tuple[int, dict[str, Any]]:
            self.end.wait(120)
            return 200, {}

        faults = {"refused": (500, "planted"), "lost": httpx.ReadTimeout("planted"), "hangs": hang}
        self.server.answers[call] = faults[how]

    def held(self) -> tuple[str, bool, dict[str, Any]]:
        """By the server, which is whole again."""
        self.server.answers.clear()
        return self.server.label, self.server.paused, self.server.weights

    def compute(self) -> str:
        with self.engine.gate:
            label = self.engine.status().label
            self.begun.set()
            self.end.wait(120)
            return label

    @ray.method(concurrency_group="ckptsync")
    def computes(self) -> bool:
        return self.begun.is_set()

    @ray.method(concurrency_group="ckptsync")
    def let_go(self) -> None:
        self.end.set()


@pytest.fixture(scope="module")
def rollout_actor(nodes: list[str]) -> Any:
    return start(Rollout)


@pytest.fixture
def rollout(rollout_actor: Any) -> Any:
    call(rollout_actor, "anew")
    return rollout_actor


@pytest.fixture(scope="module")
def fake_actor(nodes: list[str]) -> Any:
    return start(Fake, "fake")


@pytest.fixture
def fake(fake_actor: Any) -> Iterator[Any]:
    call(fake_actor, "anew")
    yield fake_actor
    call(fake_actor, "tell")  # who hangs still ends


@pytest.fixture
def publisher(tmp_path: Any) -> TestPublisher:
    return TestPublisher(str(tmp_path / "root"))


@pytest.fixture
def version(publisher: TestPublisher, tmp_path: Any) -> StagedVersion:
    return Stage(str(tmp_path / "stage")).stage(publisher.channel, publisher.publish())


@pytest.fixture
def watch(publisher: TestPublisher, tmp_path: Any) -> Iterator[Callable[..., Watcher]]:
    made: list[Watcher] = []

    def make(engine: RayEngine, **options: Any) -> Watcher:
        made.append(Watcher(publisher.channel.store, engine, stage=str(tmp_path / "stage"), reader="r", **options))
        return made[-1]

    yield make
    for watcher in made:
        watcher.close()


def test_a_torch_module_in_an_actor_is_loaded_proven_and_loaded_again_after_a_kill(
    rollout: Any, publisher: TestPublisher, watch: Callable[..., Watcher]
) -> None:
    engine = RayEngine(rollout, name="rollout-0")
    assert engine.schema() == SCHEMA
    watcher = watch(engine, proof=3)
    first = publisher.publish()
    receipt = watcher.step()
    assert receipt is not None
    assert (receipt.state, receipt.engine, receipt.label) == ("serving", "rollout-0", "e1-v1")
    assert receipt.fingerprint
    publisher.publish(specs=SPECS[:-1])
    refused = watcher.step()
    assert refused is not None
    assert (refused.state, refused.error and refused.error["kind"]) == ("refused", "schema-mismatch")
    kill(rollout)
    until(lambda: is_up(rollout), seconds=60, what="the actor's restart")
    again = watcher.step()
    assert again is not None
    assert (again.state, again.fingerprint) == ("serving", receipt.fingerprint)
    assert engine.status().label == first.id.label


def test_a_load_waits_for_what_computes_and_what_comes_then_waits_for_the_load(
    rollout: Any, publisher: TestPublisher, watch: Callable[..., Watcher]
) -> None:
    engine = RayEngine(rollout, name="rollout-0")
    watcher = watch(engine)
    publisher.publish()
    watcher.step()
    first = rollout.compute.remote()
    until(lambda: call(rollout, "computes"), what="the first computation")
    publisher.publish()
    loading = threading.Thread(target=watcher.step)
    loading.start()
    until(lambda: engine.status().paused, what="the pause, which waits for it")
    second = rollout.compute.remote()
    call(rollout, "let_go")
    assert ray.get([first, second], timeout=60) == ["e1-v1", "e1-v2"]
    loading.join(60)
    assert watcher.health.version == "e1-v2"


def test_an_actor_that_hangs_is_unavailable_and_dirty_once_weights_may_be_touched(
    fake: Any, version: StagedVersion
) -> None:
    engine = RayEngine(fake, name="rollout-0", timeout=0.5)
    call(fake, "tell", status="hang", update="hang")
    with pytest.raises(EngineUnavailable, match=r"status: rollout-0 did not answer within 0.5 s"):
        engine.status()
    with pytest.raises(EngineDirty, match="update: rollout-0 did not answer"):
        engine.update(version)


def test_an_actor_that_dies_in_mid_load_leaves_the_load_dirty_and_another_boot(
    fake: Any, version: StagedVersion
) -> None:
    engine = RayEngine(fake, name="rollout-0")
    boot = engine.status().boot_id
    engine.pause()
    engine.start(version)
    call(fake, "tell", update="die")
    with pytest.raises(EngineDirty, match="update: rollout-0: Actor"):
        engine.update(version)
    until(lambda: is_up(fake), seconds=60, what="the actor's restart")
    status = engine.status()
    assert status.boot_id != boot
    assert (status.label, status.paused) == ("", False)


def test_what_an_adapter_raises_is_raised_as_itself_and_a_bug_by_where_it_was(
    fake: Any, version: StagedVersion
) -> None:
    engine = RayEngine(fake, name="rollout-0")
    with pytest.raises(EngineRefused, match=r"^not paused$"):
        engine.start(version)
    with pytest.raises(EngineRefused, match="fake: its adapter Told has no score"):
        engine.score([1, 2], 1)
    assert engine.read_back() == "none"
    engine.pause()
    call(fake, "tell", status="have a bug", update="have a bug")
    with pytest.raises(EngineDirty, match="update: rollout-0: ZeroDivisionError: planted"):
        engine.update(version)
    with pytest.raises(EngineRefused, match="status: rollout-0: ZeroDivisionError: planted"):
        engine.status()


def test_an_engine_that_only_loads_from_files_says_so_and_is_left_to_them(fake: Any, tmp_path: Any) -> None:
    engine = RayEngine(fake, name="rollout-0")
    assert VllmGloo().probe([engine]) == "rollout-0 does not answer"
    with WeightSync([Gloo(), Checkpoint()], channel=str(tmp_path), engines=[engine]) as sync:
        done = sync.sync(Tiny())
    assert (done.transport, done.dirty) == ("checkpoint", ())
    assert "Told has no routes: it loads from files" in done.failures[0].message
    assert call(fake, "held") == ("", False)


def test_a_server_that_only_its_actor_reaches_is_sent_handles_and_is_dirty_once_it_broke_off(
    rollout: Any, tmp_path: Any
) -> None:
    call(rollout, "serve")
    engine, ipc = RayEngine(rollout, name="rollout-0"), VllmIpc(devices=FileDevices(str(tmp_path), "GPU-0"))
    options: dict[str, Any] = {"patience": Patience(tries=1), "bucket_bytes": 600}
    with WeightSync([ipc], channel=str(tmp_path / "root"), engines=[engine], **options) as sync:
        done = sync.sync(Small(1))
        assert (done.transport, done.confirmed, engine.version()) == ("vllm_ipc", ("rollout-0",), done.version)
        call(rollout, "break_next", "POST /update_weights")
        with pytest.raises(NoTransport, match=r"planted.*Left paused, their weights may be mixed: rollout-0"):
            sync.sync(Small(2))
        assert call(rollout, "held")[:2] == ("partial e1-v2", True)
        done = sync.sync(Small(3))
        label, paused, tensors = call(rollout, "held")
        assert (label, paused, same(tensors, weights(Small(3)))) == (done.version.label, False, True)


@pytest.mark.parametrize("how", ["lost", "hangs"])
def test_an_answer_that_does_not_come_through_the_actor_means_what_it_means_without_one(rollout: Any, how: str) -> None:
    call(rollout, "serve")
    http = RayEngine(rollout, name="rollout-0").http
    cases: list[tuple[str, str, Touch, type[Exception]]] = [
        ("start", "/start_weight_update", "no", EngineUnavailable),
        ("update", "/update_weights", "starts", EngineDirty),
    ]
    for step, path, touch, error in cases:
        call(rollout, "break_next", f"POST {path}", how)
        with pytest.raises(error, match=rf"{step}: POST .*{path} got no answer within 0 s \(ReadTimeout\)"):
            http.send(Call(step=step, method="POST", path=path, touch=touch, timeout=0.5))
    call(rollout, "let_go")


def test_an_actor_of_another_class_is_refused(nodes: list[str]) -> None:
    with pytest.raises(InvalidInput, match="rollout-0: the class of its actor is not an EngineActor"):
        RayEngine(start(Tiny), name="rollout-0")
