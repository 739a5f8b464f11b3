"""Whole tensors on the ranks that write them, put together in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..ranks import Ranks
from .pieces import Layout, Weight, local_of

T = TypeVar("T")
Named = tuple[str, torch.Tensor]


@dataclass(slots=True)
class Wanted:
    """One tensor of a bucket: in the wire dtype, and which rank is to have it whole."""

    name: str
    weight: Weight
    owner: int
    layout: Layout | None
    """None for a DTensor that is gathered over the job's own group (NCCL, on the GPU)."""

    local: torch.Tensor | None = None

    def ready(self, rank: int) -> None:
        """Whatever can fail on this rank alone, before the ranks agree to go on: copies to the host, checks."""
        if self.layout is not None and any(box.source(self.owner) == rank for box in self.layout.boxes):
            local = local_of(self.name, self.weight, self.layout, rank)
            self.local = None if local is None else local.cpu()


def collect(bucket: list[Wanted], ranks: Ranks, rank: int) -> Iterator[Named]:
    """All ranks call it with the same bucket; each gets the tensors it owns, on the CPU, one after another.

    The bucket is emptied, so that nothing is held longer than it takes to write it.
    """
    if not bucket:
        return
    what = f"the gather of {bucket[0].name}"
    full = ranks.run(as_here(lambda: _collect(bucket, ranks, rank)), what)
    bucket.clear()
    full.reverse()
    while full:
        yield full.pop()


def _collect(bucket: Sequence[Wanted], ranks: Ranks, rank: int) -> list[Named]:
    full: list[Named] = []
    waiting: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for wanted in bucket:
        mine = wanted.owner == rank
        if wanted.layout is None:
            tensor = _full(cast(DTensor, wanted.weight), mine)
        else:
            tensor = _exchange(wanted, ranks, rank, waiting)
        if mine and tensor is not None:
            full.append((wanted.name, tensor))
    for work, target, buffer in waiting:
        work.wait()
        if buffer is not target:
            target.copy_(buffer)
    return full


def _full(tensor: DTensor, keep: bool) -> torch.Tensor | None:
    if tensor.device.type != (device := tensor.device_mesh.device_type):
        tensor = cast(DTensor, tensor.to(device))  # offloaded shards: NCCL gathers on the GPU only
    whole = tensor.full_tensor()
    return whole.cpu() if keep else None


def _exchange(wanted: Wanted, ranks: Ranks, rank: int, waiting: list[Any]) -> torch.Tensor | None:
    """Start the messages of one tensor. Every rank starts them in one order, so they pair up by themselves."""
    layout, owner = cast(Layout, wanted.layout), wanted.owner
    local, whole = wanted.local, None
    if rank == owner:
        if len(layout.boxes) == 1 and local is not None:
            return local.reshape(wanted.weight.shape)
        whole = torch.empty(layout.grid, dtype=wanted.weight.dtype)
    for box in layout.boxes:
        source = box.source(owner)
        if rank == owner and whole is not None:
            target = whole[tuple(slice(at, at + size) for at, size in zip(box.offset, box.shape, strict=True))]
            if source == rank:
                target.copy_(cast(torch.Tensor, local))
            else:
                buffer = target if target.is_contiguous() else torch.empty(box.shape, dtype=target.dtype)
                waiting.append((dist.irecv(_bytes(buffer), source, group=ranks.group), target, buffer))
        elif source == rank and local is not None:
            sent = local.contiguous()
            waiting.append((dist.isend(_bytes(sent), owner, group=ranks.group), sent, sent))
    return None if whole is None else whole.view(wanted.weight.shape)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def as_here(work: Callable[[], T]) -> Callable[[], T]:
    """`work` for a side thread, which would start on another device and stream and record gradients."""
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def there() -> T:
        if stream is not None:
            torch.cuda.set_stream(stream)
        with torch.no_grad():
            return work()

    return there
