"""The vLLM adapter against a real vLLM server with a tiny random model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import httpx
import pytest

from ckptsync.engine import Engine, StagedVersion
from ckptsync.errors import EngineDirty, EngineRefused, ProofFailed
from tests.envs.processor import vllm_packs_linear_layers
from tests.waiting import until
from tests.watcher.publish_folder import publish_folder
from watchers.engines.embedded import EmbeddedEngine
from watchers.engines.sglang import SglangEngine
from watchers.engines.vllm import VllmEngine, VllmOptions
from watchers.watcher import Watcher

from .conftest import ENDLESS, Server, Started, left_serving, load, staged

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(1200)]

Versions = dict[str, StagedVersion]


@pytest.fixture
def engine(vllm_server: Server) -> Iterator[VllmEngine]:
    with left_serving(VllmEngine(vllm_server.url)) as engine:
        yield engine


def generated(server: Server) -> float:
    """How many tokens vLLM has computed so far. (Its count of running requests stays at what the last step before a
    pause said.)"""
    metrics = httpx.get(server.url + "/metrics", timeout=60).text
    return float(re.search(r"^vllm:generation_tokens_total\{.*\} (.*)$", metrics, re.MULTILINE)[1])  # type: ignore[index]


def test_a_loaded_version_gives_the_tokens_of_a_fresh_server(
    engine: VllmEngine, vllm_server: Server, versions: Versions, started_on_b: Callable[[str], Started]
) -> None:
    a, b = versions["a"], versions["b"]
    load(engine, a)
    of_a = vllm_server.tokens()
    assert load(engine, b).label == b.label == engine.status().label
    of_b = vllm_server.tokens()
    load(engine, a)
    assert vllm_server.tokens() == of_a != of_b
    load(engine, b)

    fresh = started_on_b("vllm")
    assert fresh.tokens == of_b == vllm_server.tokens()
    with left_serving(VllmEngine(fresh.server.url)) as other:
        load(other, a)
        assert fresh.server.tokens() == of_a


def test_the_boot_identity_outlives_a_load(engine: VllmEngine, versions: Versions) -> None:
    before = engine.status().boot_id
    load(engine, versions["a"])
    assert engine.status().boot_id == before != ""


def test_the_schema_is_that_of_the_folder_it_was_started_with(engine: VllmEngine, versions: Versions) -> None:
    load(engine, versions["b"])
    schema = engine.schema()
    assert schema is not None
    assert schema == {t.name: t.spec for t in versions["a"].manifest.tracks["model"].tensors}


def test_a_checksum_that_leaves_tensors_out_is_no_fingerprint(engine: VllmEngine, versions: Versions) -> None:
    confirmation = load(engine, versions["a"])
    if vllm_packs_linear_layers():  # their parameters are empty then
        assert confirmation.fingerprint == ""
        assert "checksum is of nothing" in confirmation.warnings[0]
    else:
        assert len(confirmation.fingerprint) == 64
        assert not any("checksum is of nothing" in warning for warning in confirmation.warnings)


def test_pause_and_resume_may_be_repeated(engine: VllmEngine) -> None:
    for _ in range(2):
        engine.pause()
        assert engine.status().paused
    for _ in range(2):
        engine.resume()
        assert not engine.status().paused


@contextmanager
def computing(server: Server, path: str, body: dict[str, Any]) -> Iterator[Future[httpx.Response]]:
    """A request that is certainly being computed, and aborted at the end. Not streamed: a part for each token keeps
    vLLM's API server so busy that on a loaded machine it hears late of a pause."""
    before = generated(server)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, server.url + path, json=body, timeout=300)
        until(lambda: generated(server) > before, 60, "the first tokens")
        try:
            yield answer
        finally:
            server.abort()


def test_a_running_request_is_kept_over_a_load_and_names_both_versions(
    engine: VllmEngine, vllm_server: Server, versions: Versions
) -> None:
    """By the token route, which vLLM 0.32 has with `--enable-scale-out`; its OpenAI routes name none."""
    load(engine, versions["a"])
    body = {
        "token_ids": [7, 8, 9],
        "sampling_params": {"max_tokens": ENDLESS["vllm"], "temperature": 0, "ignore_eos": True},
    }
    with computing(vllm_server, "/inference/v1/generate", body) as answer:
        load(engine, versions["b"])
        before = generated(vllm_server)
        until(lambda: generated(vllm_server) > before + 100, 120, "it goes on after the load")
    (choice,) = answer.result().json()["choices"]
    assert choice["finish_reason"] == "abort"
    old, new = choice["weight_versions"]
    assert (old["version"], new["version"]) == ("e1-v1", "e1-v2")
    assert (old["start"], old["end"], new["end"]) == (0, new["start"], len(choice["token_ids"])), "each is of one"


