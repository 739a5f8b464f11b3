"""SGLang's colocated path: `/update_weights_from_tensor` with flattened buckets, on the same GPUs of one host.

A rank of SGLang opens the entry of its own TP rank: a pickle of one tensor of bytes, as a CUDA-IPC handle, and of
where each weight lies in it. SGLang's unpickler takes a closed list of names; what is sent needs none of SGLang's
own, so the trainer needs no SGLang: descriptions are SimpleNamespaces, and the handle is torch's, with the GPU's UUID
in place of a device number, as SGLang's patched `rebuild_cuda_tensor` takes it.

`load_weights` has queued its copies when the call is answered, and waits for them only as it lets the handle go: each
bucket has a buffer of its own, which torch keeps until then.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch

from .colocated import Colocated
from .devices import Reduced
from .receivers import HttpEngine, Layout
from .sglang_receiver import SglangReceiver

DEVICE = 6
"""Index of the device among the arguments of torch's rebuild_cuda_tensor."""


class SglangTensorReceiver(SglangReceiver):
    """One SGLang server, on this trainer's GPUs."""

    def connect(self) -> None:
        """Nothing is agreed before."""

    def update(self, layout: Layout, payload: Sequence[bytes]) -> None:
        """`payload`: by TP rank."""
        body = {
            "serialized_named_tensors": [base64.b64encode(each).decode() for each in payload],
            "load_format": "flattened_bucket",
        }
        self._update("/update_weights_from_tensor", body, layout.nbytes)


class SglangTensor(Colocated[SglangTensorReceiver]):
    """See the module's docstring, and `Colocated` for its arguments."""

    name = "sglang_tensor"
    reuses_buffers = False

    def receiver(self, engine: HttpEngine) -> SglangTensorReceiver:
        return SglangTensorReceiver(engine)

    def _handle(self, buffer: torch.Tensor, gpu: str, layout: Layout) -> bytes:
        reduced = self._devices.reduce(buffer)
        return serialized({"flattened_tensor": buffer, "metadata": described(layout)}, buffer, by_uuid(reduced, gpu))


def described(layout: Layout) -> list[SimpleNamespace]:
    """As SGLang's FlattenedTensorMetadata."""
    found, start = [], 0
    for name, dtype, shape, size in zip(layout.names, layout.dtypes, layout.shapes, layout.sizes, strict=True):
        found.append(
            SimpleNamespace(name=name, shape=tuple(shape), dtype=getattr(torch, dtype),
                            start_idx=start, end_idx=start + size, numel=size)
        )  # fmt: skip
        start += size
    return found


def by_uuid(reduced: Reduced, gpu: str) -> Reduced:
    """With the GPU's UUID as the device; what is no CUDA handle stays as it is."""
    function, arguments = reduced
    if function.__name__ != "rebuild_cuda_tensor":
        return reduced
    return function, (*arguments[:DEVICE], gpu, *arguments[DEVICE + 1 :])


def serialized(content: Any, tensor: torch.Tensor, reduced: Reduced) -> bytes:
    """A pickle of `content`, in which `tensor` is replaced by a handle of it."""

    class Pickler(ForkingPickler):
        def reducer_override(self, found: Any) -> Any:
            return reduced if found is tensor else NotImplemented

    data = io.BytesIO()
    Pickler(data).dump(content)
    return data.getvalue()
