"""A gloo group beside the job's own, between the sender and its receivers.

Made from a store of its own, so that neither side's default group is touched (vLLM makes its NCCL groups in the same
way, `stateless_init_torch_distributed_process_group`). Both sides use it, so it lives in the core.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ..export.collect import as_bytes


class Pair:
    """Rank 0 sends, every other rank receives."""

    def __init__(self, store: TCPStore, rank: int, size: int, seconds: float) -> None:
        """Returns when all are there. RuntimeError after `seconds`, here and in each broadcast."""
        self.store = store
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=seconds))

    @classmethod
    def join(cls, host: str, port: int, rank: int, size: int, seconds: float) -> Pair:
        """A receiver's end."""
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))
        return cls(store, rank, size, seconds)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """A contiguous CPU tensor, in place. RuntimeError if the other side is gone or too slow."""
        group = self._group
        if group is None:
            raise RuntimeError("this end of the group is closed")
        try:
            if tensor.numel():
                options = dist.BroadcastOptions()
                options.rootRank = options.rootTensor = 0
                group.broadcast([as_bytes(tensor)], options).wait()
        finally:
            del group  # or the error's traceback keeps it open

    def abort(self) -> None:
        """Close this end: whoever waits for it gets an error."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()  # ends what waits here; its sockets close with the last reference (torch 2.13)


def meeting_place(host: str) -> TCPStore:
    """A store on a free port of `host`, for the sender."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)
