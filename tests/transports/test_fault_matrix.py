"""Each fast transport to a stock server x a fault at each phase: who is dirty, who takes over, what is held then."""

from __future__ import annotations

import itertools
import os
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptsync.channel import Channel
from ckptsync.errors import CkptSyncError, StoreUnavailable
from ckptsync.publish import Publisher
from ckptsync.ranks import Ranks
from ckptsync.store import open_store
from ckptsync.sync import WeightSync
from ckptsync.testing.hooks import Failing, HookedStore, matching
from ckptsync.transports import Checkpoint, ModuleCopy
from ckptsync.transports.chain import Patience
from ckptsync.transports.targets import Targets
from tests.trainer.ranks_harness import returned, run_ranks
from watchers.engines.module import ModuleEngine

from .fakes import Box
from .jobs import a_sync
from .receivers import FileDevices, served
from .sends import Small, same, weights
from .ways import FAULTS, PHASE, TOUCHED, TOUCHED_AT_START, WAYS, Group, a_server, after_fault, an_engine, transports


def check(told: dict[str, Any], way: str, fault: str) -> None:
    lost, touched = fault == "lost answer", fault in TOUCHED or (fault == "start" and way in TOUCHED_AT_START)
    old, new = ("default", "e1-v1") if fault == "probe" else ("e1-v1", "e1-v2")
    assert told["before"] == (None if fault == "probe" else (way, old))
    assert told["result"] == (way if lost else "spare", new, {}, (), True)
    assert told["failures"] == ([] if lost else [(way, PHASE[fault], touched)])
    assert told["server"] == (new, False, True), "held and served in the end is what was trained"
    label = f"partial {new}" if touched else old
    assert told["when the spare came"] == (None if lost else (label, True)), "no version's label before its data"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("way", WAYS)
def test_after_a_fault_the_next_transport_makes_the_engine_whole(way: str, fault: str, tmp_path: Any) -> None:
    server = a_server(way, ["GPU-0"])
    engine = an_engine(way, "http://127.0.0.1:1", transport=server.transport)
    devices = FileDevices(str(tmp_path), "GPU-0")
    check(after_fault(way, fault, server, engine, devices, str(tmp_path / "root")), way, fault)


