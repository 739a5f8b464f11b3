"""What the chain's tests run, on one rank in the test's own process or on several in gloo ranks."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from typing import Any

import psutil
import torch

from ckptsync.errors import CkptSyncError, EngineUnavailable
from ckptsync.sync import WeightSync
from ckptsync.transports import Checkpoint, Gloo
from ckptsync.transports.chain import Patience
from tests.trainer.models import TinyModel, reference, shard
from tests.waiting import until
from watchers.engines.embedded import EmbeddedEngine

from .fakes import PHASES, Box, Carrier
from .faulty import trained

QUICK = Patience(tries=2, wait=0.01, bench_after=2, bench_seconds=3600.0)


def model_of(rank: int, ranks: int) -> torch.nn.Module:
    return shard(TinyModel()) if ranks > 1 else TinyModel()


def a_sync(root: str, transports: list[Any], engines: list[Any], **options: Any) -> WeightSync:
    return WeightSync(
        transports, channel=root, engines=engines, patience=options.pop("patience", QUICK), bucket_bytes=1500,
        timeout=60, dtype=torch.bfloat16, **options,
    )  # fmt: skip


def holds(box: Box) -> bool:
    """Whether it holds exactly the trained model, bit for bit."""
    expected = reference(TinyModel(), torch.bfloat16)
    ties = {"head.weight"}
    found = {name.removeprefix("model/"): tensor for name, tensor in box.weights.items()}
    return found.keys() == expected.keys() - ties and all(torch.equal(found[n], expected[n]) for n in found)


def each_fault(rank: int, ranks: int, root: str) -> dict[str, dict[str, Any]]:
    """Every fault with a second transport behind the one that breaks."""
    model, told = model_of(rank, ranks), {}
    for fault in PHASES:
        boxes, fast, spare = [Box("a"), Box("b")], Carrier(fault=fault), Carrier("spare")
        with a_sync(f"{root}/{fault}", [fast, spare], boxes) as sync:
            done = sync.sync(model, step=7)
        told[fault] = {
            "result": (str(done.version), done.transport, done.confirmed, done.dirty, str(sync.version)),
            "failures": [(f.transport, f.phase, f.touched) for f in done.failures],
            "resent to": spare.sent_to,
            "boxes": [(holds(box), box.label, box.paused) for box in boxes] if rank == 0 else None,
        }
    return told


def nothing_left(rank: int, ranks: int, root: str) -> dict[str, dict[str, Any]]:
    """Every fault with no transport behind: the same error on every rank; then one that works."""
    model, told = model_of(rank, ranks), {}
    for fault in ("probe", "start", "first bucket", "mid", "finish", "label"):
        boxes, fast = [Box("a"), Box("b")], Carrier(fault=fault)
        with a_sync(f"{root}/{fault}", [fast], boxes) as sync:
            error, left = "", None
            try:
                sync.sync(model, step=7)
            except CkptSyncError as caught:
                error, left = f"{caught.kind}: {caught}", [(box.paused, box.label) for box in boxes]
            again = sync.sync(model, step=8)
            told[fault] = {
                "error": error, "left": left if rank == 0 else None, "again": (str(again.version), again.confirmed),
                "boxes": [(holds(box), box.label, box.paused) for box in boxes] if rank == 0 else None,
            }  # fmt: skip
    return told


def a_rank_fails(rank: int, ranks: int, root: str) -> dict[str, Any]:
    """The last rank fails in mid-send, while rank 0 talks to the engines."""
    boxes, fast, spare = [Box("a")], Carrier(fault="mid", bad=ranks - 1), Carrier("spare")
    with a_sync(root, [fast, spare], boxes) as sync:
        done = sync.sync(model_of(rank, ranks), step=1)
    failures = [(f.transport, f.phase, f.touched, f.message) for f in done.failures]
    return {"transport": done.transport, "failures": failures, "boxes": holds(boxes[0]) if rank == 0 else None}


def transient(rank: int, ranks: int, root: str) -> dict[str, Any]:
    """Fails once in a way that passes: the same transport again, whose resend is complete."""
    boxes, fast, spare = [Box("a")], Carrier(fault="mid", error=EngineUnavailable), Carrier("spare")
    with a_sync(root, [fast, spare], boxes) as sync:
        done = sync.sync(model_of(rank, ranks), step=1)
    return {"transport": done.transport, "tries": len(fast.sent_to), "failures": len(done.failures),
            "boxes": (holds(boxes[0]), boxes[0].paused) if rank == 0 else None}  # fmt: skip


def a_rank_dies(rank: int, ranks: int, root: str) -> dict[str, Any]:
    """The last rank is gone in mid-send, or before anything was touched; rank 0 tells how it left the engines."""
    boxes = [Box("a"), Box("b")]
    dying = Carrier(fault=root.rpartition("-")[2], bad=ranks - 1, error=lambda _: os._exit(9))
    with a_sync(root, [dying, Carrier("spare")], boxes) as sync:
        try:
            sync.sync(model_of(rank, ranks), step=1)
        except CkptSyncError as error:
            return {"kind": error.kind, "paused": [box.paused for box in boxes]}
    return {}


class Frozen(Gloo):
    """Stops the server's process at the second bucket, and gives it no more than a second then."""

    process = 0

    def _post(self, engine: Any, step: str, body: Any, answer: Any) -> Any:
        engine.asked.append(step)
        if step == "bucket" and self.process and engine.asked.count("bucket") == 2:
            engine.freeze(self.process)
            self._seconds = 1.0
        return super()._post(engine, step, body, answer)


class Counted(EmbeddedEngine):
    """Remembers what it was asked. `freeze`: a process that is stopped accepts connections, and answers none."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.asked: list[str] = []

    def freeze(self, process: int) -> None:
        os.kill(process, signal.SIGSTOP)
        until(lambda: psutil.Process(process).status() == psutil.STATUS_STOPPED)
        self.timeout = 1.0

    def thaw(self, process: int) -> None:
        os.kill(process, signal.SIGCONT)
        self.timeout = 60.0
        self.status()  # is awake before anybody counts seconds
        self.asked.clear()

    def _ask(self, method: str, path: str, *arguments: Any, **options: Any) -> Any:
        self.asked.append(path.strip("/"))
        return super()._ask(method, path, *arguments, **options)


def frozen(rank: int, ranks: int, root: str, url: str, process: int, model: str) -> list[dict[str, Any]]:
    """Its server is stopped twice: between syncs, for two of them, and in the middle of a send."""
    gloo, engine, told = Frozen(), Counted(url), []
    with closing(engine), a_sync(root, [gloo, Checkpoint(wait=0.5)], [engine], patience=Patience()) as sync:

        def step(number: int) -> None:
            engine.asked.clear()
            done = sync.sync(trained(model, number, ranks), step=number)
            told.append({
                "by": done.transport, "failures": [(f.transport, f.phase, bool(f.touched)) for f in done.failures],
                "confirmed": len(done.confirmed), "dirty": len(done.dirty), "behind": list(done.behind.values()),
                "asked": list(engine.asked) if rank == 0 else None,
            })  # fmt: skip

        step(1)
        if rank == 0:
            engine.freeze(process)
        step(2)
        step(3)
        if rank == 0:
            engine.thaw(process)
        step(4)
        gloo.process = process
        step(5)
        if rank == 0:
            engine.thaw(process)
            told[-1]["left"] = engine.status()
    return told
