"""The SGLang adapter against a real SGLang server with a tiny random model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from ckptsync.engine import Confirmation, StagedVersion
from ckptsync.errors import EngineRefused, ProofFailed
from watchers.engines.sglang import SglangEngine, SglangOptions

from .conftest import Server, Start, staged

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.timeout(1200)]

Versions = dict[str, StagedVersion]


@pytest.fixture
def engine(sglang_server: Server) -> Iterator[SglangEngine]:
    engine = SglangEngine(sglang_server.url)
    yield engine
    if engine.status().paused:  # a test failed half way: the next one is to find a server that serves
        engine.resume()
    engine.close()


def load(engine: SglangEngine, version: StagedVersion) -> Confirmation:
    engine.pause()
    engine.start(version)
    engine.update(version)
    engine.finish(version)
    confirmation = engine.confirm(version)
    engine.resume()
    return confirmation


def test_a_loaded_version_gives_the_tokens_of_a_fresh_server_and_a_restart_is_seen(
    engine: SglangEngine, sglang_server: Server, versions: Versions, fresh_server: Start
) -> None:
    a, b = versions["a"], versions["b"]
    first = load(engine, a)
    of_a = sglang_server.tokens()
    second = load(engine, b)
    assert second.label == b.label == engine.status().label
    of_b = sglang_server.tokens()
    assert load(engine, a).fingerprint == first.fingerprint != second.fingerprint
    assert sglang_server.tokens() == of_a != of_b

    fresh = fresh_server("sglang", b.folder, "--admin-api-key", "secret")
    assert fresh.tokens() == of_b
    with closing(SglangEngine(fresh.url)) as stranger, pytest.raises(EngineRefused, match=r"401.*admin_key"):
        stranger.pause()
    with closing(SglangEngine(fresh.url, SglangOptions(admin_key="secret"))) as other:
        assert other.status().label == ""
        assert load(other, a).fingerprint == first.fingerprint
        before = other.status()
        assert fresh.tokens() == of_a
        fresh.restart()
        after = other.status()
    assert (before.label, after.label) == (a.label, "")
    assert before.boot_id != after.boot_id


def test_the_boot_identity_outlives_a_load_and_a_pause(engine: SglangEngine, versions: Versions) -> None:
    before = engine.status().boot_id
    load(engine, versions["a"])
    engine.pause()
    assert engine.status().boot_id == before != ""
    engine.resume()


def test_the_schema_is_that_of_the_first_look(engine: SglangEngine, sglang_server: Server, versions: Versions) -> None:
    load(engine, versions["a"])
    schema = engine.schema()
    load(engine, versions["b"])
    assert httpx.get(sglang_server.url + "/model_info").json()["model_path"] == versions["b"].folder
    assert engine.schema() is schema
    assert schema == {t.name: t.spec for t in versions["a"].manifest.tracks["model"].tensors}


def test_pause_and_resume_may_be_repeated(engine: SglangEngine) -> None:
    for _ in range(2):
        engine.pause()
        assert engine.status().paused
    for _ in range(2):
        engine.resume()
        assert not engine.status().paused


def test_a_running_request_is_recomputed_over_a_load(
    engine: SglangEngine, sglang_server: Server, versions: Versions
) -> None:
    load(engine, versions["a"])
    with sglang_server.running_request(400) as lines:
        assert load(engine, versions["b"]).warnings == ()
        rest = [json.loads(line.removeprefix("data: ")) for line in lines]
    meta = rest[-1]["meta_info"]
    assert meta["finish_reason"]["type"] == "length"
    assert [span["version"] for span in meta["weight_versions"]] == ["e1-v1", "e1-v2"]


def test_weights_updated_but_not_flushed_is_made_up_for(
    engine: SglangEngine, sglang_server: Server, versions: Versions
) -> None:
    """The 400 that SGLang answers when a request is still running: the weights are in, label and flush are
    not."""
    a, b = versions["a"], versions["b"]
    load(engine, b)
    of_b = sglang_server.tokens()
    load(engine, a)
    with sglang_server.running_request(400) as lines:
        httpx.post(sglang_server.url + "/pause_generation", json={"mode": "in_place"}).raise_for_status()
        engine.start(b)
        engine.update(b)
        assert engine.status().label == a.label, "if it is b already, there was no 400 and this test proves nothing"
        engine.finish(b)
        confirmation = engine.confirm(b)
        engine.resume()
        rest = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "flushed in a second step" in confirmation.warnings[0]
    assert rest[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert sglang_server.tokens() == of_b


def test_in_place_keeps_requests_and_caches_and_says_so(sglang_server: Server, versions: Versions) -> None:
    options = SglangOptions(pause_mode="in_place", cache="keep")
    with (
        closing(SglangEngine(sglang_server.url, options)) as engine,
        sglang_server.running_request(400) as lines,
    ):
        confirmation = load(engine, versions["a"])
        rest = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert "caches kept" in confirmation.warnings[0]
    assert rest[-1]["meta_info"]["num_retractions"] == 0
    httpx.post(sglang_server.url + "/flush_cache", params={"timeout": 10}).raise_for_status()


def test_a_path_that_is_not_there_is_refused_and_the_old_version_serves_on(
    engine: SglangEngine, sglang_server: Server, versions: Versions
) -> None:
    load(engine, versions["a"])
    of_a = sglang_server.tokens()
    nowhere = staged("/nowhere/at/all", 9)
    engine.pause()
    engine.start(nowhere)
    with pytest.raises(EngineRefused, match=r"load: POST http.* loaded nothing: .*/nowhere/at/all readable"):
        engine.update(nowhere)
    engine.resume()
    assert engine.status().label == versions["a"].label
    assert sglang_server.tokens() == of_a


def test_an_engine_that_computes_is_refused(engine: SglangEngine, versions: Versions) -> None:
    with pytest.raises(EngineRefused, match="not paused"):
        engine.start(versions["a"])


def test_a_label_that_is_not_the_version_is_no_proof(engine: SglangEngine, versions: Versions) -> None:
    load(engine, versions["a"])
    with pytest.raises(ProofFailed, match="e1-v1"):
        engine.confirm(versions["b"])


def test_without_a_flush_the_old_prefix_gives_wrong_tokens(sglang_server: Server, versions: Versions) -> None:
    """The control of the comparisons above: they would notice a cache that was not flushed."""
    with (
        closing(SglangEngine(sglang_server.url)) as flushing,
        closing(SglangEngine(sglang_server.url, SglangOptions(cache="keep"))) as keeping,
    ):
        load(flushing, versions["b"])
        of_b = sglang_server.tokens()
        load(flushing, versions["a"])
        sglang_server.tokens()
        load(keeping, versions["b"])
        assert sglang_server.tokens() != of_b
        load(flushing, versions["b"])
        assert sglang_server.tokens() == of_b
