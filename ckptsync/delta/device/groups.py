"""The changes of a run of blocks in groups: each class of each block that is stored as places and differences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .. import layout
from ..classes import CLASSES, limits_of
from ..codec import FEW
from .compare import Found
from .flat import Counts, Line
from .magnitudes import class_ranks, hit
from .transfer import to_device, to_host

AT_ONCE = 1 << 24
"""Changes that are grouped at a time, for each some 10 bytes of device memory: so few that the host has something to
compress while the device goes on."""

CLASSED = 1 << 24
"""The same where there are classes: 100 bytes."""

CHUNK = 1 << 29
"""Elements whose classes are counted at a time: nearly as many bytes."""


@dataclass(frozen=True, slots=True)
class Split:
    """A block whose changes are in one group for each class."""

    index: int
    mode: int
    changed: int
    limits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grouped:
    """Groups, one after another."""

    blocks: list[Split]
    ranks: torch.Tensor
    """Of each change among those of its group; int32."""

    differences: torch.Tensor
    counts: Counts
    """Of each group."""

    members: Counts
    """Elements of each group's block."""

    last: int
    """Blocks before this one are in this run or in those before, or not in any."""


def grouped(
    line: Line, base: torch.Tensor, found: Found, samples: torch.Tensor | None, chunk: int
) -> Iterator[Grouped]:
    """All blocks of `found` that are not whole; in classes if there are `samples` of the base."""
    counts = np.where(found.whole, 0, found.changed)
    runs = _runs(line, counts, AT_ONCE, line.size) if samples is None else _runs(line, counts, CLASSED, chunk)
    for first, last in runs:
        own = counts[first:last]
        if not own.any():
            continue
        begin = int(found.begins[first:last][own > 0][0])
        places, differences = (each[begin : begin + int(own.sum())] for each in (found.places, found.differences))
        if samples is None or not (own >= FEW).any():
            yield _unclassed(line, first, own, places, differences)
        else:
            part, start = line.part(first, last), line.blocks[first].start
            yield _classed(part, base[start : start + part.size], first, own, places, differences,
                           samples[first:last])  # fmt: skip


def _runs(line: Line, counts: Counts, changes: int, elements: int) -> Iterator[tuple[int, int]]:
    """First and last of runs of blocks of about so many changes and elements."""
    key = np.stack([(counts.cumsum() - 1).clip(0) // changes, line.begins // elements])
    cuts = np.flatnonzero((np.diff(key) != 0).any(axis=0)) + 1
    yield from zip([0, *cuts.tolist()], [*cuts.tolist(), len(counts)], strict=True)


def _unclassed(line: Line, first: int, counts: Counts, places: torch.Tensor, differences: torch.Tensor) -> Grouped:
    chosen = np.flatnonzero(counts)
    blocks = [Split(first + at, layout.SPARSE_ULP, int(counts[at]), ()) for at in chosen.tolist()]
    return Grouped(blocks, places, differences, counts[chosen], line.sizes[first + chosen], first + len(counts))


def _classed(
    line: Line, base: torch.Tensor, first: int, counts: Counts, places: torch.Tensor, differences: torch.Tensor,
    samples: torch.Tensor,
) -> Grouped:  # fmt: skip
    """Of a line of these blocks alone, the first of which has the index `first`."""
    each = to_device(counts, line.device)
    block = torch.arange(len(counts), device=line.device).repeat_interleave(each, output_size=len(places))
    places = places + line.starts[block]
    classed = counts >= FEW
    limits = _limits(base, places, block, classed, samples)
    parts = np.array([len(own) + 1 if count else 0 for own, count in zip(limits, counts, strict=True)])
    group, ranks = _in_classes(line, base, places, block, limits, parts)
    order = group.to(torch.int32).argsort(stable=True)
    members = np.repeat(line.sizes, parts)
    (sizes,) = to_host([torch.bincount(group, minlength=len(members))])
    blocks = [
        Split(first + at, layout.CLASS_ULP if classed[at] else layout.SPARSE_ULP, int(counts[at]), limits[at])
        for at in np.flatnonzero(counts).tolist()
    ]
    return Grouped(blocks, ranks[order].to(torch.int32), differences[order], sizes, members, first + len(counts))


def _limits(
    base: torch.Tensor, places: torch.Tensor, block: torch.Tensor, classed: npt.NDArray[np.bool_], samples: torch.Tensor
) -> list[tuple[int, ...]]:
    """Where the classes of each block begin; one class for those that are not `classed`."""
    there, hits = to_host([samples, hit(base[places], block, len(classed))])
    kind = np.dtype(f"<u{base.element_size()}")
    return [
        tuple(limits_of(there[index], hits[index], kind).tolist()) if own else () for index, own in enumerate(classed)
    ]


def _in_classes(
    line: Line,
    base: torch.Tensor,
    places: torch.Tensor,
    block: torch.Tensor,
    limits: list[tuple[int, ...]],
    parts: npt.NDArray[np.int64],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The group of each change, and its rank there."""
    most = torch.iinfo(base.dtype).max
    below = [[each - 1 for each in own] + [most] * (CLASSES - 1 - len(own)) for own in limits]
    table = torch.tensor(below, dtype=base.dtype, device=base.device)
    classes, ranks = class_ranks(line, base, table, places, block)
    return to_device(np.cumsum(parts) - parts, line.device)[block] + classes, ranks
