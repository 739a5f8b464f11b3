"""How a tensor lies across the ranks, as boxes, and what one rank holds of it.

Every kind of sharding comes down to boxes of one grid: FSDP2 and tensor parallel cut a tensor along its own
dimensions, FSDP1 cuts it as a flat line, a plain tensor is one box. With that, a tensor is put together from
messages between ranks over a group of ours, so neither a background publish nor FSDP1 touches the job's own
collectives, and each byte travels once, to the rank that writes it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from ..errors import InvalidInput, UnsupportedTensor

Shape = tuple[int, ...]


class Box(NamedTuple):
    """A block of the grid, and the ranks that hold it."""

    offset: Shape
    shape: Shape
    holders: tuple[int, ...]

    def source(self, owner: int) -> int:
        """Who sends the box to `owner`: itself if it can, else the holders take turns."""
        return owner if owner in self.holders else self.holders[owner % len(self.holders)]


class Layout(NamedTuple):
    """Disjoint boxes that fill `grid`: the tensor's shape, or its number of elements where it was cut as a line."""

    grid: Shape
    boxes: tuple[Box, ...]

    def box_of(self, rank: int) -> Box | None:
        return next((box for box in self.boxes if rank in box.holders), None)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """What this rank holds of a tensor that is not a torch tensor any more: FSDP1's, or a snapshot's."""

    shape: Shape
    dtype: torch.dtype
    layout: Layout
    local: torch.Tensor
    """This rank's box, in any shape; empty if it holds none."""


Weight = torch.Tensor | Piece


def layout_of(name: str, weight: Weight, world_size: int) -> Layout:
    """The layout as this rank sees it; of a DTensor on a part of the job's ranks it sees only their copy.

    A plain parameter is the same on every rank (that is what data parallel means), so each may write its own.
    Of any other plain tensor rank 0's counts: running statistics, for one, differ over the ranks.
    """
    if isinstance(weight, Piece):
        return weight.layout
    if isinstance(weight, DTensor):
        return _sharded(name, weight)
    holders = tuple(range(world_size)) if isinstance(weight, nn.Parameter) else (0,)
    return whole(tuple(weight.shape), holders)


@lru_cache(maxsize=4096)
def whole(shape: Shape, holders: tuple[int, ...]) -> Layout:
    """The layout of a tensor that `holders` have in one piece."""
    return Layout(shape, (Box((0,) * len(shape), shape, holders),) if _numel(shape) else ())


def _sharded(name: str, tensor: DTensor) -> Layout:
    mesh = tensor.device_mesh.mesh
    cuts = []
    for placement in tensor.placements:
        if placement.is_partial():
            raise UnsupportedTensor(f"tensor {name!r} is a partial sum ({placement}): redistribute it first")
        shard = placement if isinstance(placement, Shard) or hasattr(placement, "dim") else None
        cuts.append(None if shard is None else (shard.dim % tensor.ndim, getattr(shard, "split_factor", 1)))
    return _layout(name, tuple(tensor.shape), tuple(mesh.shape), tuple(mesh.flatten().tolist()), tuple(cuts))


@lru_cache(maxsize=4096)
def _boxes(
    shape: Shape, mesh_shape: Shape, ranks: tuple[int, ...], cuts: tuple[tuple[int, int] | None, ...]
) -> Layout | None:
    holders: dict[tuple[Shape, Shape], list[int]] = {}
    for rank, place in zip(ranks, itertools.product(*map(range, mesh_shape)), strict=True):
        lines = [torch.arange(size) for size in shape]
        for cut, parts, index in zip(cuts, mesh_shape, place, strict=True):
            if cut is not None:
                dim, factor = cut
                lines[dim] = _take(lines[dim], parts, index, factor)
        if any(len(line) and int(line[-1] - line[0]) != len(line) - 1 for line in lines):
            return None
        if all(len(line) for line in lines):
            box = (tuple(int(line[0]) for line in lines), tuple(len(line) for line in lines))
            holders.setdefault(box, []).append(rank)
    return Layout(shape, tuple(Box(offset, size, tuple(sorted(who))) for (offset, size), who in holders.items()))


def _layout(
    name: str, shape: Shape, mesh_shape: Shape, ranks: tuple[int, ...], cuts: tuple[tuple[int, int] | None, ...]
) -> Layout:
    if (layout := _boxes(shape, mesh_shape, ranks, cuts)) is None:
        raise UnsupportedTensor(
            f"tensor {name!r}: a rank holds several separate blocks of it; publish it in the foreground"
        )
    return layout


def _take(line: torch.Tensor, parts: int, index: int, factor: int) -> torch.Tensor:
    """What mesh coordinate `index` of `parts` gets, as Shard does it, or _StridedShard with its split factor.

    FSDP2 over tensor parallel marks dim 0 with _StridedShard: the later mesh dimension was cut first.
    """
    blocks = torch.chunk(line, factor)
    return torch.cat([_chunk(block, parts, index) for block in blocks])


def _chunk(line: torch.Tensor, parts: int, index: int) -> torch.Tensor:
    step = -(-len(line) // parts)
    return line[index * step : (index + 1) * step]


def local_of(name: str, weight: Weight, layout: Layout, rank: int) -> torch.Tensor | None:
    """This rank's box as it lies there, in the box's shape; None if it holds none.

    InvalidInput if what the rank holds is not what the layout says: sharded by another rule.
    """
    box = layout.box_of(rank)
    if box is None:
        return None
    local = weight.local if isinstance(weight, Piece) else weight.to_local() if isinstance(weight, DTensor) else weight
    if local.numel() != _numel(box.shape):
        raise InvalidInput(f"tensor {name!r}: rank {rank} holds {list(local.shape)}, where {list(box.shape)} is due")
    return local.detach().reshape(box.shape)


def _numel(shape: Shape) -> int:
    return int(torch.Size(shape).numel())