def test_aborted_requests_end_before_the_load(vllm_server: Server, versions: Versions) -> None:
    with (
        closing(VllmEngine(vllm_server.url, VllmOptions(pause_mode="abort"))) as engine,
        computing(vllm_server, *vllm_server.request([7, 8, 9], ENDLESS["vllm"])) as answer,
    ):
        engine.pause()
        until(answer.done, 60, "the request has ended, while the engine does nothing")
        load(engine, versions["a"])
    assert answer.result().json()["choices"][0]["finish_reason"] == "abort"


def test_an_engine_that_computes_is_refused(engine: VllmEngine, versions: Versions) -> None:
    with pytest.raises(EngineRefused, match="not paused"):
        engine.start(versions["a"])


def test_a_label_that_is_not_the_version_is_no_proof(engine: VllmEngine, versions: Versions) -> None:
    load(engine, versions["a"])
    with pytest.raises(ProofFailed, match="e1-v1"):
        engine.confirm(versions["b"])


def test_a_load_that_fails_keeps_the_label_and_a_good_load_repairs(
    engine: VllmEngine, vllm_server: Server, versions: Versions
) -> None:
    load(engine, versions["a"])
    of_a = vllm_server.tokens()
    nowhere = staged("/nowhere/at/all", 9)
    engine.pause()
    engine.start(nowhere)
    with pytest.raises(EngineDirty, match=r"load: POST http.*/nowhere/at/all readable") as raised:
        engine.update(nowhere)
    assert vllm_server.url in str(raised.value)
    assert engine.status().label == versions["a"].label
    load(engine, versions["a"])
    assert vllm_server.tokens() == of_a


def test_case_97_a_repeated_long_prompt_never_sees_the_old_prefix_unless_caches_are_kept(
    vllm_server: Server, versions: Versions
) -> None:
    """The control of the comparisons above: they would notice a cache that was not flushed."""
    with (
        closing(VllmEngine(vllm_server.url)) as flushing,
        closing(VllmEngine(vllm_server.url, VllmOptions(cache="keep"))) as keeping,
    ):
        load(flushing, versions["b"])
        of_b = vllm_server.tokens()
        load(flushing, versions["a"])
        vllm_server.tokens()
        load(keeping, versions["b"])
        assert vllm_server.tokens() != of_b
        load(flushing, versions["b"])
        assert vllm_server.tokens() == of_b


@pytest.mark.parametrize("adapter", [SglangEngine, EmbeddedEngine])
def test_another_adapter_says_whose_server_this_is(vllm_server: Server, adapter: type[Engine]) -> None:
    with closing(adapter(vllm_server.url)) as wrong, pytest.raises(EngineRefused, match="try --engine vllm"):
        wrong.status()


def sleep(server: Server, level: int) -> None:
    httpx.post(server.url + "/sleep", params={"level": str(level)}, timeout=60).raise_for_status()


def wake_up(server: Server) -> None:
    httpx.post(server.url + "/wake_up", timeout=60).raise_for_status()


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_is_left_alone_and_gets_its_version_again_when_it_wakes(
    vllm_server: Server, versions: Versions, tmp_path: Any, level: int
) -> None:
    """The CPU worker keeps its weights; what the server says of its sleep is what any vLLM says."""
    root = str(tmp_path / "root")
    publish_folder(root, versions["a"].folder)
    with closing(VllmEngine(vllm_server.url)) as engine:
        watcher = Watcher(root, engine, stage=str(tmp_path / "stage"), reader="r", poll=0.05)
        assert watcher.step().state == "serving"
        boot = engine.status().boot_id
        publish_folder(root, versions["b"].folder)
        sleep(vllm_server, level)
        try:
            with pytest.raises(EngineRefused, match="sleeps"):
                engine.start(versions["b"])
            assert watcher.step() is None
            assert not watcher.health.ready
            assert "sleeps" in watcher.health.reason
        finally:
            wake_up(vllm_server)
        assert engine.status().boot_id != boot
        assert watcher.step().version == "e1-v1", "at level 2 the weights are gone: what was served comes first"
        assert watcher.step().label == "e1-v2"
        watcher.close()


def test_a_sleep_that_nobody_saw_is_seen_when_it_is_over(
    vllm_server: Server, versions: Versions, tmp_path: Any
) -> None:
    root = str(tmp_path / "root")
    publish_folder(root, versions["a"].folder)
    with closing(VllmEngine(vllm_server.url)) as engine:
        watcher = Watcher(root, engine, stage=str(tmp_path / "stage"), reader="r", poll=0.05)
        assert watcher.step().state == "serving"
        assert watcher.step() is None
        sleep(vllm_server, 2)
        wake_up(vllm_server)
        assert watcher.step().label == "e1-v1"
        watcher.close()
