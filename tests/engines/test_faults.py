"""What the HTTP adapters make of engines that lie, hang, drop the connection or ask for a key."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest

from ckptsync.engine import Engine, StagedVersion
from ckptsync.engine_http import Call, EngineHttp, HttpOptions
from ckptsync.errors import (
    EngineDirty,
    EngineError,
    EngineRefused,
    EngineUnavailable,
    InvalidInput,
    ProofFailed,
)
from watchers.engines.sglang import SglangEngine, SglangOptions
from watchers.engines.vllm import VllmEngine, VllmOptions
from watchers.engines.vllm_transfer import VllmTransferEngine

from .conftest import staged
from .faked import URL
from .fakes import FakeSglang, FakeVllm

VERSION = staged("/stage/e0001-v00000007", 7)
LABEL = VERSION.label


def load(engine: Engine, version: StagedVersion = VERSION) -> Any:
    engine.pause()
    engine.start(version)
    engine.update(version)
    engine.finish(version)
    return engine.confirm(version)


# Calls in order, and what they carry


def test_case_88_97_vllm_reloads_by_its_own_route_then_flushes_then_labels(
    vllm: VllmEngine, fake_vllm: FakeVllm
) -> None:
    assert load(vllm).label == LABEL
    assert [call for call in fake_vllm.seen if call.startswith("POST")] == [
        "POST /pause",
        "POST /collective_rpc",
        "POST /reset_prefix_cache",
        "POST /reset_mm_cache",
        "POST /reset_encoder_cache",
        "POST /update_weight_version",
        "POST /weight_checker",
    ]
    assert fake_vllm.body_of("POST /collective_rpc") == {
        "method": "reload_weights",
        "kwargs": {"weights_path": VERSION.folder},
    }


def test_case_97_vllm_asked_to_keep_caches_resets_none(fake_vllm: FakeVllm) -> None:
    engine = VllmEngine(URL, VllmOptions(cache="keep"), transport=fake_vllm.transport)
    load(engine)
    assert not [call for call in fake_vllm.seen if "reset" in call]
    assert fake_vllm.requests[0].url.params["clear_cache"] == "false"


def test_case_97_no_flush_falls_into_an_open_update(fake_vllm: FakeVllm) -> None:
    """With the plugin vLLM has a session: it ends, caches are dropped, the label says so, requests go on."""
    engine = VllmTransferEngine(URL, transport=fake_vllm.transport)
    engine.pause()
    engine.start(VERSION)
    engine.finish(VERSION)
    engine.resume()
    posts = [call for call in fake_vllm.seen if call.startswith("POST")]
    assert posts == [
        "POST /pause",
        "POST /start_weight_update",
        "POST /finish_weight_update",
        "POST /reset_prefix_cache",
        "POST /reset_mm_cache",
        "POST /reset_encoder_cache",
        "POST /update_weight_version",
        "POST /resume",
    ]


def test_case_97_sglang_flushes_with_the_load_or_not_at_all(fake_sglang: FakeSglang) -> None:
    for cache, mode in (("flush", "retract"), ("keep", "in_place")):
        options = SglangOptions(cache=cache, pause_mode=mode)  # type: ignore[arg-type]
        fake_sglang.seen.clear()
        fake_sglang.requests.clear()
        engine = SglangEngine(URL, options, transport=fake_sglang.transport)
        load(engine)
        engine.resume()
        posts = [call for call in fake_sglang.seen if call.startswith("POST")]
        assert posts == [
            "POST /pause_generation",
            "POST /update_weights_from_disk",
            "POST /weights_checker",
            "POST /continue_generation",
        ]
        assert fake_sglang.body_of("POST /update_weights_from_disk")["flush_cache"] is (cache == "flush")


def test_sglang_gets_label_and_flush_with_the_load(sglang: SglangEngine, fake_sglang: FakeSglang) -> None:
    confirmation = load(sglang)
    assert (confirmation.label, confirmation.fingerprint, confirmation.warnings) == (LABEL, "abc", ())
    assert fake_sglang.body_of("POST /update_weights_from_disk") == {
        "model_path": VERSION.folder,
        "weight_version": LABEL,
        "load_format": "auto",
        "flush_cache": True,
    }
    assert "POST /update_weight_version" not in fake_sglang.seen


def test_keys_are_sent_and_never_shown(fake_sglang: FakeSglang) -> None:
    options = SglangOptions(api_key="key-one", admin_key="key-two")
    engine = SglangEngine(URL, options, transport=fake_sglang.transport)
    load(engine)
    sent = {f"{r.method} {r.url.path}": r.headers.get("authorization") for r in fake_sglang.requests}
    assert sent["GET /model_info"] == "Bearer key-one"
    assert sent["POST /update_weights_from_disk"] == "Bearer key-two"
    assert "key-" not in repr(options)


def test_the_load_may_take_longer_for_more_bytes() -> None:
    options = HttpOptions(timeout=10, min_load_rate=1e6)
    assert options.load_timeout(0) == 10
    assert options.load_timeout(50_000_000) == 60


# Restarts


def test_a_restarted_vllm_is_told_by_boot_and_label(vllm: VllmEngine, fake_vllm: FakeVllm) -> None:
    load(vllm)
    before = vllm.status()
    fake_vllm.restart()
    after = vllm.status()
    assert (before.label, after.label) == (LABEL, "")
    assert before.boot_id != after.boot_id


def test_a_restarted_sglang_is_told_by_boot_and_label(sglang: SglangEngine, fake_sglang: FakeSglang) -> None:
    load(sglang)
    before = sglang.status()
    fake_sglang.restart()
    after = sglang.status()
    assert (before.label, after.label) == (LABEL, "")
    assert before.boot_id != after.boot_id


def test_a_model_that_is_not_a_folder_here_has_no_schema(vllm: VllmEngine, sglang: SglangEngine) -> None:
    assert vllm.schema() is None
    assert sglang.schema() is None


# Answers of 200 that are no success

VLLM_LIES = [
    ("POST /pause", {"status": "unpaused"}, EngineRefused, "pause"),
    ("POST /pause", "fine", EngineRefused, "not a JSON object"),
    ("GET /is_paused", {"is_paused": False}, EngineRefused, "still computes"),
    ("POST /collective_rpc", "", EngineDirty, "load"),
    ("POST /collective_rpc", {"results": []}, EngineDirty, "results"),
    ("POST /collective_rpc", {"results": [None, "error"]}, EngineDirty, "results"),
    ("POST /reset_prefix_cache", {"success": False}, EngineDirty, "flush"),
    ("POST /update_weight_version", {"success": True, "new_version": "other"}, EngineDirty, "label"),
    ("GET /weight_info", {"weight_version": "default"}, ProofFailed, "'default'"),
    ("GET /weight_info", {"weight_version": None}, EngineRefused, "weight_version"),
    ("POST /weight_checker", {"checksums": {}}, ProofFailed, "without checksums"),
]


@pytest.mark.parametrize(("call", "body", "error", "text"), VLLM_LIES)
def test_vllm_says_200_and_did_not(
    vllm: VllmEngine, fake_vllm: FakeVllm, call: str, body: object, error: type[EngineError], text: str
) -> None:
    fake_vllm.answers[call] = (200, body)
    with pytest.raises(error, match=text):
        load(vllm)


SGLANG_LIES = [
    ("POST /pause_generation", {"status": "no"}, EngineRefused, "pause"),
    ("GET /ready", "", EngineRefused, "still computes"),
    ("POST /update_weights_from_disk", {"success": False, "message": "odd"}, EngineDirty, "half done"),
    ("POST /update_weights_from_disk", {"message": "Succeeded"}, EngineDirty, "load"),
    ("POST /update_weights_from_disk", [], EngineDirty, "not a JSON object"),
    ("GET /model_info", {"weight_version": "default", "model_path": "x"}, ProofFailed, "'default'"),
    ("POST /weights_checker", {"success": False}, ProofFailed, "checksum"),
]


@pytest.mark.parametrize(("call", "body", "error", "text"), SGLANG_LIES)
def test_sglang_says_200_and_did_not(
    sglang: SglangEngine,
    fake_sglang: FakeSglang,
    call: str,
    body: object,
    error: type[EngineError],
    text: str,
) -> None:
    fake_sglang.answers[call] = (200, body)
    with pytest.raises(error, match=text):
        load(sglang)


def test_vllm_that_stays_paused_is_not_taken_for_resumed(vllm: VllmEngine, fake_vllm: FakeVllm) -> None:
    fake_vllm.answers["GET /is_paused"] = (200, {"is_paused": True})
    with pytest.raises(EngineRefused, match="still paused"):
        vllm.resume()


def test_sglang_that_stays_paused_is_not_taken_for_resumed(sglang: SglangEngine, fake_sglang: FakeSglang) -> None:
    fake_sglang.answers["GET /ready"] = (503, "")
    with pytest.raises(EngineRefused, match="still paused"):
        sglang.resume()


# Refusals, and what they mean for the weights


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("Failed to get weights iterator: /x.", EngineRefused),
        ("Failed to get weights iterator: /x. | Failed to get model loader: y.", EngineRefused),
        ("Failed to get weights iterator: /x. | Succeeded to update model weights.", EngineDirty),
        ("Failed to update weights: shapes. Rolling back to original weights.", EngineDirty),
    ],
)
def test_sglang_refuses_only_if_no_worker_touched_anything(
    sglang: SglangEngine, fake_sglang: FakeSglang, message: str, error: type[EngineError]
) -> None:
    fake_sglang.answers["POST /update_weights_from_disk"] = (400, {"success": False, "message": message})
    with pytest.raises(error):
        load(sglang)


def test_case_100_sglang_that_could_not_flush_is_paused_again_and_flushed_within_bounds(
    sglang: SglangEngine, fake_sglang: FakeSglang
) -> None:
    message = "Weights were updated, but the cache was not flushed because requests are still running."
    fake_sglang.answers["POST /update_weights_from_disk"] = (400, {"success": False, "message": message})
    flushes: Iterator[tuple[int, str]] = iter([(400, "Flush cache failed.\n"), (200, "Cache flushed.\n")])
    fake_sglang.answers["POST /flush_cache"] = lambda: next(flushes)
    confirmation = load(sglang)
    assert confirmation.label == LABEL
    assert "second step" in confirmation.warnings[0]
    assert fake_sglang.seen.count("POST /pause_generation") == 2
    assert fake_sglang.seen.count("POST /flush_cache") == 2


def test_case_102_a_version_number_aborts_no_request(sglang: SglangEngine, fake_sglang: FakeSglang) -> None:
    sglang.set_label(LABEL)
    assert fake_sglang.body_of("POST /update_weight_version") == {"new_version": LABEL, "abort_all_requests": False}


def test_case_108_loader_options_are_passed_with_each_load(fake_sglang: FakeSglang) -> None:
    engine = SglangEngine(URL, transport=fake_sglang.transport)
    for _ in range(2):
        load(engine)
        engine.resume()
    loads = [r for r in fake_sglang.requests if r.url.path == "/update_weights_from_disk"]
    assert [json.loads(request.content)["load_format"] for request in loads] == ["auto"] * 2


def test_case_96_caches_that_cannot_be_reset_are_warnings(vllm: VllmEngine, fake_vllm: FakeVllm) -> None:
    fake_vllm.answers["POST /reset_mm_cache"] = (200, {"success": False, "message": "not supported"})
    fake_vllm.answers["POST /reset_encoder_cache"] = (404, {"detail": "Not Found"})
    warnings = load(vllm).warnings
    assert [w.split()[1] for w in warnings] == ["/reset_mm_cache", "/reset_encoder_cache"]
    assert "not supported" in warnings[0]


def test_an_older_engine_without_checksums_has_no_fingerprint(
    vllm: VllmEngine, fake_vllm: FakeVllm, sglang: SglangEngine, fake_sglang: FakeSglang
) -> None:
    fake_vllm.answers["POST /weight_checker"] = (404, {"detail": "Not Found"})
    fake_sglang.answers["POST /weights_checker"] = (404, {"detail": "Not Found"})
    assert load(vllm).fingerprint == load(sglang).fingerprint == ""


def test_a_stock_server_without_dev_mode_is_told_how_to_start(vllm: VllmEngine, fake_vllm: FakeVllm) -> None:
    fake_vllm.answers["GET /weight_info"] = (404, {"detail": "Not Found"})
    with pytest.raises(EngineRefused, match="VLLM_SERVER_DEV_MODE=1"):
        vllm.status()


@pytest.mark.parametrize("status", [401, 403])
def test_a_wrong_key_is_refused_before_the_load(
    vllm: VllmEngine, fake_vllm: FakeVllm, sglang: SglangEngine, fake_sglang: FakeSglang, status: int
) -> None:
    fake_vllm.answers["POST /collective_rpc"] = (status, {"error": "Unauthorized"})
    fake_sglang.answers["POST /update_weights_from_disk"] = (status, {"error": "Unauthorized"})
    for engine in (vllm, sglang):
        with pytest.raises(EngineRefused, match="admin_key"):
            load(engine)


def test_a_refusal_after_the_load_is_dirty(vllm: VllmEngine, fake_vllm: FakeVllm) -> None:
    fake_vllm.answers["POST /update_weight_version"] = (401, {"error": "Unauthorized"})
    with pytest.raises(EngineDirty, match="already changed"):
        load(vllm)


# No answer


@pytest.mark.parametrize(
    "error", [httpx.ReadTimeout("slow"), httpx.RemoteProtocolError("gone"), httpx.ReadError("reset")]
)
def test_a_load_without_an_answer_is_dirty_and_not_repeated(
    vllm: VllmEngine, fake_vllm: FakeVllm, sglang: SglangEngine, fake_sglang: FakeSglang, error: Exception
) -> None:
    fake_vllm.answers["POST /collective_rpc"] = error
    fake_sglang.answers["POST /update_weights_from_disk"] = error
    for engine, fake, call in (
        (vllm, fake_vllm, "POST /collective_rpc"),
        (sglang, fake_sglang, "POST /update_weights_from_disk"),
    ):
        with pytest.raises(EngineDirty, match=r"load: POST http://engine:8000/.* half done"):
            load(engine)
        assert fake.seen.count(call) == 1


def test_a_load_that_never_left_is_harmless(vllm: VllmEngine, fake_vllm: FakeVllm) -> None:
    fake_vllm.answers["POST /collective_rpc"] = httpx.ConnectError("refused")
    with pytest.raises(EngineUnavailable):
        load(vllm)
    assert fake_vllm.seen.count("POST /collective_rpc") == vllm.options.attempts


def test_an_engine_that_dies_after_the_load_is_dirty(vllm: VllmEngine, fake_vllm: FakeVllm) -> None:
    fake_vllm.answers["POST /reset_prefix_cache"] = httpx.ConnectError("refused")
    with pytest.raises(EngineDirty, match="already changed"):
        load(vllm)


def test_reads_are_tried_again(vllm: VllmEngine, fake_vllm: FakeVllm) -> None:
    answers: Iterator[Any] = iter([httpx.ReadError("reset"), (200, {"weight_version": LABEL})])
    fake_vllm.answers["GET /weight_info"] = lambda: next(answers)
    assert vllm.status().label == LABEL


def test_a_pause_that_times_out_is_unavailable(sglang: SglangEngine, fake_sglang: FakeSglang) -> None:
    fake_sglang.answers["POST /pause_generation"] = httpx.ReadTimeout("slow")
    with pytest.raises(EngineUnavailable, match=r"pause: .* within 120 s"):
        sglang.pause()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", None])
def test_a_connection_that_breaks_or_hangs(answer: bytes | None) -> None:
    """Over a real socket: closed at once, closed within the body, and open without an answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_answer_once, args=(listener, answer))
        thread.start()
        options = VllmOptions(attempts=1, timeout=0.3)
        engine = VllmEngine(f"http://127.0.0.1:{listener.getsockname()[1]}", options)
        with pytest.raises(EngineUnavailable, match="status: GET"):
            engine.status()
        engine.close()
        thread.join(60)


