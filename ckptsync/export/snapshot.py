"""A copy of what each rank will send or write, in host memory: safe from the next optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ..ranks import Ranks
from ..store import direct
from .ahead import Ahead
from .collect import Messages
from .pieces import Layout, Piece, Weight, local_of, whole
from .source import Walk
from .stream import Item, Named, Shares, agreed_layouts, spec_of_meta, stream_items, wire_dtype

_ALIGN = 64

BUCKET = 64 << 20
"""Bytes between two agreements while a held stream is written."""


class Arena:
    """Host memory that is used again for each snapshot, since touching fresh pages costs as much as the copy.

    Page-locked where there is CUDA, so that the GPU copies into it by itself. Grows to the largest snapshot.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def begin(self, nbytes: int) -> bool:
        """Make room for `nbytes` and start again; nothing of an earlier snapshot may be in use. Whether the memory is
        still the one of before: a new one may well begin at the same address."""
        self._used = 0
        if nbytes <= self._memory.nbytes:
            return True
        self._memory = torch.empty(0, dtype=torch.uint8)  # let go first
        self._memory = _host_memory(nbytes)
        return False

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        start, self._used = self._used, self._used + padded(size)
        return self._memory[start : start + size].view(dtype).view(tuple(shape))


def _host_memory(nbytes: int) -> torch.Tensor:
    if torch.cuda.is_available():
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(direct.memory(nbytes), dtype=torch.uint8)


def padded(nbytes: int) -> int:
    """Bytes that a tensor of `nbytes` takes in an arena."""
    return -(-nbytes // _ALIGN) * _ALIGN


class Held:
    """What this rank has to keep of one walk: planned first (for the memory), then copied."""

    def __init__(self, items: Sequence[Item], shares: Shares, ranks: Ranks, dtype: torch.dtype | None) -> None:
        self._items, self._shares, self._dtype, self._rank = items, shares, dtype, ranks.rank
        self._owner = {item.name: rank for rank, share in shares.items() for item in share}
        self.layouts: Mapping[str, Layout] = agreed_layouts(items, ranks, snapshot=True)

    @property
    def nbytes(self) -> int:
        sizes = (torch.Size(box).numel() * wire_dtype(weight, self._dtype).itemsize for weight, box in self._kept())
        return sum(padded(size) for size in sizes)

    @torch.no_grad()
    def copy(self, arena: Arena, ahead: Ahead) -> Shares:
        """The same shares with pieces in host memory. On the GPU the caller has to synchronize."""
        made = {item.name: self._copied(item, arena, ahead) for item in self._items}
        return {rank: [made[item.name] for item in share] for rank, share in self._shares.items()}

    def _copied(self, item: Item, arena: Arena, ahead: Ahead) -> Item:
        weight, layout = item.weight, self.layouts[item.name]
        dtype = wire_dtype(weight, self._dtype)
        local = torch.empty(0, dtype=dtype)
        if self._sends(item.name) and (mine := local_of(item.name, weight, layout, self._rank)) is not None:
            local = arena.take(mine.shape, dtype)
            ahead.into(item.name, layout, mine, local)
        return replace(item, weight=Piece(tuple(weight.shape), dtype, layout, local))

    def _kept(self) -> Iterator[tuple[Weight, Sequence[int]]]:
        for item in self._items:
            box = self.layouts[item.name].box_of(self._rank)
            if box is not None and self._sends(item.name):
                yield item.weight, box.shape

    def _sends(self, name: str) -> bool:
        owner = self._owner[name]
        return any(box.source(owner) == self._rank for box in self.layouts[name].boxes)


def synchronize(items: Iterable[Item]) -> None:
    """Wait until the GPU has copied."""
    if torch.cuda.is_initialized() and any(_on_cuda(item.weight) for item in items):  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().synchronize()


def _on_cuda(weight: Weight) -> bool:
    return (weight.local if isinstance(weight, Piece) else weight).is_cuda


def hold_pulled(walk: Walk, ranks: Ranks) -> Walk:
    """Collective. Everything that a pulled source yields, kept by rank 0: a source cannot be asked again later."""
    pairs = [(name, tensor.clone()) for name, tensor in walk.tensors]
    lines = ranks.broadcast([(name, tuple(t.shape), t.dtype) for name, t in pairs])
    layouts = {name: whole(shape, (0,)) for name, shape, _ in lines}
    local = dict(pairs)
    items = [
        Item(
            name=name,
            weight=Piece(shape, dtype, layouts[name], local.get(name, torch.empty(0, dtype=dtype))),
            outputs=((name, spec_of_meta(name, torch.empty(shape, dtype=dtype, device="meta"))),),
        )
        for name, shape, dtype in lines
    ]

    def open_(
        shares: Shares, _: Mapping[str, Layout] | None, ranks: Ranks, messages: Messages | None
    ) -> Iterator[Named]:
        return stream_items(shares, layouts, ranks, None, BUCKET, None, str, messages)

    specs = tuple(spec for item in items for _, spec in item.outputs or ())
    return replace(walk, items=tuple(items), specs=specs, open=open_)
