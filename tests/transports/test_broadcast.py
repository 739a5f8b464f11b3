"""The transports over a group: vLLM's protocol with a queue for NCCL, SGLang's over a real gloo group."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from ckptsync.errors import EngineDirty, EngineRefused, TransportFailed, TransportUnavailable
from ckptsync.transports import broadcast
from ckptsync.transports.sglang_distributed import SglangDistributed
from ckptsync.transports.vllm_nccl import VllmNccl
from tests.transports.groups import GlooRank, QueueGroup
from tests.transports.receivers import TransferSglang, TransferVllm, bodies
from tests.transports.sends import Small, same, send, weights
from watchers.engines.sglang import SglangEngine, SglangOptions
from watchers.engines.vllm import VllmEngine, VllmOptions


class OnCpu(VllmNccl):
    def on_wire(self, tensors):
        return [tensor.detach().contiguous() for _, tensor in tensors]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(broadcast, "GRACE_SECONDS", 0.3)
    monkeypatch.setattr(broadcast, "RENDEZVOUS_SECONDS", 20.0)


@pytest.fixture
def group():
    return QueueGroup()


@pytest.fixture
def server(group):
    fake = TransferVllm(["GPU-1", "GPU-2"], backend="nccl")
    fake.group = group
    return fake


@pytest.fixture
def engine(server):
    options = VllmOptions(timeout=0.5, attempts=1)
    return VllmEngine("http://127.0.0.1:1", options, transport=server.transport)


@pytest.fixture
def transport(group):
    made = OnCpu(open_group=group.open)
    yield made
    made.close()


def test_every_tensor_arrives_over_the_group_and_the_label_with_the_end(server, engine, transport):
    model = Small()
    send(transport, model, [engine])
    assert same(server.weights, weights(model))
    assert server.label == "e1-v7"


def test_the_group_has_rank_0_and_every_rank_of_the_engine_and_is_kept(server, engine, transport, group):
    for number in (1, 2, 3):
        send(transport, Small(number), [engine], number)
    ((address, port, world_size, _),) = group.opened
    assert world_size == 3
    assert address == "127.0.0.1"
    (told,) = bodies(server, "POST /init_weight_transfer_engine")
    assert told["init_info"] == {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": 3}
    assert server.label == "e1-v3"
    assert same(server.weights, weights(Small(3)))


def test_a_restarted_engine_is_given_a_new_group(server, engine, transport, group):
    send(transport, Small(), [engine])
    server.restart()
    send(transport, Small(), [engine], 8)
    assert len(group.opened) == 2
    assert group.aborted == 1
    assert server.label == "e1-v8"


def test_an_error_of_the_engine_ends_a_broadcast_that_nobody_takes(server, engine, transport, group):
    group.release = threading.Event()
    server.answers["POST /update_weights"] = (500, "CUDA out of memory")
    start = time.monotonic()
    with pytest.raises(EngineDirty, match="CUDA out of memory"):
        send(transport, Small(), [engine])
    assert time.monotonic() - start < 10
    assert group.aborted == 1
    assert engine.status().label == "partial e1-v7"
    assert transport.last.touched == {engine.name}
    group.release.set()


def test_an_engine_that_never_answers_is_given_up_after_a_while(server, engine, transport, group, monkeypatch):
    group.release = threading.Event()
    hold = threading.Event()
    server.answers["POST /update_weights"] = lambda: hold.wait(60) and (500, "late")
    monkeypatch.setattr(VllmOptions, "load_timeout", lambda self, _: 0.3)
    with pytest.raises((TransportFailed, EngineDirty)):
        send(transport, Small(), [engine])
    assert group.aborted == 1
    hold.set()
    group.release.set()


def test_a_group_that_does_not_come_about_leaves_the_engine_untouched(server, engine, transport, monkeypatch):
    monkeypatch.setattr(broadcast, "RENDEZVOUS_SECONDS", 0.3)
    hold = threading.Event()
    server.answers["POST /init_weight_transfer_engine"] = lambda: hold.wait(60) and (500, "late")
    with pytest.raises(TransportUnavailable, match="to join the group"):
        send(transport, Small(), [engine])
    assert transport.last.touched == set()
    hold.set()


@pytest.mark.parametrize(
    ("call", "touched", "error"),
    [
        ("POST /init_weight_transfer_engine", False, EngineRefused),
        ("POST /start_weight_update", True, EngineRefused),
        ("POST /update_weights", True, EngineDirty),
        ("POST /finish_weight_update", True, EngineDirty),
    ],
)
def test_a_fault_at_each_phase_tells_what_was_touched_and_never_advances_the_label(
    server, engine, transport, call, touched, error
):
    server.label = "e1-v6"
    server.answers[call] = (500, "no")
    with pytest.raises(error):
        send(transport, Small(), [engine])
    assert transport.last.touched == ({engine.name} if touched else set())
    assert server.label == ("partial e1-v7" if touched else "e1-v6")


def test_after_a_failure_the_same_transport_makes_the_engine_whole(server, engine, transport, group):
    server.answers["POST /update_weights"] = httpx.ReadTimeout("late")
    with pytest.raises(EngineDirty):
        send(transport, Small(), [engine])
    server.answers.clear()
    while not group.sent.empty():
        group.sent.get()
    model = Small(5)
    send(transport, model, [engine], 8)
    assert server.label == "e1-v8"
    assert same(server.weights, weights(model))
    assert len(group.opened) == 2


def test_vllm_nccl_says_why_it_cannot_be_used_without_cuda(engine):
    assert VllmNccl().probe([engine]) == "this trainer rank has no CUDA with NCCL"


@pytest.fixture
def gloo():
    rank = GlooRank()
    yield rank
    rank.kill()


@pytest.fixture
def sglang(gloo):
    fake = TransferSglang(["cpu"])
    fake.group = gloo
    return fake


@pytest.mark.slow
def test_sglang_takes_flattened_buckets_over_a_real_gloo_group(sglang):
    engine = SglangEngine("http://127.0.0.1:1", SglangOptions(timeout=20.0), transport=sglang.transport)
    transport = SglangDistributed(backend="gloo")
    try:
        assert transport.probe([engine]) is None
        for number in (1, 2):
            model = Small(number)
            send(transport, model, [engine], number)
            assert same(sglang.weights, weights(model))
            assert sglang.label == f"e1-v{number}"
    finally:
        transport.close()


@pytest.mark.slow
def test_an_engine_rank_that_is_killed_ends_the_send_and_leaves_it_dirty(sglang, gloo):
    engine = SglangEngine("http://127.0.0.1:1", SglangOptions(timeout=5.0), transport=sglang.transport)
    transport = SglangDistributed(backend="gloo")
    try:
        send(transport, Small(1), [engine], 1)
        sglang.answers["POST /update_weights_from_distributed"] = lambda: gloo.kill() or httpx.ReadError("reset")
        with pytest.raises(EngineDirty):
            send(transport, Small(2), [engine], 2)
        assert sglang.label == "partial e1-v2"
        assert transport.last.touched == {engine.name}
    finally:
        transport.close()
