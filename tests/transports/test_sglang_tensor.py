"""SGLang's colocated path, against a server that keeps its sessions and opens what it is sent as SGLang does."""

from __future__ import annotations

import httpx
import pytest

from ckptsync.errors import EngineDirty, EngineRefused
from ckptsync.transports.sglang_tensor import SglangTensor
from tests.transports.receivers import FileDevices, TransferSglang
from tests.transports.sends import Small, same, send, weights
from watchers.engines.sglang import SglangEngine, SglangOptions

QUICK = SglangOptions(timeout=5.0, attempts=1)


@pytest.fixture
def server():
    return TransferSglang(["GPU-0"])


@pytest.fixture
def engine(server):
    return SglangEngine("http://127.0.0.1:1", QUICK, transport=server.transport)


@pytest.fixture
def transport(tmp_path):
    return SglangTensor(devices=FileDevices(str(tmp_path), "GPU-0", ["GPU-0", "GPU-1"]))


def test_every_tensor_arrives_inside_one_session_and_the_label_comes_after_its_end(server, engine, transport):
    model = Small()
    send(transport, model, [engine])
    assert same(server.weights, weights(model))
    assert server.label == "e1-v7"
    assert not server.open
    tail = [call for call in server.seen if call.startswith("POST")][-3:]
    assert tail == ["POST /end_weight_update", "POST /flush_cache", "POST /update_weight_version"]


def test_no_bucket_flushes_and_none_carries_the_label(server, engine, transport):
    send(transport, Small(), [engine])
    assert all(not update["flush_cache"] and "weight_version" not in update for update in server.updates)


def test_each_tp_rank_is_sent_the_handle_of_its_own_gpu(server, engine, transport):
    server.gpus = ["GPU-0", "GPU-1"]
    model = Small()
    send(transport, model, [engine])
    assert same(server.weights, weights(model))


@pytest.mark.parametrize("call", ["/update_weights_from_tensor", "/end_weight_update"])
@pytest.mark.parametrize(
    "answer",
    [(400, {"success": False, "message": "no"}), (200, {"success": False}), httpx.ReadTimeout("late")],
    ids=["refused", "200 without success", "timed out"],
)
def test_a_failed_or_timed_out_post_never_leaves_a_version_as_the_label(server, engine, transport, call, answer):
    server.label = "e1-v6"
    server.answers[f"POST {call}"] = answer
    with pytest.raises(EngineDirty):
        send(transport, Small(), [engine])
    assert engine.status().label == "partial e1-v7"
    assert transport.last.touched == {engine.name}


def test_a_session_that_cannot_be_opened_is_refused(server, engine, transport):
    server.answers["POST /begin_weight_update"] = (400, {"success": False, "message": "no"})
    with pytest.raises(EngineRefused, match="begin"):
        send(transport, Small(), [engine])


def test_a_session_that_a_dead_trainer_left_open_is_ended_first(server, engine, transport):
    server.open = True
    model = Small()
    send(transport, model, [engine])
    assert same(server.weights, weights(model))
    assert server.label == "e1-v7"


def test_an_engine_that_keeps_its_caches_is_not_flushed(server, transport):
    kept = SglangOptions(pause_mode="in_place", cache="keep")
    send(transport, Small(), [SglangEngine("http://127.0.0.1:1", kept, transport=server.transport)])
    assert "POST /flush_cache" not in server.seen
    assert server.label == "e1-v7"


def test_probe_refuses_what_updates_do_not_reach(server, engine, transport):
    assert transport.probe([engine]) is None
    server.answers["GET /server_info"] = (200, {"dp_size": 2, "random_seed": 1})
    assert "with dp_size=2" in transport.probe([engine])
