"""Reading just the bytes that a rank holds of a tensor, out of a safetensors file that has the whole of it.

What a rank holds is asked of DTensor itself, dimension by dimension: a row of indices is placed as the tensor is,
without communication, and what is left of it is what this rank needs. So uneven shards, empty ones, 2-D meshes
and FSDP2's strided shards over tensor parallel need no arithmetic of our own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor, Replicate

from .errors import BadShard, UnsupportedTensor
from .shards.tensors import tensor_bytes
from .store.base import Reader

Runs = tuple[tuple[int, int], ...]
"""Indices along one dimension, as ascending half-open ranges."""

Part = tuple[Runs, ...]
"""What a rank holds of a tensor: runs for each dimension."""

CHUNK = 16 << 20
"""Bytes read at a time where more is read than is kept."""

LARGE_ROW = 1 << 20
"""Rows at least this large (bytes) are entered, and only the columns that are needed are read; of smaller ones
whole rows are read and cut, since one large read costs less than many small ones."""


def whole(shape: Sequence[int]) -> Part:
    """All of a tensor."""
    return tuple(((0, size),) for size in shape)


def part_of(name: str, tensor: torch.Tensor) -> Part:
    """What this rank holds of a tensor; costs no communication. UnsupportedTensor for partial sums."""
    if not isinstance(tensor, DTensor):
        return whole(tensor.shape)
    if any(placement.is_partial() for placement in tensor.placements):
        raise UnsupportedTensor(f"tensor {name!r} is placed as a partial sum: nothing can be loaded into it")
    part = tuple(_held(tensor, dim, size) for dim, size in enumerate(tensor.shape))
    local = tuple(tensor._local_tensor.shape)
    if local != part_shape(part):
        raise UnsupportedTensor(
            f"tensor {name!r} holds {list(local)} here, where its placements {tensor.placements} say {part_shape(part)}"
        )
    return part


def part_shape(part: Part) -> tuple[int, ...]:
    return tuple(sum(stop - start for start, stop in runs) for runs in part)


def _held(tensor: DTensor, dim: int, size: int) -> Runs:
    placements = [p if getattr(p, "dim", None) == dim else Replicate() for p in tensor.placements]
    if all(isinstance(placement, Replicate) for placement in placements):
        return ((0, size),)
    from torch.distributed.tensor import distribute_tensor

    shape = [1] * tensor.dim()
    shape[dim] = size
    # src_data_rank=None: every rank cuts its own copy, nothing is sent.
    index = distribute_tensor(torch.arange(size).view(shape), tensor.device_mesh, placements, src_data_rank=None)
    return _runs(index.to_local().flatten().tolist())


def _runs(indices: list[int]) -> Runs:
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return tuple(runs)


def read_part(reader: Reader, offset: int, shape: Sequence[int], dtype: torch.dtype, part: Part) -> torch.Tensor:
    """A fresh contiguous CPU tensor with this part of the tensor that starts at byte `offset` of the file."""
    out = torch.empty(part_shape(part), dtype=dtype)
    if out.numel():
        _read(reader, offset, tuple(shape), part, out)
    return out


def _read(reader: Reader, offset: int, shape: tuple[int, ...], part: Part, out: torch.Tensor) -> None:
    if not shape or _is_whole(shape[1:], part[1:]):
        row = math.prod(shape[1:]) * out.element_size()
        memory, done = tensor_bytes(out), 0
        for start, stop in part[0] if shape else ((0, 1),):
            reader.readinto(offset + start * row, memory[done : done + (stop - start) * row])
            done += (stop - start) * row
        return
    row = math.prod(shape[1:]) * out.element_size()
    if row >= LARGE_ROW:
        for at, index in enumerate(_indices(part[0])):
            _read(reader, offset + index * row, shape[1:], part[1:], out[at])
    else:
        _read_rows(reader, offset, shape, part, out)


def _read_rows(reader: Reader, offset: int, shape: tuple[int, ...], part: Part, out: torch.Tensor) -> None:
    """Whole rows, a chunk at a time, of which only the columns held are kept."""
    row = math.prod(shape[1:]) * out.element_size()
    done, step = 0, max(1, CHUNK // row)
    for start, stop in part[0]:
        for first in range(start, stop, step):
            rows = min(step, stop - first)
            buffer = torch.empty((rows, *shape[1:]), dtype=out.dtype)
            reader.readinto(offset + first * row, tensor_bytes(buffer))
            out[done : done + rows] = _cut(buffer, part[1:])
            done += rows


def _cut(rows: torch.Tensor, part: Part) -> torch.Tensor:
    for dim, runs in enumerate(part, start=1):
        if runs != ((0, rows.shape[dim]),):
            rows = torch.cat([rows.narrow(dim, start, stop - start) for start, stop in runs], dim)
    return rows


def _is_whole(shape: tuple[int, ...], part: Part) -> bool:
    return part == whole(shape)


def _indices(runs: Runs) -> Iterator[int]:
    for start, stop in runs:
        yield from range(start, stop)


def check_inside(name: str, part: Part, shape: Sequence[int]) -> None:
    """BadShard unless the part lies inside a tensor of this shape."""
    if len(part) != len(shape) or any(runs and runs[-1][1] > size for runs, size in zip(part, shape, strict=True)):
        raise BadShard(f"tensor {name!r} of shape {list(shape)} does not contain what is to be read of it")
