"""Whole tensors on the ranks that write them, put together in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..ranks import Ranks
from .pieces import Box, Layout, Weight, local_of

T = TypeVar("T")
Named = tuple[str, torch.Tensor]


class Messages(Protocol):
    """Makes less of a box before it is sent; `ckptsync.delta.messages` sends what changed."""

    def compare(self, boxes: Iterable[tuple[str, Box, torch.Tensor]]) -> None:
        """Told before all others: every box that this rank has to send or to write, where it lies."""
        ...

    def is_known(self, name: str, box: Box) -> bool:
        """Whether there is a message of the box without its bytes on the host, so that its own writer takes it too."""
        ...

    def outgoing(self, name: str, box: Box, local: torch.Tensor) -> tuple[bool, torch.Tensor]:
        """Whether the message has to be undone, and its bytes."""
        ...

    def incoming(self, name: str, box: Box, like: torch.Tensor, message: torch.Tensor) -> torch.Tensor:
        """The box, from a message that has to be undone; `like` is the tensor that it is a part of."""
        ...


@dataclass(slots=True)
class Wanted:
    """One tensor of a bucket: in the wire dtype, and which rank is to have it whole."""

    name: str
    weight: Weight
    owner: int
    layout: Layout | None
    """None for a DTensor that is gathered over the job's own group (NCCL, on the GPU)."""

    local: torch.Tensor | None = None
    messages: Messages | None = None
    """How boxes travel; None: as they are."""

    message: tuple[bool, torch.Tensor] | None = None
    announced: Sequence[Mapping[str, tuple[bool, int]]] = ()
    """What each rank is about to send, by name, where boxes travel as messages."""

    def ready(self, rank: int) -> None:
        """Whatever can fail on this rank alone, before the ranks agree to go on: copies to the host, checks."""
        if self.layout is None or not any(box.source(self.owner) == rank for box in self.layout.boxes):
            return
        local, box = local_of(self.name, self.weight, self.layout, rank), self.layout.box_of(rank)
        if local is None or box is None:
            return
        mine = rank == self.owner
        if self.messages is not None and (not mine or self.messages.is_known(self.name, box)):
            self.message = self.messages.outgoing(self.name, box, local)
        if self.message is None or (mine and not self.message[0]):
            self.local = local.cpu()

    def own(self, box: Box, whole: torch.Tensor) -> torch.Tensor:
        """The writer's own box, of the tensor that becomes `whole`."""
        if self.local is None and self.messages is not None and self.message is not None:
            return self.messages.incoming(self.name, box, whole, self.message[1])
        return cast(torch.Tensor, self.local)


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
    waiting: list[tuple[Any, torch.Tensor, Callable[[], torch.Tensor]]] = []
    for wanted in bucket:
        mine = wanted.owner == rank
        if wanted.layout is None:
            whole = full_tensor(cast(DTensor, wanted.weight))
            tensor = whole.cpu() if mine else None
            del whole
        else:
            tensor = _exchange(wanted, ranks, rank, waiting)
        if mine and tensor is not None:
            full.append((wanted.name, tensor))
    for work, target, received in waiting:
        if work is not None:
            work.wait()
        if (found := received()) is not target:
            target.copy_(found)
    return full


def full_tensor(tensor: DTensor) -> torch.Tensor:
    """Gathered over its own mesh, on every rank of it."""
    if tensor.device.type != (device := tensor.device_mesh.device_type):
        tensor = cast(DTensor, tensor.to(device))  # offloaded shards: NCCL gathers on the GPU only
    return tensor.full_tensor()


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
                target.copy_(wanted.own(box, whole))
            else:
                waiting.append(_receive(wanted, box, source, whole, target, ranks))
        elif source == rank and (local is not None or wanted.message is not None):
            sent = wanted.message[1] if wanted.message is not None else as_bytes(cast(torch.Tensor, local).contiguous())
            work = dist.isend(sent, owner, group=ranks.group) if len(sent) else None
            waiting.append((work, sent, partial(_same, sent)))
    return None if whole is None else whole.view(wanted.weight.shape)


def _receive(
    wanted: Wanted, box: Box, source: int, whole: torch.Tensor, target: torch.Tensor, ranks: Ranks
) -> tuple[Any, torch.Tensor, Callable[[], torch.Tensor]]:
    changed, length = wanted.announced[source][wanted.name] if wanted.messages is not None else (False, 0)
    if not changed:
        buffer = target if target.is_contiguous() else torch.empty(box.shape, dtype=target.dtype)
        return dist.irecv(as_bytes(buffer), source, group=ranks.group), target, partial(_same, buffer)
    message = torch.empty(length, dtype=torch.uint8)
    work = dist.irecv(message, source, group=ranks.group) if length else None
    incoming = cast(Messages, wanted.messages).incoming
    return work, target, partial(incoming, wanted.name, box, whole, message)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes, as a view of it."""
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
