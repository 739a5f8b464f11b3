"""The sections of groups of changes: how long those are that depend on the values, then all of them.

A program takes a tile of changes, all of one group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 1024

_JIT = triton.jit(do_not_specialize=["tiles"], do_not_specialize_on_alignment=["ranks", "differences"])
"""For every number of tiles and every slice of changes the same code: to compile takes a second."""


def ends_of(ranks: torch.Tensor, differences: torch.Tensor, groups: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
    """[3, tiles], int64: bytes of digits, numbers above 3, and numbers above 258, up to the end of each tile.

    `groups`: rows of `sections.TABLE`; `owners`: the group of each tile, int32.
    """
    found = torch.empty(3, len(owners), dtype=torch.int32, device=ranks.device)
    _measure[(len(owners),)](ranks, differences, groups, owners, found, len(owners), TILE)
    return found.cumsum(1)


def write(
    ranks: torch.Tensor, differences: torch.Tensor, groups: torch.Tensor, owners: torch.Tensor, ends: torch.Tensor,
    starts: torch.Tensor, size: int,
) -> torch.Tensor:  # fmt: skip
    """All sections in `size` bytes, each kind from its one of six `starts` on, groups one after another."""
    found = torch.full((size,), 255, dtype=torch.uint8, device=ranks.device)
    _write[(len(owners),)](ranks, differences, groups, owners, ends, found, starts, len(owners), TILE)
    return found


@triton.jit
def _tile(ranks, differences, groups, owners, tile: tl.constexpr):
    """The group's row, the number of the first change in it; then of each change its number, whether there is one, its
    gap and its size."""
    program = tl.program_id(0).to(tl.int64)
    group = groups + tl.load(owners + program).to(tl.int64) * 7
    first = (program - tl.load(group + 2)) * tile
    inside = first + tl.arange(0, tile)
    there = inside < tl.load(group + 1)
    at = tl.load(group) + inside
    before = tl.load(ranks + at - 1, mask=there & (inside > 0), other=-1)
    gap = tl.load(ranks + at, mask=there, other=0) - before - 1
    size = tl.abs(tl.load(differences + at, mask=there, other=0).to(tl.int64))
    return group, first, inside, there, gap, size


@_JIT
def _measure(ranks, differences, groups, owners, found, tiles, tile: tl.constexpr):
    group, _, _, there, gap, size = _tile(ranks, differences, groups, owners, tile)
    digits = tl.where(there, (gap >> (8 * tl.load(group + 3)).to(tl.int32)) // 255 + 1, 0)
    result = found + tl.program_id(0)
    tl.store(result, tl.sum(digits, axis=0))
    tl.store(result + tiles, tl.sum((size >= 4).to(tl.int32), axis=0))
    tl.store(result + 2 * tiles, tl.sum((size >= 259).to(tl.int32), axis=0))


@_JIT
def _write(
    ranks, differences, groups, owners, ends, found, starts, tiles, tile: tl.constexpr,
):  # fmt: skip
    group, first, inside, there, gap, size = _tile(ranks, differences, groups, owners, tile)
    program = tl.program_id(0)
    split = tl.load(group + 3).to(tl.int32)
    tl.store(found + tl.load(starts) + tl.load(group + 4) + inside, (gap & 255).to(tl.uint8), mask=there & (split == 1))
    number = gap >> (8 * split)
    digits = tl.cumsum(tl.where(there, number // 255 + 1, 0), axis=0)
    tl.store(found + tl.load(starts + 1) + _until(ends, program) + digits - 1, (number % 255).to(tl.uint8), mask=there)

    long, huge = size >= 4, size >= 259
    small = found + tl.load(starts + 4) + _until(ends + tiles, program) + tl.cumsum(long.to(tl.int32), axis=0) - 1
    tl.store(small, tl.minimum(size - 4, 255).to(tl.uint8), mask=long)
    large = (found + tl.load(starts + 5)).to(differences.dtype)
    large += _until(ends + 2 * tiles, program) + tl.cumsum(huge.to(tl.int32), axis=0) - 1
    tl.store(large, size.to(differences.dtype.element_ty), mask=huge)

    count, start = tl.load(group + 1), differences + tl.load(group)
    signs = found + tl.load(starts + 2) + tl.load(group + 5)
    quads = found + tl.load(starts + 3) + tl.load(group + 6)
    each = first + tl.arange(0, tile // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    value = tl.load(start + each, mask=each < count, other=0)
    bits = (value < 0).to(tl.int32) << tl.arange(0, 8)[None, :]
    byte = first // 8 + tl.arange(0, tile // 8)
    tl.store(signs + byte, tl.sum(bits, axis=1).to(tl.uint8), mask=byte * 8 < count)
    each = first + tl.arange(0, tile // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    value = tl.abs(tl.load(start + each, mask=each < count, other=1).to(tl.int64))
    bits = tl.minimum(value - 1, 3).to(tl.int32) << 2 * tl.arange(0, 4)[None, :]
    byte = first // 4 + tl.arange(0, tile // 4)
    tl.store(quads + byte, tl.sum(bits, axis=1).to(tl.uint8), mask=byte * 4 < count)


@triton.jit
def _until(ends, tile):
    """What came before the tile."""
    return tl.load(ends + tile - 1, mask=tile > 0, other=0)
