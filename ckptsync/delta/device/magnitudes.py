"""Classes by old magnitude, on the device: what `classes` and the kernels `histogram` and `class_ranks` do there."""

from __future__ import annotations

import torch

from ..classes import SAMPLE
from .flat import ALIGN, Line
from .transfer import triton_runs_on

BINS = 256

TILE = 32
"""Elements that are counted at a time: the ranks of a change cost one tile's elements each."""

AT_ONCE = 1 << 22
"""Changes whose tiles are in memory at a time."""

_SAMPLED = 1 << 28
"""Elements of a line that are sampled at a time: half as many bytes of device memory, several times."""

_APART = 4096
"""Neighbours on a line fall into the same few bins; counted side by side they would wait for each other."""


def magnitude(values: torch.Tensor) -> torch.Tensor:
    return values & torch.iinfo(values.dtype).max


def bins(values: torch.Tensor) -> torch.Tensor:
    """int64, below BINS."""
    return (magnitude(values) >> max(0, 8 * values.element_size() - 9)).to(torch.int64)


def sampled(line: Line, base: torch.Tensor) -> torch.Tensor:
    """[blocks, BINS], int64: how many of every SAMPLE-th element of each block are in each bin."""
    found = torch.zeros(len(line.blocks) * BINS + 1, dtype=torch.int64, device=base.device)
    for first in range(0, line.size, _SAMPLED):
        found += _counts(line, base[first : first + _SAMPLED : SAMPLE], first, len(found))
    return found[:-1].view(-1, BINS)


def _counts(line: Line, samples: torch.Tensor, first: int, length: int) -> torch.Tensor:
    at = first + torch.arange(len(samples), device=line.device) * SAMPLE
    block = line.units[at // ALIGN]
    inside = at - line.starts[block] < line.lengths[block]
    where = torch.where(inside, block * BINS + bins(samples), length - 1)
    where = torch.nn.functional.pad(where, (0, -len(where) % _APART), value=length - 1)
    return torch.bincount(where.view(_APART, -1).t().reshape(-1), minlength=length)


def hit(values: torch.Tensor, block: torch.Tensor, blocks: int) -> torch.Tensor:
    """The same for the old values of changes, whose blocks are given."""
    return torch.bincount(block * BINS + bins(values), minlength=blocks * BINS).view(-1, BINS)


def class_ranks(
    line: Line, base: torch.Tensor, limits: torch.Tensor, places: torch.Tensor, block: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each change its class, and how many of that class lie before it in its block; int64.

    `limits`: [blocks, most], of the line's dtype, less one; its largest number where a block has fewer. `places` on
    the line, `block` of each.
    """
    tiles, of = base.view(-1, TILE), line.block_of_each(TILE)
    if triton_runs_on(base):
        from . import kernels

        before = _before(kernels.tile_counts(tiles, of, limits), line, of)
        return kernels.members_before(tiles, before, limits, places, block, line.starts)
    tiles = magnitude(tiles)
    counts = [(tiles > below[of][:, None]).sum(1, dtype=torch.int32) for below in limits.unbind(1)]
    before = _before(torch.stack(counts), line, of)
    parts = ((places[at : at + AT_ONCE], block[at : at + AT_ONCE]) for at in range(0, len(places), AT_ONCE))
    classes, ranks = zip(*(_ranks(line, tiles, before, limits, *part) for part in parts), strict=True)
    return torch.cat(classes), torch.cat(ranks)


def _before(counts: torch.Tensor, line: Line, of: torch.Tensor) -> torch.Tensor:
    """[limits, tiles]: how many elements above the limit lie before each tile, in its block."""
    sums = counts.cumsum(1, dtype=torch.int32) - counts
    return sums - sums[:, line.starts // TILE][:, of]


def _ranks(
    line: Line,
    tiles: torch.Tensor,
    before: torch.Tensor,
    limits: torch.Tensor,
    places: torch.Tensor,
    block: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    tile, offset = places // TILE, places % TILE
    elements = tiles[tile]
    earlier = torch.arange(TILE, device=places.device) < offset[:, None]
    own = elements.gather(1, offset[:, None])
    above = [places - line.starts[block]]
    classes = torch.zeros_like(places)
    for counted, limit in zip(before, limits.unbind(1), strict=True):
        below = limit[block][:, None]
        above.append(counted[tile] + ((elements > below) & earlier).sum(1))
        classes += (own > below)[:, 0]
    above.append(torch.zeros_like(places))
    members = torch.stack(above, 1)
    ranks = members.gather(1, classes[:, None]) - members.gather(1, classes[:, None] + 1)
    return classes, ranks[:, 0]
