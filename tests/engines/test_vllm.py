"""The vLLM adapter against a real vLLM server with a tiny random model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from ckptsync.engine import Confirmation, StagedVersion
from ckptsync.errors import EngineDirty, EngineRefused, ProofFailed
from watchers.engines.vllm import VllmEngine, VllmOptions

from .conftest import Server, Start, staged

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(1200)]

Versions = dict[str, StagedVersion]


@pytest.fixture
def engine(vllm_server: Server) -> Iterator[VllmEngine]:
    engine = VllmEngine(vllm_server.url)
    yield engine
    if engine.status().paused:  # a test failed half way: the next one is to find a server that serves
        engine.resume()
    engine.close()


def load(engine: VllmEngine, version: StagedVersion) -> Confirmation:
    engine.pause()
    engine.start(version)
    engine.update(version)
    engine.finish(version)
    confirmation = engine.confirm(version)
    engine.resume()
    return confirmation


def holds_a_request(server: Server) -> bool:
    """Whether vLLM has a request in hand, running or frozen."""
    metrics = httpx.get(server.url + "/metrics").text
    return bool(re.search(r"^vllm:num_requests_(running|waiting)\{.*\} 1\.0$", metrics, re.MULTILINE))


def test_a_loaded_version_gives_the_tokens_of_a_fresh_server_and_a_restart_is_seen(
    engine: VllmEngine, vllm_server: Server, versions: Versions, fresh_server: Start
) -> None:
    a, b = versions["a"], versions["b"]
    load(engine, a)
    of_a = vllm_server.tokens()
    assert load(engine, b).label == b.label == engine.status().label
    of_b = vllm_server.tokens()
    load(engine, a)
    assert vllm_server.tokens() == of_a != of_b
    load(engine, b)

    fresh = fresh_server("vllm", b.folder)
    assert fresh.tokens() == of_b == vllm_server.tokens()
    with closing(VllmEngine(fresh.url)) as other:
        assert other.status().label == ""
        load(other, a)
        before = other.status()
        assert fresh.tokens() == of_a
        fresh.restart()
        after = other.status()
    assert (before.label, after.label) == (a.label, "")
    assert before.boot_id != after.boot_id


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
    # vLLM's CPU build packs the linear layers and leaves their parameters empty.
    confirmation = load(engine, versions["a"])
    assert confirmation.fingerprint == ""
    assert "checksum is of nothing" in confirmation.warnings[0]


def test_pause_and_resume_may_be_repeated(engine: VllmEngine) -> None:
    for _ in range(2):
        engine.pause()
        assert engine.status().paused
    for _ in range(2):
        engine.resume()
        assert not engine.status().paused


def test_a_running_request_is_kept_over_a_load(engine: VllmEngine, vllm_server: Server, versions: Versions) -> None:
    load(engine, versions["a"])
    with vllm_server.running_request(1000) as lines:
        engine.pause()
        assert holds_a_request(vllm_server)
        load(engine, versions["b"])
        rest = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert rest[-1]["choices"][0]["finish_reason"] == "length"


def test_aborted_requests_end_before_the_load(vllm_server: Server, versions: Versions) -> None:
    with (
        closing(VllmEngine(vllm_server.url, VllmOptions(pause_mode="abort"))) as engine,
        vllm_server.running_request(3000) as lines,
    ):
        load(engine, versions["a"])
        rest = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert rest[-1]["choices"][0]["finish_reason"] == "abort"


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


def test_without_a_flush_the_old_prefix_gives_wrong_tokens(vllm_server: Server, versions: Versions) -> None:
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
