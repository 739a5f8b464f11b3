"""The GPUs that this process sees, as memory that another process on the same host can map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]
"""What torch makes of a tensor for another process: a function, and its arguments, among them the memory's handle."""


class Devices(Protocol):
    """Where handles come from. CUDA, but for tests."""

    def why_not(self) -> str | None:
        """A clause if handles cannot be made here."""
        ...

    def own(self) -> str:
        """UUID of the GPU that this process computes on."""
        ...

    def visible(self) -> list[str]: ...

    def buffer(self, gpu: str, nbytes: int) -> torch.Tensor:
        """Bytes on that GPU, to be filled and exported."""
        ...

    def reduce(self, buffer: torch.Tensor) -> Reduced:
        """A handle, after everything that was written to the buffer has arrived there. One for each receiver: torch
        counts each as taken once and let go once."""
        ...

    def collect(self) -> None:
        """Give back what receivers have let go."""
        ...


class CudaDevices:
    """CUDA IPC. Both processes see the same physical GPU, under whatever number."""

    def why_not(self) -> str | None:
        if not torch.cuda.is_available():
            return "this trainer rank has no CUDA"
        try:
            self.reduce(torch.zeros(1, dtype=torch.uint8, device="cuda"))
        except RuntimeError as error:
            first = (str(error).splitlines() or ["no message"])[0]
            return f"CUDA memory of this process cannot be shared ({first}): is expandable_segments on?"
        self.collect()
        return None

    def own(self) -> str:
        return _uuid(torch.cuda.current_device()) if torch.cuda.is_available() else ""

    def visible(self) -> list[str]:
        return [_uuid(number) for number in range(torch.cuda.device_count())]

    def buffer(self, gpu: str, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", self.visible().index(gpu)))

    def reduce(self, buffer: torch.Tensor) -> Reduced:
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.current_stream(buffer.device).synchronize()
        function, arguments = reduce_tensor(buffer)  # type: ignore[no-untyped-call]
        return function, arguments

    def collect(self) -> None:
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def _uuid(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)
