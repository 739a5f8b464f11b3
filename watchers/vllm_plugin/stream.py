"""Weights that a trainer broadcasts over gloo (`ckptsync.transports.VllmGloo`): vLLM's own NCCL backend, on CPUs.

The same calls: a group is joined once, each update announces the tensors that are broadcast meanwhile. One update
without any is the end: all of it has to be in by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from ckptsync.errors import EngineRefused
from ckptsync.transports.pair import Pair

JOIN_SECONDS = 120.0
"""How long to wait for the trainer, when joining and in each broadcast."""


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """The trainer's group: it is rank 0, this engine's ranks begin at `rank_offset`."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


@dataclass
class BroadcastInfo(WeightTransferUpdateInfo):
    """The tensors that are broadcast next, in order; none: that was all."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class Stream:
    """One rank's end of the group. `received`: names of what the update that is under way, or was last, has brought."""

    def __init__(self) -> None:
        self._pair: Pair | None = None
        self.received: set[str] = set()

    def join(self, info: JoinInfo, rank: int) -> None:
        """EngineRefused if the trainer is not to be found."""
        self._pair = None
        place = info.master_address, info.master_port
        try:
            self._pair = Pair.join(*place, info.rank_offset + rank, info.world_size, JOIN_SECONDS)
        except RuntimeError as error:
            raise EngineRefused(f"cannot join the trainer at {place[0]}:{place[1]}: {error}") from error

    def receive(self, info: BroadcastInfo) -> Iterator[tuple[str, torch.Tensor]]:
        """Each in memory of its own: layerwise loading keeps them beyond the call. RuntimeError if the trainer is
        gone; EngineRefused before a trainer was joined."""
        if self._pair is None:
            raise EngineRefused("no trainer's group was joined")
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self._pair.broadcast(tensor)
            yield name, tensor
