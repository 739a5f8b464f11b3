"""From the device to the host, and back: in one go, through page-locked memory where there is CUDA."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_host(tensors: Sequence[torch.Tensor]) -> list[npt.NDArray[Any]]:
    """Their values in host memory. Waits for what the current stream has still to do for them."""
    if not any(tensor.is_cuda for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    # torch keeps page-locked memory that is let go of, and takes it again for the next.
    landed = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for here, there in zip(landed, tensors, strict=True):
        here.copy_(there, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return [here.numpy() for here in landed]


def host_memory(size: int, device: torch.device) -> npt.NDArray[np.uint8]:
    """Bytes of any value for what comes from the device. Page-locked where there is CUDA: of that torch keeps what is
    let go of, and new memory would be filled with zeros by the system, page by page, while a trainer waits."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda").numpy()


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The values there; the host does not wait for what the device has still to do."""
    here = torch.from_numpy(np.ascontiguousarray(values))
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def triton_runs_on(tensor: torch.Tensor) -> bool:
    """Whether kernels in Triton are to be used for what lies there."""
    return tensor.is_cuda and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
