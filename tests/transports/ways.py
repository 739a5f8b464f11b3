"""Every fast transport to a stock server, with a fault at each phase, and a spare of the same kind behind it."""

from __future__ import annotations

import json
import queue
from dataclasses import dataclass
from typing import Any

import httpx
import torch

from ckptsync.sync import WeightSync
from ckptsync.transports import SglangDistributed, SglangTensor, VllmIpc, VllmNccl
from ckptsync.transports.chain import Patience
from watchers.engines.sglang import SglangEngine, SglangOptions
from watchers.engines.vllm import VllmEngine, VllmOptions

from .groups import QueueGroup
from .receivers import FileDevices, TransferSglang, TransferVllm
from .sends import Small, same, weights

FAULTS = ("probe", "start", "first bucket", "mid", "finish", "label", "lost answer")
"""`label`: the end is answered well, and the label is not set. `lost answer`: all is in, and no answer comes."""

PHASE = {"probe": "probe", "start": "start", "first bucket": "bucket", "mid": "bucket", "finish": "finish",
         "label": "confirm"}  # fmt: skip
TOUCHED_AT_START = {"sglang_tensor"}
"""Its first request opens the session."""

TOUCHED = {"first bucket", "mid", "finish", "label"}


class Group(QueueGroup):
    """Made anew for each opening, as real ones are; of both protocols. On ranks that open none it stays empty."""

    def open(self, address: str, port: int, world_size: int, name: str) -> QueueGroup:
        self.sent = queue.Queue()
        return super().open(address, port, world_size, name)

    def join(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 200, {"success": True, "message": ""}

    def received(self, info: dict[str, Any]) -> dict[str, Any]:
        if "dtype_names" in info:
            return super().received(info)
        data, found, start = self.sent.get(timeout=60), {}, 0
        for name, dtype, shape in zip(info["names"], info["dtypes"], info["shapes"], strict=True):
            kind = getattr(torch, dtype)
            end = start + torch.Size(shape).numel() * kind.itemsize
            found[name], start = data[start:end].view(kind).view(shape).clone(), end
        return found


@dataclass(frozen=True)
class Calls:
    """The requests of one protocol, by phase, and the which-th of a send sets the label."""

    start: str
    bucket: str
    finish: str
    label: tuple[str, int]


class NcclOnCpu(VllmNccl):
    def why_not(self) -> str | None:
        return None

    def on_wire(self, tensors: Any) -> Any:
        return [tensor.detach().contiguous() for _, tensor in tensors]


VLLM_END = ("POST /finish_weight_update", 1)
SGLANG_END = ("POST /update_weight_version", 2)
WAYS: dict[str, tuple[Any, Calls]] = {
    "vllm_ipc": (VllmIpc, Calls("POST /init_weight_transfer_engine", "POST /update_weights", VLLM_END[0], VLLM_END)),
    "vllm_nccl": (NcclOnCpu, Calls("POST /init_weight_transfer_engine", "POST /update_weights", VLLM_END[0], VLLM_END)),
    "sglang_tensor": (
        SglangTensor,
        Calls("POST /begin_weight_update", "POST /update_weights_from_tensor", "POST /end_weight_update", SGLANG_END),
    ),
    "sglang_distributed": (
        SglangDistributed,
        Calls("POST /init_weights_update_group", "POST /update_weights_from_distributed", "POST /end_weight_update",
              SGLANG_END),
    ),
}  # fmt: skip


def a_server(way: str, gpus: list[str]) -> Any:
    vllm = way.startswith("vllm")
    server: Any = TransferVllm(gpus, "ipc" if way == "vllm_ipc" else "nccl") if vllm else TransferSglang(gpus)
    server.group = Group()
    return server


def an_engine(way: str, url: str, **more: Any) -> Any:
    if way.startswith("vllm"):
        return VllmEngine(url, VllmOptions(timeout=30.0, attempts=1), **more)
    return SglangEngine(url, SglangOptions(timeout=30.0, attempts=1), **more)


def transports(
    way: str, group: Any, devices: FileDevices, gpus: dict[str, list[str]] | None = None, *, verify: bool = False
) -> tuple[Any, Any]:
    """The one that breaks, and its spare."""
    make = WAYS[way][0]
    options: dict[str, Any] = (
        {"devices": devices, "gpus": gpus} if way in ("vllm_ipc", "sglang_tensor") else {"open_group": group.open}
    )
    if way == "sglang_distributed":
        options["backend"] = "gloo"

    class Fast(make):  # type: ignore[misc, valid-type]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.no: list[str] = []

        def probe(self, engines: Any) -> str | None:
            return self.no.pop() if self.no else super().probe(engines)

    class Spare(make):  # type: ignore[misc, valid-type]
        name, found = "spare", None

        def look(self) -> Any: ...

        def send(self, sending: Any) -> None:
            self.found = self.look()
            super().send(sending)

    return Fast(**options, verify=verify), Spare(**options)


class Trap:
    """Stands before one route. At the `at`-th call it does what the fault is; else the server answers."""

    def __init__(self, server: Any, call: str, at: int, fault: str) -> None:
        self.server, self.call, self.at, self.fault = server, call, at, fault
        self.calls = 0

    def __call__(self) -> Any:
        self.calls += 1
        body, label = json.loads(self.server.requests[-1].content or b"{}"), self.server.label
        if self.calls != self.at:
            return self.server.answer(self.call, body)
        if self.fault not in ("label", "lost answer"):
            return 500, {"success": False, "message": f"broke at {self.fault}"}
        answer = self.server.answer(self.call, body)
        if self.fault == "label":
            self.server.label = label
            return answer
        return httpx.ReadTimeout("the answer was lost")


def set_trap(way: str, fault: str, server: Any, fast: Any) -> None:
    """The next send by `fast` meets the fault, once."""
    calls = WAYS[way][1]
    call, at = {
        "start": (calls.start, 1), "first bucket": (calls.bucket, 1), "mid": (calls.bucket, 2),
        "finish": (calls.finish, 1), "label": calls.label, "lost answer": calls.label,
    }[fault]  # fmt: skip
    if fault == "start":
        fast.close()  # a group that has to be made anew is asked for again
    server.answers[call] = Trap(server, call, at, fault)


def after_fault(way: str, fault: str, server: Any, engine: Any, devices: FileDevices, root: str, **more: Any) -> Any:
    """A sync that works, and one with the fault. What this rank was told; and, where the server is, what it holds."""
    fast, spare = transports(way, server.group if server else Group(), devices, **more)
    options: dict[str, Any] = {"patience": Patience(tries=1), "bucket_bytes": 600, "timeout": 60}
    with WeightSync([fast, spare], channel=root, engines=[engine], **options) as sync:
        if fault == "probe":  # asked once, before the first
            fast.no += ["not today"] * (server is not None)
        before = sync.sync(Small(1)) if fault != "probe" else None
        if server is not None:
            spare.look = lambda: (server.label, server.paused)
            if fault != "probe":
                set_trap(way, fault, server, fast)
        done = sync.sync(Small(2))
        told = {
            "before": (before.transport, before.version.label) if before else None,
            "result": (done.transport, done.version.label, done.behind, done.dirty, sync.version == done.version),
            "failures": [(f.transport, f.phase, bool(f.touched)) for f in done.failures],
        }
    if server is None:
        return told
    holds = (server.label, server.paused, same(server.weights, weights(Small(2))))
    return told | {"server": holds, "when the spare came": spare.found}
