"""SGLang's group update: trainer and engine on different GPUs, or, over gloo, on CPUs.

The engine's ranks and rank 0 of the trainer form a torch process group beside the default one; each bucket is one
broadcast of bytes (`flattened_bucket`). Rank 0 needs no SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from .broadcast import RENDEZVOUS_SECONDS, Broadcasting, Group
from .packing import Named, layout_of, pack
from .receivers import HttpEngine, Layout
from .sglang_receiver import SglangReceiver

Backend = Literal["nccl", "gloo"]


class SglangDistributedReceiver(SglangReceiver):
    """One SGLang server that joins a group over `backend`."""

    def __init__(self, engine: HttpEngine, backend: Backend) -> None:
        super().__init__(engine)
        self._backend, self._group = backend, ""

    def connect(self) -> None:
        """Joining is all."""

    def join(self, address: str, port: int, world_size: int, name: str) -> None:
        body = {
            "master_address": address, "master_port": port, "rank_offset": 1, "world_size": world_size,
            "group_name": name, "backend": self._backend,
        }  # fmt: skip
        call = self._call("join", "/init_weights_update_group", json=body, timeout=RENDEZVOUS_SECONDS)
        self.http.expect(call, success=True)
        self._group = name

    def update(self, layout: Layout, _payload: Sequence[Any]) -> None:
        body = {
            "names": layout.names, "dtypes": layout.dtypes, "shapes": layout.shapes,
            "group_name": self._group, "load_format": "flattened_bucket",
        }  # fmt: skip
        self._update("/update_weights_from_distributed", body, layout.nbytes)


class SglangDistributed(Broadcasting[SglangDistributedReceiver]):
    """See the module's docstring, and `Broadcasting` for its further arguments. `backend` is that of the group."""

    name = "sglang_distributed"

    def __init__(self, *, backend: Backend = "nccl", **more: Any) -> None:
        super().__init__(**more)
        self._backend: Backend = backend
        self._receivers: dict[str, SglangDistributedReceiver] = {}

    def why_not(self) -> str | None:
        return super().why_not() if self._backend == "nccl" else None

    def receiver(self, engine: HttpEngine) -> SglangDistributedReceiver:
        """The same for each send: it knows its group's name."""
        if engine.name not in self._receivers:
            self._receivers[engine.name] = SglangDistributedReceiver(engine, self._backend)
        return self._receivers[engine.name]

    def open_group(self, address: str, port: int, world_size: int, name: str) -> Group:
        return TorchGroup(address, port, world_size, name, self._backend)

    def on_wire(self, tensors: Sequence[Named]) -> list[torch.Tensor]:
        device = "cuda" if self._backend == "nccl" else "cpu"
        buffer = torch.empty(layout_of(tensors).nbytes, dtype=torch.uint8, device=device)
        pack(tensors, buffer)
        return [buffer]


class TorchGroup:
    """One rank of a process group outside of the default one, as SGLang's `init_custom_process_group` makes it.

    torch has no public way to it: every trainer that speaks to SGLang calls the same two functions.
    """

    def __init__(self, address: str, port: int, world_size: int, name: str, backend: Backend, *, rank: int = 0) -> None:
        from torch.distributed.distributed_c10d import GroupName, PrefixStore, _new_process_group_helper
        from torch.distributed.rendezvous import rendezvous

        limit = timedelta(seconds=RENDEZVOUS_SECONDS)
        host = f"[{address}]" if ":" in address else address
        store, _, _ = next(rendezvous(f"tcp://{host}:{port}", rank, world_size, timeout=limit))
        self._store = store
        self._group, _ = _new_process_group_helper(
            world_size, rank, [], dist.Backend(backend), PrefixStore(name, store),
            group_name=GroupName(name), timeout=limit,
        )  # fmt: skip

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        for tensor in tensors:
            self._group.broadcast([tensor], options).wait()
        if any(tensor.is_cuda for tensor in tensors):
            torch.cuda.current_stream().synchronize()

    def abort(self) -> None:
        self._group.abort()
