"""The gloo transport with a fault in it, and a training that changes every tensor at each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ckptsync.digest import digest
from ckptsync.errors import EngineUnavailable
from ckptsync.export.module import find_ties
from ckptsync.shards.tensors import checkpoint_tensors, spec_of, tensor_bytes
from ckptsync.transports import Gloo
from ckptsync.transports.base import SyncEngine
from ckptsync.transports.wire import Finish, content_of


class FaultyGloo(Gloo):
    """Breaks at `fault`, once, at the engine `victim` or at any. `act` runs first: a kill, say."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.fault, self.victim = "", ""
        self.act: Callable[[], object] = lambda: None
        self._buckets = 0

    def probe(self, engines: Sequence[SyncEngine]) -> str | None:
        return "no gloo today" if self._strikes("probe") else super().probe(engines)

    def _post(self, engine: SyncEngine, step: str, body: Any, answer: Any) -> Any:
        if self.victim not in engine.name:
            return super()._post(engine, step, body, answer)
        if step == "start":
            self._break("start")
            self._buckets = 0
        if step == "bucket":
            self._buckets += 1
            self._break({1: "first bucket", 2: "mid"}.get(self._buckets, ""))
        if step == "finish":
            self._break("finish")
            if self._strikes("label"):
                body = Finish("e9-v9", body.digest)
        answered = super()._post(engine, step, body, answer)
        if step == "finish" and self._strikes("lost answer"):
            raise EngineUnavailable("the answer was lost")
        return answered

    def _strikes(self, fault: str) -> bool:
        if not fault or self.fault != fault:
            return False
        self.fault = ""
        return True

    def _break(self, fault: str) -> None:
        if self._strikes(fault):
            self.act()
            raise RuntimeError(f"broke at {fault}")


def dense(folder: str, step: int) -> dict[str, torch.Tensor]:
    """The checkpoint's weights after so many steps."""
    return {name: (tensor.clone() * (1 + step / 4)) for name, tensor in checkpoint_tensors(folder)}


def trained(folder: str, step: int, ranks: int) -> dict[str, torch.Tensor]:
    """The same, sharded over the ranks of the job."""
    state = dense(folder, step)
    if ranks == 1:
        return state
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (ranks,))
    return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in state.items()}


def content_digest(folder: str, step: int) -> str:
    """What a manifest says of these weights, worked out on the side."""
    state = dense(folder, step)
    assert not find_ties(state)
    specs = {"model": [spec_of(name, tensor) for name, tensor in state.items()]}
    return content_of(specs, {}, {"model": {name: digest(tensor_bytes(tensor)) for name, tensor in state.items()}})
