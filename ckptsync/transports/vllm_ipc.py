"""vLLM's native CUDA-IPC backend, packed: trainer and engine on the same GPUs of one host.

`vllm serve … --weight-transfer-config '{"backend": "ipc"}'` with `VLLM_SERVER_DEV_MODE=1` and
`VLLM_ALLOW_INSECURE_SERIALIZATION=1`: over HTTP the handles are a pickle, which the server opens. Keep its port
private.

Packed and not tensor by tensor, since vLLM's layerwise loading keeps tensors beyond the call that brought them: a
handle of memory that the trainer goes on to use would be read too late. Of a packed buffer the engine makes a copy of
its own. So a sync takes one bucket of memory on each side.

Each bucket is exported anew. One export is to be mapped and let go once: 0.26 maps the buffer with every bucket, 0.32
maps a new export and lets go of the last.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .colocated import Colocated
from .receivers import HttpEngine, Layout
from .vllm_receiver import VllmReceiver

INSECURE = "VLLM_ALLOW_INSECURE_SERIALIZATION"
PACKED_AT_INIT = (0, 27)
"""From this release on `packed` is said once, when connecting; 0.26 wants it with each update."""


class VllmIpcReceiver(VllmReceiver):
    """One vLLM server with the backend `ipc`."""

    backend = "ipc"

    def __init__(self, engine: HttpEngine) -> None:
        super().__init__(engine)
        self._packed: dict[str, Any] = {}

    def connect(self) -> None:
        release = self._release()
        old = (0, 0) < release < PACKED_AT_INIT
        self._packed = {"packed": True} if old else {}
        self._init({} if old else {"packed": True})

    def update(self, layout: Layout, payload: Sequence[Mapping[str, Any]]) -> None:
        """`payload`: for each rank of the engine, GPU UUID -> arguments of torch's rebuild_cuda_tensor."""
        handles = {gpu: arguments for each in payload for gpu, arguments in each.items()}
        info = {
            "names": layout.names,
            "dtype_names": layout.dtypes,
            "shapes": layout.shapes,
            "tensor_sizes": layout.sizes,
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
            **self._packed,
        }
        self._update(info, layout.nbytes)

    def _why_not(self, info: Mapping[str, Any]) -> str | None:
        if why := super()._why_not(info):
            return why
        env = info.get("vllm_env")
        if isinstance(env, dict) and env.get(INSECURE) in (False, 0, "0", "False"):
            return f"{self.engine.name} was started without {INSECURE}=1"
        return None


class VllmIpc(Colocated[VllmIpcReceiver]):
    """See the module's docstring, and `Colocated` for its arguments."""

    name = "vllm_ipc"

    def receiver(self, engine: HttpEngine) -> VllmIpcReceiver:
        return VllmIpcReceiver(engine)

    def _handle(self, buffer: torch.Tensor, gpu: str, _layout: Layout) -> Any:
        return {gpu: self._devices.reduce(buffer)[1]}
