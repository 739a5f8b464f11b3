"""LoRA adapters to SGLang by value: `/load_lora_adapter_from_tensors`, colocated or remote, at any TP.

Each version is an adapter of its own name, `policy@e1-v7`, so the identity travels in the same call as the data,
nothing is ever mixed, and no pause is needed: what fails to load leaves the adapters before it as they were.

By value and not by handle: SGLang keeps adapters in host memory (0.5.23: `loaded_weight.cpu()`), so that a handle saves
nothing, and a one-shot handle, such as a file descriptor, is dead for every TP rank but the first that opens it. An
adapter is one call, so it is one bucket, whatever its size. vLLM (0.32) takes an adapter from a folder only, by a
`LoRARequest` with a path: give it files, or full weights with the adapter folded in (`merge_lora=True`), which every
fast transport carries.
"""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from ..engine_http import Call
from ..shards.tensors import tensor_bytes
from ..version import VersionId
from .base import Delivery, Sending, SyncEngine
from .packing import Named, arranged, layout_of, pack
from .receivers import HttpEngine, at_once, check_carried
from .sglang_receiver import SglangReceiver
from .sglang_tensor import described

FORMAT = "flattened_bucket"
NEEDS = "It needs SGLang started with --enable-lora, --max-lora-rank and --lora-target-modules."


@runtime_checkable
class AdapterServer(HttpEngine, Protocol):
    """One replica, such as `SglangEngine`."""

    def adapters(self) -> Any:
        """By name, those that it lists."""
        ...


@runtime_checkable
class AdapterReplicas(Protocol):
    """An engine that is followed for adapters: `watchers.adapters.AdapterEngine`."""

    @property
    def name(self) -> str: ...

    @property
    def replicas(self) -> Sequence[Any]:
        """`AdapterServer`s."""
        ...

    def adapter_name(self, label: str) -> str:
        """What requests ask for."""
        ...

    def retire(self, version: VersionId) -> None:
        """Unload what lies too far before `version`."""
        ...


class SglangLora:
    """Engines are `AdapterEngine`s over `SglangEngine`s. They report the newest adapter that they list: to go back by
    value, unload the newer ones first.

    `verify`: SGLang compares sha256 of every tensor on every rank with the trainer's. One that differs ends the server.
    """

    name = "sglang_lora"
    pauses = True

    def __init__(self, *, verify: bool = False) -> None:
        self._verify = verify

    def carries(self, delivery: Delivery) -> str | None:
        return None if delivery.kind == "adapter" else f"it carries adapters, and {delivery.label} is full weights"

    def probe(self, engines: Sequence[SyncEngine]) -> str | None:
        """No adapter engine, no SGLang, one without LoRA, or with data-parallel ranks, which adapters do not reach."""
        for engine in engines:
            if not isinstance(engine, AdapterReplicas):
                return f"{engine.name} is not followed for adapters: use AdapterEngine"
            if why := next((why for each in engine.replicas if (why := _why_not(each))), None):
                return why
        return None

    def send(self, sending: Sending) -> None:
        """No engine is marked as touched: each holds either all of the adapter or nothing of it."""
        delivery = sending.delivery
        check_carried(self.carries(delivery), self.name)
        engines = [engine for engine in sending.engines if isinstance(engine, AdapterReplicas)]
        sending.enter("bucket")
        for tensors in _whole(delivery):
            works = self._loads(engines, arranged(tensors), delivery) if sending.is_sender else []
            sending.ranks.run(partial(at_once, works), "an adapter")
        sending.ranks.agree()
        sending.enter("finish")
        for engine in engines if sending.is_sender else ():
            engine.retire(delivery.version)

    def close(self) -> None:
        """Nothing is held."""

    def _loads(
        self, engines: Sequence[AdapterReplicas], tensors: Sequence[Named], delivery: Delivery
    ) -> list[Callable[[], None]]:
        body: dict[str, Any] = {"config_dict": json.loads(delivery.adapter_config or b"{}"), "load_format": FORMAT}
        if self._verify:
            body["expected_checksums"] = {name: _sha256(tensor) for name, tensor in tensors}
        load = partial(_load, body=body, payload=_by_value(tensors))
        return [
            partial(load, each, engine.adapter_name(delivery.label)) for engine in engines for each in engine.replicas
        ]


def _whole(delivery: Delivery) -> Iterator[list[Named]]:
    """Collective. The adapter, in one bucket."""
    for bucket in replace(delivery, bucket_bytes=max(delivery.bucket_bytes, delivery.nbytes)).buckets():
        yield bucket.tensors
        del bucket


def _why_not(replica: object) -> str | None:
    if not isinstance(replica, AdapterServer):
        return f"{getattr(replica, 'name', replica)} is not reached over HTTP"
    info = replica.http.peek("/server_info")
    if not isinstance(info, dict) or "tp_size" not in info:
        return f"{replica.name} does not answer as SGLang does; vLLM takes adapters from files, or merge_lora=True"
    if info.get("enable_lora") is False:
        return f"{replica.name} was started without --enable-lora"
    size = info.get("dp_size", 1)
    return f"{replica.name} runs with dp_size={size}, which adapters do not reach" if size != 1 else None


def _load(replica: AdapterServer, name: str, *, body: Mapping[str, Any], payload: str) -> None:
    """Unless it has it already: by a send whose answer was lost, or that failed at another replica."""
    if name in replica.adapters():
        return
    ranks = SglangReceiver(replica).world_size()
    call = Call(
        step="load adapter", method="POST", path="/load_lora_adapter_from_tensors", admin=True, remedy=NEEDS,
        json={**body, "lora_name": name, "serialized_named_tensors": [payload] * ranks},
        timeout=replica.http.options.load_timeout(len(payload) * ranks),
    )  # fmt: skip
    replica.http.expect(call, success=True)


def _by_value(tensors: Sequence[Named]) -> str:
    """What each TP rank opens, base64: a plain pickle, whose storage is bytes and no handle."""
    layout = layout_of(tensors)
    flat = torch.empty(layout.nbytes, dtype=torch.uint8)
    pack(tensors, flat)
    return base64.b64encode(pickle.dumps({"flattened_tensor": flat, "metadata": described(layout)})).decode()


def _sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor_bytes(tensor.detach().cpu())).hexdigest()
