"""vLLM's IPC backend, against a server that keeps its protocol; the GPUs are files."""

from __future__ import annotations

import json

import httpx
import pytest
import torch

from ckptsync.errors import EngineDirty, EngineRefused, EngineUnavailable, TransportError
from ckptsync.transports.base import Sending
from ckptsync.transports.vllm_ipc import VllmIpc
from tests.transports.receivers import FileDevices, TransferVllm, bodies
from tests.transports.sends import Small, delivery, same, send, weights
from watchers.engines.vllm import VllmEngine, VllmOptions

QUICK = VllmOptions(timeout=5.0, attempts=1)


@pytest.fixture
def server():
    return TransferVllm(["GPU-0"])


@pytest.fixture
def engine(server):
    return VllmEngine("http://127.0.0.1:1", QUICK, transport=server.transport)


@pytest.fixture
def devices(tmp_path):
    return FileDevices(str(tmp_path), "GPU-0")


@pytest.fixture
def transport(devices):
    return VllmIpc(devices=devices)


def test_every_tensor_arrives_and_the_label_comes_with_the_end(server, engine, transport, devices):
    model = Small()
    sending = send(transport, model, [engine])
    assert same(server.weights, weights(model))
    assert server.label == engine.status().label == "e1-v7"
    assert sending.touched == {engine.name}
    assert sending.phase == "finish"
    assert devices.collected == 1


def test_buckets_are_bounded_and_a_larger_tensor_has_one_to_itself(server, engine, transport):
    send(transport, Small(), [engine])
    sizes = [sum(update["tensor_sizes"]) for update in server.updates]
    assert len(sizes) > 2
    assert [size for size in sizes if size > 600] == [64 * 8 * 2]


def test_five_syncs_leave_the_version_equal_on_both_sides_after_each(server, engine, transport):
    for number in range(1, 6):
        model = Small(number)
        send(transport, model, [engine], number)
        assert server.label == f"e1-v{number}"
        assert same(server.weights, weights(model))


def test_an_engine_of_0_26_is_told_that_updates_are_packed_with_each(engine, server, transport):
    server.release = "0.26.0"
    model = Small()
    send(transport, model, [engine])
    assert bodies(server, "POST /init_weight_transfer_engine") == [{"init_info": {}}]
    assert all(update["packed"] for update in server.updates)
    assert same(server.weights, weights(model))


def test_the_label_names_no_version_while_the_engine_may_hold_a_mix(server, engine, transport):
    server.label = "e1-v6"
    seen = []
    server.answers["POST /update_weights"] = lambda: seen.append(server.label) or (500, "out of memory")
    with pytest.raises(EngineDirty):
        send(transport, Small(), [engine])
    assert set(seen) == {"partial e1-v7"}
    assert engine.status().label == "partial e1-v7"


@pytest.mark.parametrize(
    ("call", "touched", "error"),
    [
        ("POST /init_weight_transfer_engine", False, EngineRefused),
        ("GET /get_world_size", False, EngineRefused),
        ("POST /start_weight_update", True, EngineRefused),
        ("POST /update_weights", True, EngineDirty),
        ("POST /reset_prefix_cache", True, EngineDirty),
        ("POST /finish_weight_update", True, EngineDirty),
    ],
)
def test_a_failed_call_leaves_the_label_behind_and_tells_whether_the_engine_was_touched(
    server, engine, transport, devices, call, touched, error
):
    server.label = "e1-v6"
    server.answers[call] = (500, "no")
    with pytest.raises(error):
        send(transport, Small(), [engine])
    assert transport.last.touched == ({engine.name} if touched else set())
    assert server.label == ("partial e1-v7" if touched else "e1-v6")
    assert devices.collected == 1


def test_a_finish_whose_answer_is_lost_is_dirty_for_the_sender(server, engine, transport):
    def lost():
        server._finish("e1-v7")
        return httpx.ReadTimeout("lost")

    server.answers["POST /finish_weight_update"] = lost
    with pytest.raises(EngineDirty):
        send(transport, Small(), [engine])
    assert transport.last.phase == "finish"
    assert transport.last.touched == {engine.name}


def test_a_server_that_is_gone_was_not_touched(engine, server, transport):
    server.answers["GET /get_world_size"] = httpx.ConnectError("refused")
    with pytest.raises(EngineUnavailable):
        send(transport, Small(), [engine])
    assert transport.last.touched == set()


