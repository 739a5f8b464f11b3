"""Many tensors as one line of integers: a handful of kernels for all of them, where one by one they take hundreds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from ..layout import BLOCK, head_bytes

ALIGN = 8192
"""Elements: every block begins at a multiple, so that what one program compares, tiles, samples and the KiB of a digest
never cross two."""

VECTOR = 16
"""Bytes that are read at a time: tensors begin at a multiple."""

Counts = npt.NDArray[np.int64]

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""By bytes of an element. Signed, since torch computes with few unsigned types; only the bits count."""


@dataclass(frozen=True, slots=True)
class Block:
    """`length` elements of tensor `name`, from its block `index` on the line at `start`."""

    name: str
    index: int
    length: int
    start: int


@dataclass(frozen=True)
class Line:
    """Blocks one after another, and where the tensors' elements go."""

    blocks: tuple[Block, ...]
    size: int
    """Elements, with what lies between blocks."""

    block: int
    """Elements of a whole block."""

    width: int
    """Bytes of an element."""

    device: torch.device

    @cached_property
    def begins(self) -> Counts:
        """Of each block its start, and `sizes` its length; `starts` and `lengths` are the same on the device."""
        return np.array([each.start for each in self.blocks], dtype=np.int64)

    @cached_property
    def sizes(self) -> Counts:
        return np.array([each.length for each in self.blocks], dtype=np.int64)

    @cached_property
    def indexes(self) -> Counts:
        return np.array([each.index for each in self.blocks], dtype=np.int64)

    @cached_property
    def firsts(self) -> Counts:
        """Of each tensor its first block; its others follow."""
        return np.flatnonzero(self.indexes == 0)

    @cached_property
    def heads(self) -> Counts:
        """Of each block the bytes of the blob's head that comes before it: where a tensor begins."""
        heads = np.zeros(len(self.blocks), dtype=np.int64)
        numbers = np.diff(self.firsts, append=len(heads))
        heads[self.firsts] = [head_bytes(number) for number in numbers.tolist()]
        return heads

    @cached_property
    def starts(self) -> torch.Tensor:
        return torch.from_numpy(self.begins).to(self.device)

    @cached_property
    def lengths(self) -> torch.Tensor:
        return torch.from_numpy(self.sizes).to(self.device)

    @cached_property
    def pieces(self) -> tuple[tuple[str, int, int, int], ...]:
        """(tensor, its first element, elements, place on the line) for each run of one tensor's blocks."""
        found: list[tuple[str, int, int, int]] = []
        for each in self.blocks:
            if found and found[-1][0] == each.name:
                name, first, size, at = found.pop()
                found.append((name, first, size + each.length, at))
            else:
                found.append((each.name, each.index * self.block, each.length, each.start))
        return tuple(found)

    def fill(self, line: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Copy `aligned` tensors, as integers, to their places on `line`, which has `size` of them."""
        for name, first, size, at in self.pieces:
            line[at : at + size].copy_(as_integers(tensors[name])[first : first + size])
        return line

    def part(self, first: int, last: int) -> Line:
        """The blocks from `first` up to `last`, as a line; it begins on this one at `begins[first]`."""
        start, end = self.blocks[first].start, self.blocks[last].start if last < len(self.blocks) else self.size
        blocks = tuple(replace(each, start=each.start - start) for each in self.blocks[first:last])
        return Line(blocks, end - start, self.block, self.width, self.device)

    @cached_property
    def units(self) -> torch.Tensor:
        """Of every ALIGN elements their block; int64."""
        return self.block_of_each(ALIGN)

    @cached_property
    def edges(self) -> torch.Tensor:
        """`starts` and the end."""
        return torch.cat([self.starts, self.starts.new_tensor([self.size])])

    def block_of_each(self, unit: int) -> torch.Tensor:
        """Which block every `unit` elements of the line belong to; int64."""
        each = torch.arange(len(self.blocks), device=self.device)
        return each.repeat_interleave(self.edges.diff() // unit, output_size=self.size // unit)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if its elements lie apart, are stored otherwise, or begin at no multiple of VECTOR."""
    if tensor.is_conj() or tensor.is_neg() or not tensor.is_contiguous():
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.detach().clone() if tensor.data_ptr() % VECTOR else tensor


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of an `aligned` tensor as a flat view of integers, as the codec compares them."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(INTEGERS[min(4, tensor.dtype.itemsize)])


def line_of(lengths: Mapping[str, int], width: int, device: torch.device, block: int = BLOCK) -> Line:
    """The line of tensors of so many elements each."""
    blocks, at = [], 0
    for name, length in lengths.items():
        for index, first in enumerate(range(0, length, block)):
            blocks.append(Block(name, index, min(block, length - first), at))
            at += -(-blocks[-1].length // ALIGN) * ALIGN
    return Line(tuple(blocks), at, block, width, device)