def _answer_once(listener: socket.socket, answer: bytes | None) -> None:
    connection, _ = listener.accept()
    with connection:
        if connection.recv(65536) and answer is not None:
            connection.sendall(answer)
        elif answer is None:
            connection.recv(1)  # until the client has given up


def test_an_idle_connection_that_the_server_closes_makes_no_engine_dirty() -> None:
    """As when uvicorn gives up a kept-alive connection just as the next call goes out on it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_answer_first_requests_alone, args=(listener, 2))
        thread.start()
        http = EngineHttp(f"http://127.0.0.1:{listener.getsockname()[1]}", HttpOptions(attempts=1))
        with closing(http):
            assert http.send(Call(step="status", method="GET", path="/")).status == 200
            assert http.send(Call(step="load", method="POST", path="/", touch="starts")).status == 200
        thread.join(60)


def _answer_first_requests_alone(listener: socket.socket, connections: int) -> None:
    """Of each connection: it is offered to be kept, and closed as soon as a second request arrives on it."""
    listener.settimeout(60)
    for _ in range(connections):
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: keep-alive\r\n\r\n{}")
            connection.recv(65536)


# Settings that contradict themselves


@pytest.mark.parametrize("url", ["engine:8000", "ftp://engine", "http://", "http://user:secret@engine:8000"])
def test_an_url_that_cannot_be_used(url: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        VllmEngine(url)
    assert "secret" not in str(raised.value)


def test_in_place_cannot_flush() -> None:
    with pytest.raises(InvalidInput, match="cache='keep'"):
        SglangOptions(pause_mode="in_place")
    SglangOptions(pause_mode="in_place", cache="keep")


@pytest.mark.parametrize("options", [{"timeout": 0}, {"attempts": 0}, {"pause_mode": "nap"}, {"cache": "burn"}])
def test_options_out_of_range(options: dict[str, Any]) -> None:
    for kind in (VllmOptions, SglangOptions):
        with pytest.raises(InvalidInput):
            kind(**options)