def test_a_session_that_a_dead_trainer_left_open_is_ended_first(server, engine, transport):
    server.open = True
    model = Small()
    send(transport, model, [engine])
    assert server.ended == 2
    assert server.label == "e1-v7"
    assert same(server.weights, weights(model))


def test_a_full_resend_makes_an_engine_whole_after_a_failure_in_the_middle(server, engine, transport):
    server.answers["POST /update_weights"] = (500, "no")
    with pytest.raises(EngineDirty):
        send(transport, Small(1), [engine])
    server.answers.clear()
    model = Small(2)
    send(transport, model, [engine], 8)
    assert server.label == "e1-v8"
    assert same(server.weights, weights(model))


def test_an_engine_on_another_gpu_says_which_it_was_offered(server, engine, transport):
    server.gpus = ["GPU-5"]
    with pytest.raises(EngineDirty, match="IPC handle not found for GPU UUID GPU-5"):
        send(transport, Small(), [engine])


def test_one_trainer_rank_exports_on_every_gpu_that_it_sees(server, engine, tmp_path):
    server.gpus = ["GPU-0", "GPU-1"]
    model = Small()
    send(VllmIpc(devices=FileDevices(str(tmp_path), "GPU-0", ["GPU-0", "GPU-1"])), model, [engine])
    assert same(server.weights, weights(model))


def test_a_resend_to_one_engine_finds_it_where_it_was_beside_the_others(tmp_path):
    servers = [TransferVllm(["GPU-0"]), TransferVllm(["GPU-1"])]
    engines = [VllmEngine(f"http://127.0.0.1:{at}", QUICK, transport=s.transport) for at, s in enumerate(servers, 1)]
    transport = VllmIpc(devices=FileDevices(str(tmp_path), "GPU-0", ["GPU-0", "GPU-1"]))
    assert transport.probe(engines) is None
    model = Small()
    send(transport, model, engines[1:])
    assert same(servers[1].weights, weights(model))
    assert servers[0].updates == []


def test_an_adapter_is_left_to_other_transports(engine, transport, server):
    assert transport.carries(delivery(Small(), kind="adapter")) == (
        "it carries full weights, and e1-v7 is an adapter: merge_lora=True folds it in"
    )
    assert transport.carries(delivery(Small())) is None
    with pytest.raises(TransportError, match="vllm_ipc: it carries full weights"):
        transport.send(Sending(delivery=delivery(Small(), kind="adapter"), engines=[engine]))
    assert server.seen == []


def test_probe_finds_nothing_wrong_with_the_right_server(engine, transport):
    assert transport.probe([engine]) is None


def test_probe_says_why_not(server, engine, transport, devices, monkeypatch):
    devices.why = "this trainer rank has no CUDA"
    assert transport.probe([engine]) == "this trainer rank has no CUDA"
    devices.why = None
    server.insecure = False
    assert "without VLLM_ALLOW_INSECURE_SERIALIZATION=1" in transport.probe([engine])
    server.backend = "nccl"
    assert "was started with the backend 'nccl'" in transport.probe([engine])
    away = VllmEngine("http://192.0.2.7:8000", QUICK, transport=server.transport)
    assert transport.probe([away]) == "no engine runs on this host"
    server.answers.update({"GET /server_info": (404, ""), "GET /is_paused": httpx.ConnectError("refused")})
    assert "does not answer" in transport.probe([engine])


def test_cuda_itself_is_asked_by_default():
    expected = None if torch.cuda.is_available() else "this trainer rank has no CUDA"
    assert VllmIpc()._devices.why_not() == expected


def test_an_engine_on_another_host_is_refused_before_it_is_touched(server, transport):
    away = VllmEngine("http://192.0.2.7:8000", QUICK, transport=server.transport)
    with pytest.raises(TransportError, match="on another host"):
        send(transport, Small(), [away])
    assert transport.last.touched == set()
    assert server.updates == []


def test_what_is_posted_is_json_of_the_documented_fields(server, engine, transport):
    send(transport, Small(), [engine])
    update = bodies(server, "POST /update_weights")[0]["update_info"]
    assert update.keys() == {"names", "dtype_names", "shapes", "tensor_sizes", "ipc_handles_pickled"}
    assert json.dumps(update)