class Copying(ModuleCopy):
    """Breaks once, at `fault`."""

    fault = ""

    def probe(self, engines: Any) -> str | None:
        return "not today" if self.fault == "probe" else super().probe(engines)

    def send(self, sending: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            at = {"first bucket": 1, "mid": 2}.get(self.fault, 0)
            copies, copy = itertools.count(1), Targets.copy
            patch.setattr(Targets, "copy", lambda *of: 1 / 0 if next(copies) == at else copy(*of))
            if self.fault in ("start", "finish"):
                patch.setattr(
                    Targets, {"start": "__init__", "finish": "check_complete"}[self.fault], lambda *_, **__: 1 / 0
                )
            if self.fault == "label":
                patch.setattr(ModuleEngine, "hold", lambda *_: None)
            super().send(sending)


@pytest.mark.parametrize("fault", FAULTS[:-1])
def test_after_a_fault_of_a_copy_the_next_transport_makes_the_sibling_whole(fault: str, tmp_path: Any) -> None:
    engine, fast, spare = ModuleEngine(Small()), Copying(), ModuleCopy()
    spare.name = "spare"
    options: dict[str, Any] = {"patience": Patience(tries=1), "bucket_bytes": 600}
    with WeightSync([fast, spare], channel=str(tmp_path), engines=[engine], **options) as sync:
        fast.fault = fault
        done = sync.sync(Small(2))
        assert [(f.transport, f.phase, bool(f.touched)) for f in done.failures] == [
            ("module", PHASE[fault], fault in TOUCHED)
        ]
        assert (done.transport, engine.version(), engine.status().paused) == ("spare", done.version, False)
    assert same(weights(engine.module), weights(Small(2)))


OF_A_STORE = {
    "start": {"before": matching("write", suffix=".safetensors")},
    "first bucket": {"before": matching("append", suffix=".safetensors")},
    "finish": {"before": matching("commit", suffix=".safetensors")},
    "label": {"before": matching("create", part="manifest")},
    "lost answer": {"after": matching("create", part="manifest")},
}


@pytest.mark.parametrize("fault", OF_A_STORE)
def test_a_store_that_fails_once_touches_no_engine_and_the_same_version_gets_its_files(
    fault: str, tmp_path: Any
) -> None:
    ((when, picks),) = OF_A_STORE[fault].items()
    failing = Failing(lambda: StoreUnavailable("no answer"), picks, times=1)
    store, box = HookedStore(open_store(str(tmp_path / "root")), **{when: failing}), Box("a")
    with a_sync(store, [Checkpoint()], [box]) as sync:
        done = sync.sync(Small(2))
    assert failing.times == 0
    assert (done.transport, str(done.version), done.dirty, box.paused) == ("checkpoint", "e1-v1", (), False)
    (version,) = Channel.open(str(tmp_path / "root")).versions()
    with Publisher(str(tmp_path / "other"), dtype=torch.bfloat16) as publisher:
        assert (
            publisher.publish(Small(2)).content_digest == Channel.open(str(tmp_path / "root")).latest().content_digest
        )
    assert version == done.version


ON_RANKS = ("vllm_ipc", "sglang_distributed")
"""A colocated one and one over a group."""


def on_ranks(rank: int, folder: str) -> dict[str, Any]:
    """From two ranks. The server is beside rank 0; colocated, it computes on rank 1's GPU."""
    told, ranks, devices = {}, Ranks(timeout=60), FileDevices(folder, f"GPU-{rank}")
    for way, fault in itertools.product(ON_RANKS, FAULTS):
        with ExitStack() as stack:
            server = a_server(way, ["GPU-1"]) if rank == 0 else None
            url = ranks.broadcast(stack.enter_context(served(server)) if server else "")
            engine = stack.enter_context(closing(an_engine(way, url)))
            gpus = {engine.name: ["GPU-1"]}
            root = f"{folder}/{way}-{fault}"
            told[way, fault] = after_fault(way, fault, server, engine, devices, root, gpus=gpus)
    told["refused"] = refused(rank, folder, ranks)
    ranks.close()
    return told


def refused(rank: int, folder: str, ranks: Ranks) -> list[Any]:
    """What must not be sent, and what was asked of the server besides looks."""
    server, said = a_server("vllm_ipc", ["GPU-1"]) if rank == 0 else None, []
    with ExitStack() as stack:
        if server:
            server.root = os.path.join(folder, "model")
            os.mkdir(server.root)
            save_file(weights(Small()), f"{server.root}/model.safetensors")
        engine = an_engine("vllm_ipc", ranks.broadcast(stack.enter_context(served(server)) if server else ""))
        fast, _ = transports("vllm_ipc", Group(), FileDevices(folder, f"GPU-{rank}"), {engine.name: ["GPU-1"]})
        stack.callback(engine.close)
        with WeightSync([fast], channel=f"{folder}/refused", engines=[engine], timeout=60) as sync:
            for model, label in ((Small().float(), "default"), (Small(), "e5-v1")):
                if server:
                    server.label = label
                try:
                    sync.sync(model)
                except CkptSyncError as error:
                    said.append((error.kind, str(error).replace(engine.name, "it")))
    return [*said, [call for call in server.seen if call.startswith("POST")] if server else []]


@pytest.mark.distributed
@pytest.mark.slow
def test_after_a_fault_every_rank_returns_the_same(tmp_path: Any) -> None:
    zero, one = returned(run_ranks(2, on_ranks, str(tmp_path), deadline=240))
    assert zero["refused"] == one.pop("refused")
    mismatch, order, posted = zero.pop("refused")
    assert mismatch[0] == "schema-mismatch"
    assert mismatch[1].startswith("e1-v1 does not fit it: 8 of another dtype (embed F32 but the engine has BF16")
    assert order[0] == "out-of-order"
    assert order[1].startswith("e1-v1 is not newer than e5-v1, which it holds")
    assert posted == [], "it was looked at, and not paused"
    for (way, fault), told in zero.items():
        check(told, way, fault)
        assert one[way, fault] == {key: told[key] for key in ("before", "result", "failures")}, (way, fault)
