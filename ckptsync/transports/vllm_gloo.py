"""vLLM's NCCL protocol over gloo, into a vLLM that has ckptsync's plugin: trainer and engine on CPUs.

`vllm serve … --weight-transfer-config '{"backend": "ckptsync"}'` with `VLLM_SERVER_DEV_MODE=1`. The same server loads
from files, by a watcher of the kind `vllm-plugin`. Tensor by tensor, as by `vllm_nccl`; at the end the engine is told
that this was all, so that a version that lacks something is refused before it has a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from .broadcast import RENDEZVOUS_SECONDS, Broadcasting, Group
from .packing import Named
from .pair import Pair
from .receivers import HttpEngine, Layout
from .vllm_nccl import VllmNcclReceiver

ALL = Layout([], [], [], [])


class VllmGlooReceiver(VllmNcclReceiver):
    """One vLLM server with the backend `ckptsync`."""

    backend = "ckptsync"

    def finish(self, label: str) -> None:
        self.update(ALL, ())
        super().finish(label)


class VllmGloo(Broadcasting[VllmGlooReceiver]):
    """See the module's docstring, and `Broadcasting` for its arguments."""

    name = "vllm_gloo"

    def why_not(self) -> str | None:
        return None

    def receiver(self, engine: HttpEngine) -> VllmGlooReceiver:
        return VllmGlooReceiver(engine)

    def open_group(self, address: str, port: int, world_size: int, _name: str) -> Group:
        return GlooGroup(address, port, world_size)

    def on_wire(self, tensors: Sequence[Named]) -> list[torch.Tensor]:
        return [tensor.detach().cpu().contiguous() for _, tensor in tensors]


class GlooGroup:
    """Rank 0's end of a pair with one engine's ranks."""

    def __init__(self, address: str, port: int, world_size: int) -> None:
        store = TCPStore(
            address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=RENDEZVOUS_SECONDS)
        )
        self._pair = Pair(store, 0, world_size, RENDEZVOUS_SECONDS)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self._pair.broadcast(tensor)

    def abort(self) -> None:
        self._pair.abort()
