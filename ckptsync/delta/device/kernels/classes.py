"""The loops of `magnitudes`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILES = 32
"""Tiles, or changes, that one program takes."""


def tile_counts(tiles: torch.Tensor, block: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """[limits, tiles], int32: elements above each limit of the tile's block."""
    found = torch.empty(limits.shape[1], len(tiles), dtype=torch.int32, device=tiles.device)
    most = torch.iinfo(tiles.dtype).max
    grid = (triton.cdiv(len(tiles), _TILES),)
    _tile_counts[grid](tiles, block, limits, found, len(tiles), most, limits.shape[1], tiles.shape[1], _TILES)
    return found


@triton.jit
def _tile_counts(
    tiles, block, limits, found, count, most,
    classes: tl.constexpr, width: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    there = row < count
    inside = tl.arange(0, width)
    at = row[:, None] * width + inside[None, :]
    values = tl.load(tiles + at, mask=there[:, None] & (inside >= 0)[None, :], other=0).to(tl.int32) & most
    own = tl.load(block + row, mask=there, other=0)
    for index in tl.static_range(classes):
        below = tl.load(limits + (own * classes + index), mask=there, other=0).to(tl.int32)
        above = (values > below[:, None]).to(tl.int32)
        tl.store(found + (index * count + row), tl.sum(above, axis=1), mask=there)


def members_before(
    tiles: torch.Tensor, before: torch.Tensor, limits: torch.Tensor, places: torch.Tensor, block: torch.Tensor,
    starts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Class and rank of each change, both int64."""
    classes, ranks = torch.empty_like(places), torch.empty_like(places)
    grid = (triton.cdiv(len(places), _TILES),)
    _members_before[grid](
        tiles, before, limits, places, block, starts, classes, ranks, len(places), len(tiles),
        torch.iinfo(tiles.dtype).max, limits.shape[1], tiles.shape[1], _TILES,
    )  # fmt: skip
    return classes, ranks


@triton.jit
def _members_before(
    tiles, before, limits, places, block, starts, classes, ranks,
    count, tile_count, most, limit_count: tl.constexpr, width: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    change = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    there = change < count
    place = tl.load(places + change, mask=there, other=0)
    own_block = tl.load(block + change, mask=there, other=0)
    tile = place // width
    inside = tl.arange(0, width)
    at = tile[:, None] * width + inside[None, :]
    values = tl.load(tiles + at, mask=there[:, None] & (inside >= 0)[None, :], other=0).to(tl.int32) & most
    own = tl.load(tiles + place, mask=there, other=0).to(tl.int32) & most
    earlier = inside[None, :] < (place % width)[:, None]
    rank = place - tl.load(starts + own_block, mask=there, other=0)
    found = tl.zeros_like(place)
    for index in tl.static_range(limit_count):
        below = tl.load(limits + (own_block * limit_count + index), mask=there, other=0).to(tl.int32)
        above = ((values > below[:, None]) & earlier).to(tl.int64)
        members = tl.load(before + (index * tile_count + tile), mask=there, other=0) + tl.sum(above, axis=1)
        higher = own > below
        # In a class at or above this limit only those above it count, in the one below only those that are not.
        rank = tl.where(higher, members, tl.where(found == index, rank - members, rank))
        found += higher.to(tl.int64)
    tl.store(classes + change, found, mask=there)
    tl.store(ranks + change, rank, mask=there)
