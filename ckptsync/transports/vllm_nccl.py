"""vLLM's native NCCL backend: trainer and engine on different GPUs, on one host or many.

`vllm serve … --weight-transfer-config '{"backend": "nccl"}'` with `VLLM_SERVER_DEV_MODE=1`. The trainer's end of the
group is vLLM's own communicator, so vLLM is to be installed on rank 0 too.

Tensor by tensor and not packed: where the packed form is agreed on has moved twice between 0.26 and 0.33, and this one
is the same in all of them. Each bucket is one call with its tensors' names, dtypes and shapes; the engine's ranks take
one broadcast after the other from rank 0.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import TransportError
from .broadcast import RENDEZVOUS_SECONDS, Broadcasting, Group
from .packing import Named
from .receivers import HttpEngine, Layout
from .vllm_receiver import VllmReceiver


class VllmNcclReceiver(VllmReceiver):
    """One vLLM server with the backend `nccl`."""

    backend = "nccl"

    def connect(self) -> None:
        """Joining is all."""

    def join(self, address: str, port: int, world_size: int, _name: str) -> None:
        info = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": world_size}
        self._init(info, timeout=RENDEZVOUS_SECONDS)

    def update(self, layout: Layout, _payload: Sequence[Any]) -> None:
        info = {"names": layout.names, "dtype_names": layout.dtypes, "shapes": layout.shapes}
        self._update(info, layout.nbytes)


class VllmNccl(Broadcasting[VllmNcclReceiver]):
    """See the module's docstring, and `Broadcasting` for its arguments."""

    name = "vllm_nccl"

    def why_not(self) -> str | None:
        if why := super().why_not():
            return why
        if importlib.util.find_spec("vllm") is None:
            return "vLLM is not installed on the trainer, whose communicator it is"
        return None

    def receiver(self, engine: HttpEngine) -> VllmNcclReceiver:
        return VllmNcclReceiver(engine)

    def open_group(self, address: str, port: int, world_size: int, _name: str) -> Group:
        return PyNcclGroup(address, port, world_size)

    def on_wire(self, tensors: Sequence[Named]) -> list[torch.Tensor]:
        return [tensor.detach().to("cuda").contiguous() for _, tensor in tensors]


class PyNcclGroup:
    """vLLM's communicator, at rank 0, on this thread's current GPU."""

    def __init__(self, address: str, port: int, world_size: int) -> None:
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        place = {"master_address": address, "master_port": port, "world_size": world_size}
        self._communicator: Any = trainer_init(place)
        if self._communicator.disabled:
            raise TransportError("vLLM's NCCL communicator is disabled: no NCCL library, or VLLM_DISABLE_PYNCCL")

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        stream = torch.cuda.current_stream()
        for tensor in tensors:
            self._communicator.broadcast(tensor, src=0, stream=stream)
        stream.synchronize()

    def abort(self) -> None:
        # From 0.27 on; with 0.26 the communicator stays until the process ends.
        if hasattr(self._communicator, "destroy"):
            self._communicator.destroy()
