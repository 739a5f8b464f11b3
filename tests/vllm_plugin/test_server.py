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
from ckptsync.errors import EngineDirty, EngineRefused, EngineUnavailable
from ckptsync.export.source import CheckpointSource
from ckptsync.manifest import TensorSpec
from ckptsync.transports.vllm_gloo import VllmGloo
from tests.engines import conftest as servers
from tests.engines.conftest import load
from tests.envs import models
from tests.transports.sends import send
from tests.watcher.publish_folder import publish_folder
from watchers.engines.vllm import VllmOptions
from watchers.engines.vllm_transfer import VllmTransferEngine
from watchers.watcher import Watcher

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = [7 * i % 251 for i in range(200)]
DOWN_PROJ = "model.layers.1.mlp.down_proj.weight"
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
def connect(server: Any) -> Iterator[Callable[..., VllmTransferEngine]]:
    with ExitStack() as stack:

        def connected(**options: Any) -> VllmTransferEngine:
            return stack.enter_context(closing(VllmTransferEngine(server.url, VllmOptions(**options))))

        yield connected


def health(server: Any) -> dict[str, Any]:
    return dict(httpx.get(server.url + "/plugins/ckptsync/health", timeout=30).json())


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


def test_case_97_a_repeated_long_prompt_never_sees_the_old_prefix_unless_caches_are_kept(
    server: Any, connect: Any, versions: dict[str, StagedVersion]
) -> None:
    flushing, keeping = connect(), connect(cache="keep")
    load(flushing, versions["b"])
    of_b = server.tokens()
    load(flushing, versions["c"])
    of_c = server.tokens()
    load(flushing, versions["b"])
    assert server.tokens() == of_b != of_c
    load(keeping, versions["c"])
    assert server.tokens() != of_c, "the control: a cache that was not dropped shows"
    load(flushing, versions["c"])
    assert server.tokens() == of_c


@pytest.mark.parametrize("level", ["1", "2"])
def test_a_sleeping_engine_is_refused_and_counts_as_restarted_when_it_wakes(
    server: Any, connect: Any, versions: dict[str, StagedVersion], level: str
) -> None:
    """The CPU worker keeps its weights; the states are those of any vLLM."""
    engine = connect()
    boot = engine.status().boot_id
    httpx.post(server.url + "/sleep", params={"level": level}, timeout=60).raise_for_status()
    try:
        with pytest.raises(EngineUnavailable, match="sleeps"):
            engine.status()
        with pytest.raises(EngineRefused, match="sleeps"):
            engine.start(versions["b"])
    finally:
        httpx.post(server.url + "/wake_up", timeout=60).raise_for_status()
    assert engine.status().boot_id != boot
    assert connect().status().boot_id != boot, "for who was not there too"
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


@pytest.fixture
def gloo() -> Iterator[VllmGloo]:
    with closing(VllmGloo(verify=True)) as transport:
        yield transport


def test_a_trainers_broadcast_and_files_take_turns_at_one_server(
    server: Any, connect: Any, gloo: VllmGloo, versions: dict[str, StagedVersion], fresh_tokens: Any
) -> None:
    engine = connect()
    assert gloo.probe([engine]) is None
    for number, name in ((7, "c"), (8, "b")):
        engine.pause()
        send(gloo, CheckpointSource(versions[name].folder), [engine], number, bucket_bytes=1 << 16)
        assert engine.status().label == f"e1-v{number}"
        engine.resume()
        assert server.tokens()[:2] == fresh_tokens(name)[:2]
    (verdict,) = gloo.verification.verdicts.values()
    assert verdict == (True, "no engine like it to compare with; changed with the weights", False)
    load(engine, versions["c"])
    assert [(receipt.state, receipt.proof) for receipt in engine.receipts] == [("loaded", "elements")]
    assert server.tokens()[:2] == fresh_tokens("c")[:2]


class Lacking(CheckpointSource):
    """A trainer's model without one of the engine's weights."""

    def metadata(self) -> list[TensorSpec]:
        return [spec for spec in super().metadata() if spec.name != DOWN_PROJ]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return (named for named in super().__iter__() if named[0] != DOWN_PROJ)


class BreaksOff(CheckpointSource):
    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for count, named in enumerate(super().__iter__()):
            if count == 5:
                raise OSError("the trainer's disk is gone")
            yield named


@pytest.mark.parametrize(
    ("source", "error", "says"), [(Lacking, EngineDirty, "down_proj"), (BreaksOff, OSError, "disk is gone")]
)
def test_a_broadcast_that_is_not_whole_names_no_version_and_files_repair_what_it_left(
    source: type[CheckpointSource], error: type[Exception], says: str,
    server: Any, connect: Any, gloo: VllmGloo, versions: dict[str, StagedVersion], fresh_tokens: Any,
) -> None:  # fmt: skip
    engine = connect()
    engine.pause()
    with pytest.raises(error, match=says):
        send(gloo, source(versions["b"].folder), [engine], 9, bucket_bytes=1 << 16)
    assert engine.status().label == "partial e1-v9"
    load(engine, versions["c"])
    assert engine.status().label == versions["c"].label
    assert server.tokens()[:2] == fresh_tokens("c")[:2]


def test_the_watcher_inside_the_api_server_follows_without_dev_mode(
    environment: pytest.MonkeyPatch, tmp_path: Any, folders: dict[str, str], fresh_tokens: Any
) -> None:
    """At level 4: each rank reads back, and the engine computes what transformers recorded."""
    root = str(tmp_path / "root")
    publish_folder(root, folders["b"], models.canary_of(folders["b"], PROMPT))
    environment.setenv("CKPTSYNC_TEST_SPAWN", "1")  # as vLLM starts its processes by itself, and the plugin in each
    environment.setenv("CKPTSYNC_PROOF", "4")
    environment.setenv("VLLM_PLUGINS", "ckptsync,unpacked")
    environment.setenv("VLLM_SERVER_DEV_MODE", "0")
    environment.setenv("CKPTSYNC_ROOT", root)
    environment.setenv("CKPTSYNC_STAGE", str(tmp_path / "stage"))
    environment.setenv("CKPTSYNC_POLL", "0.2")
    with ExitStack() as stack:
        server = servers._starter(tmp_path, stack)("vllm", folders["a"], *BACKEND)

        def follows(label: str) -> bool:
            answer = httpx.get(server.url + "/plugins/ckptsync/health", timeout=30)
            return answer.status_code == 200 and answer.json()["version"] == label

        servers.until(lambda: follows("e1-v1"), 120, "the first version is followed")
        assert server.tokens()[:2] == fresh_tokens("b")[:2]
        assert httpx.get(server.url + "/is_paused", timeout=30).status_code == 404
        started = time.monotonic()
        publish_folder(root, folders["c"], models.canary_of(folders["c"], PROMPT))
        servers.until(lambda: follows("e1-v2"), 120, "the second version is followed")
        assert time.monotonic() - started < 120
        assert server.tokens()[:2] == fresh_tokens("c")[:2]

        publish_folder(root, folders["a"], models.canary_of(folders["c"], PROMPT))
        servers.until(lambda: "level 4" in health(server)["reason"], 120, "another model's canary is refused")
        servers.until(lambda: follows("e1-v2"), 120, "the version before is back")
        assert server.tokens()[:2] == fresh_tokens("c")[:2]
