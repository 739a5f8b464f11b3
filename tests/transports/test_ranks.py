"""Colocated sends from several trainer ranks: slots, empty ranks, and one error for all."""

from __future__ import annotations

import json
from contextlib import ExitStack

import pytest

from ckptsync.ranks import Ranks
from ckptsync.transports.sglang_tensor import SglangTensor
from ckptsync.transports.vllm_ipc import VllmIpc
from tests.trainer.ranks_harness import returned, run_ranks
from tests.transports.receivers import FileDevices, TransferSglang, TransferVllm, served
from tests.transports.sends import Small, same, send, weights
from watchers.engines.sglang import SglangEngine
from watchers.engines.vllm import VllmEngine, VllmOptions

GPUS = ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
KINDS = {"vllm": (VllmIpc, VllmEngine, TransferVllm), "sglang": (SglangTensor, SglangEngine, TransferSglang)}

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def job(rank, kind, urls, folder, world):
    """Three syncs, and what was touched in the last."""
    make, adapter, _ = KINDS[kind]
    sees = GPUS if world == 1 else [GPUS[rank]]
    transport = make(devices=FileDevices(folder, GPUS[rank], sees))
    engines = [adapter(url) for url in urls]
    ranks = Ranks(timeout=60)
    try:
        for number in (1, 2, 3):
            last = send(transport, Small(number), engines, number, ranks)
        return sorted(last.touched) == sorted(engine.name for engine in engines)
    finally:
        transport.close()
        ranks.close()
        for engine in engines:
            engine.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("world", "tp"),
    [(1, [1]), (1, [2]), (2, [1]), (2, [2]), (2, [1, 1]), (4, [2, 1])],
    ids=lambda value: str(value),
)
def test_every_trainer_tp_sends_to_every_engine_tp(tmp_path, kind, world, tp):
    starts = [sum(tp[:at]) for at in range(len(tp))]
    fakes = [KINDS[kind][2](GPUS[start : start + size]) for start, size in zip(starts, tp, strict=True)]
    with ExitStack() as stack:
        urls = [stack.enter_context(served(fake)) for fake in fakes]
        outcomes = run_ranks(world, job, kind, urls, str(tmp_path), world, deadline=120)
    assert [outcome.value for outcome in outcomes] == [True] * world, outcomes
    for fake in fakes:
        assert fake.label == "e1-v3"
        assert same(fake.weights, weights(Small(3)))
        assert not fake.open


def failing(rank, urls, folder):
    """Three sends, each with what this rank was told of it."""
    transport, ranks = VllmIpc(devices=FileDevices(folder, GPUS[rank]), verify=True), Ranks(timeout=60)
    engines, told = [VllmEngine(url, VllmOptions(timeout=5.0)) for url in urls], []
    for number in (1, 2, 3):
        try:
            send(transport, Small(number), engines, number, ranks)
            told.append(sorted(transport.verification.verdicts.values()))
        except Exception as error:
            touched = sorted(transport.last.touched) == sorted(engine.name for engine in engines)
            told.append((type(error).__name__, str(error), touched))
    for engine in engines:
        engine.close()
    return told


def test_what_fails_at_one_engine_raises_the_same_on_every_rank_and_labels_none(tmp_path):
    """The second send one of them drops, with 200, and the third it refuses."""
    good, bad = TransferVllm(["GPU-0"]), TransferVllm(["GPU-1"])
    bad.answers["POST /update_weights"] = lambda: {
        "partial e1-v1": lambda: bad.answer("POST /update_weights", json.loads(bad.requests[-1].content)),
        "partial e1-v2": (200, {"message": "Weights updated"}),
        "partial e1-v3": (500, "out of memory on GPU-1"),
    }[bad.label]
    with served(good) as one, served(bad) as other:
        told = returned(run_ranks(3, failing, [one, other], str(tmp_path), deadline=120))
    assert told == [told[0]] * 3
    verified, dropped, refused = told[0]
    assert verified == [(True, "has the sums of 1 more; nothing was sent before", False)] * 2
    for (kind, words, touched), why in ((dropped, "differs from"), (refused, "out of memory on GPU-1")):
        assert (kind, why in words, touched) == ("RankFailed", True, True)
    assert {good.label, bad.label} == {"partial e1-v3"}
