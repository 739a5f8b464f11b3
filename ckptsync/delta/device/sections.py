"""The sections of a payload, made for many groups of changes at a time. A group is one class of one block."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..layout import ALIGN
from ..modes import SPLIT
from .transfer import to_device, to_host, triton_runs_on

Counts = npt.NDArray[np.int64]


class Sections(NamedTuple):
    """Of groups, six sections of each, as `modes` writes them: low, digits, signs, quads, small, large."""

    split: list[int]
    data: npt.NDArray[np.uint8]
    begins: Counts
    """[groups, 6], and `sizes` as many: where each lies in `data`, in bytes."""

    sizes: Counts


def sections_of(ranks: torch.Tensor, differences: torch.Tensor, counts: Counts, members: Counts) -> Sections:
    """`ranks` (int32) and `differences` hold the groups one after another, each with `counts` changes among `members`
    elements, ranks ascending."""
    split = members >= SPLIT * np.maximum(1, counts)
    sizes = np.empty((len(counts), 6), dtype=np.int64)
    sizes[:, _LOW], sizes[:, _SIGNS], sizes[:, _QUADS] = counts * split, -(-counts // 8), -(-counts // 4)
    make = _by_kernels if triton_runs_on(ranks) else _by_torch
    data = make(ranks, differences, counts, split, sizes)
    starts, _ = _starts(sizes)
    return Sections(split.astype(int).tolist(), data, np.array(starts) + sizes.cumsum(axis=0) - sizes, sizes)


_LOW, _DIGITS, _SIGNS, _QUADS, _SMALL, _LARGE = range(6)
_VARYING = (_DIGITS, _SMALL, _LARGE)


def _starts(sizes: Counts) -> tuple[list[int], int]:
    """Where each kind of section begins, and where all of them end."""
    ends = (-(-sizes.sum(axis=0) // ALIGN) * ALIGN).cumsum()
    return [0, *ends[:-1].tolist()], int(ends[-1])


def _by_kernels(
    ranks: torch.Tensor, differences: torch.Tensor, counts: Counts, split: npt.NDArray[np.bool_], sizes: Counts
) -> npt.NDArray[np.uint8]:
    """All sections, in the order of `_starts`; what was not known of `sizes` is filled in."""
    from . import kernels

    tiles = -(-counts // kernels.TILE)
    changes, first, *bytes_ = (
        each.cumsum() - each for each in (counts, tiles, sizes[:, _LOW], sizes[:, _SIGNS], sizes[:, _QUADS])
    )
    table = to_device(np.stack([changes, counts, first, split, *bytes_], axis=1), ranks.device)
    owners = to_device(np.repeat(np.arange(len(counts), dtype=np.int32), tiles), ranks.device)
    ends = kernels.ends_of(ranks, differences, table, owners)
    (found,) = to_host([_at(ends, to_device(tiles.cumsum(), ranks.device))])
    _fill_in(sizes, found, differences)
    starts, size = _starts(sizes)
    places = to_device(np.array(starts), ranks.device)
    (data,) = to_host([kernels.write(ranks, differences, table, owners, ends, places, size)])
    return data


def _by_torch(
    ranks: torch.Tensor, differences: torch.Tensor, counts: Counts, split: npt.NDArray[np.bool_], sizes: Counts
) -> npt.NDArray[np.uint8]:
    of, inside, last = _inside(counts, ranks.device)
    parts = [
        *_places(ranks, to_device(split, ranks.device)[of], inside, last),
        *_values(differences, counts, of, inside, last),
    ]
    ends, *data = to_host([torch.stack([parts[kind][1] for kind in _VARYING]), *(part for part, _ in parts)])
    _fill_in(sizes, ends, differences)
    return np.concatenate([np.pad(each.view(np.uint8), (0, -each.nbytes % ALIGN)) for each in data])


def _fill_in(sizes: Counts, ends: Counts, differences: torch.Tensor) -> None:
    """`ends` of the sections whose length depends on the values, by kind and group, in their elements."""
    sizes[:, _VARYING] = np.diff(ends, axis=1, prepend=0).T * (1, 1, differences.element_size())


Part = tuple[torch.Tensor, torch.Tensor]
"""A section of every group, and where each group's ends in it, in its elements."""


def _inside(counts: Counts, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each change its group and its place in that; of each group the number of changes up to its end."""
    total, each = int(counts.sum()), torch.from_numpy(counts).to(device)
    last = each.cumsum(0)
    of = torch.arange(len(counts), device=device).repeat_interleave(each, output_size=total)
    return of, torch.arange(total, device=device) - (last - each)[of], last


def _places(ranks: torch.Tensor, split: torch.Tensor, inside: torch.Tensor, last: torch.Tensor) -> list[Part]:
    gaps = ranks - torch.where(inside == 0, -1, ranks.roll(1)) - 1
    numbers = torch.where(split, gaps >> 8, gaps)
    ends = (numbers // 255 + 1).cumsum(0)
    digits = torch.full((int(ends[-1]),), 255, dtype=torch.uint8, device=ranks.device)
    digits[ends - 1] = (numbers % 255).to(torch.uint8)
    return [((gaps[split] & 255).to(torch.uint8), _up_to(split, last)), (digits, _at(ends, last))]


def _values(
    differences: torch.Tensor, counts: Counts, of: torch.Tensor, inside: torch.Tensor, last: torch.Tensor
) -> list[Part]:
    size = differences.to(torch.int64).abs()
    long = size >= 4
    rest = size[long] - 4
    huge = rest >= 255
    long_ends = _up_to(long, last)
    return [
        _packed((differences < 0).to(torch.uint8), 1, counts, of, inside),
        _packed((size - 1).clamp(max=3).to(torch.uint8), 2, counts, of, inside),
        (rest.clamp(max=255).to(torch.uint8), long_ends),
        ((rest[huge] + 4).to(differences.dtype), _up_to(huge, long_ends)),
    ]


def _packed(values: torch.Tensor, bits: int, counts: Counts, of: torch.Tensor, inside: torch.Tensor) -> Part:
    """Numbers of so many bits in bytes, the first lowest; each group begins a byte."""
    per = 8 // bits
    ends = (-(-counts // per)).cumsum()
    begins = to_device(np.concatenate([[0], ends[:-1]]) * per, values.device)
    padded = torch.zeros(int(ends[-1]) * per, dtype=torch.uint8, device=values.device)
    padded[begins[of] + inside] = values
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=values.device)
    return (padded.view(-1, per) << shifts).sum(1, dtype=torch.uint8), to_device(ends, values.device)


def _up_to(flags: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """How many of the flags are set up to each group's end."""
    return _at(flags.cumsum(0), last)


def _at(sums: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """The running sums at each group's end."""
    return torch.nn.functional.pad(sums, (1, 0))[..., last]
