"""What differs on a line: a pass over old and new, then one over what changed, when the host knows how much that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..codec import DENSE, FEW, MASK, Effort
from . import xxh3
from .flat import ALIGN, INTEGERS, Counts, Line, as_integers
from .transfer import to_device, to_host, triton_runs_on

Array = npt.NDArray[Any]


class Scanned(NamedTuple):
    """What the first pass finds."""

    counts: torch.Tensor
    """[units], int32: how many elements changed in every ALIGN of the line."""

    marks: torch.Tensor
    """Which elements changed, as `compact` reads it."""

    sums: torch.Tensor
    rests: torch.Tensor
    """Of the new elements, as `xxh3` has them."""


@dataclass(frozen=True, slots=True)
class Found:
    """The changes of one line, block after block; first those that are stored as places."""

    places: torch.Tensor
    """In their blocks, ascending; int32."""

    differences: torch.Tensor
    changed: Counts
    """Of each block how many changes it has, and `begins` where they begin."""

    begins: Counts
    whole: npt.NDArray[np.bool_]
    """Blocks that are encoded on the host: small ones, and those that changed so much that it is not places that are
    stored."""

    def of(self, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Places and differences of one block."""
        own = slice(int(self.begins[block]), int(self.begins[block] + self.changed[block]))
        return self.places[own], self.differences[own]


def laid_out(line: Line, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The new elements as the passes take them: the address of each block, or without Triton all of them on a line."""
    if triton_runs_on(line.starts):
        each = [tensors[block.name].data_ptr() + block.index * line.block * line.width for block in line.blocks]
        return to_device(np.array(each, dtype=np.int64), line.device)
    return line.fill(torch.zeros(line.size, dtype=INTEGERS[line.width], device=line.device), tensors)


def on_line(line: Line, values: torch.Tensor) -> torch.Tensor:
    """The same for elements that are on a line already."""
    return line.starts * line.width + values.data_ptr() if triton_runs_on(values) else values


def scan(line: Line, base: torch.Tensor, new: torch.Tensor) -> Scanned:
    """`new`: from `laid_out`."""
    if triton_runs_on(base):
        from . import kernels

        rests = kernels.rests(line, new)
        return Scanned(*kernels.scan(line, base, new, rests, xxh3.constants(base.device)[0]), rests)
    marks = base != new
    return Scanned(marks.view(-1, ALIGN).sum(1, dtype=torch.int32), marks, xxh3.sums(new), xxh3.rests(line, new))


def changed_of(line: Line, scanned: Scanned) -> torch.Tensor:
    """[blocks], int64: how many changes each has."""
    return torch.nn.functional.pad(scanned.counts.cumsum(0), (1, 0))[line.edges // ALIGN].diff()


def compact(
    line: Line,
    base: torch.Tensor,
    new: torch.Tensor,
    scanned: Scanned,
    changed: Counts,
    whole: npt.NDArray[np.bool_],
) -> Found:
    """`changed`: the numbers of `changed_of`. `whole`: from `whole_of`."""
    order = np.argsort(whole, kind="stable")
    begins = np.empty_like(changed)
    begins[order] = changed[order].cumsum() - changed[order]
    # Of each unit where its changes go: as far from its block's first as on the line.
    before = scanned.counts.cumsum(0) - scanned.counts
    targets = before + (to_device(begins, line.device) - before[line.starts // ALIGN])[line.units]
    total = int(changed.sum())
    if triton_runs_on(base):
        from . import kernels

        parts = kernels.compact(line, base, new, scanned.rests, scanned.counts, scanned.marks, targets, total)
    else:
        parts = _compact(line, new - base, scanned.marks, targets - before, total)
    return Found(*parts, changed, begins, whole)


def whole_of(line: Line, changed: Counts, effort: Effort) -> npt.NDArray[np.bool_]:
    """Blocks that are to be encoded on the host: see `Found`."""
    # An unchanged block needs its digest too, if others of its tensor changed.
    small = (line.sizes * line.width < xxh3.LEAST) & ((changed > 0) | (line.indexes > 0))
    dense = changed > MASK * line.sizes
    if effort == "best":
        dense &= (changed > DENSE * line.sizes) | (changed < FEW)
    return np.asarray(small | dense & (changed > 0))


def _compact(
    line: Line, apart: torch.Tensor, marks: torch.Tensor, shifts: torch.Tensor, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`shifts`: of each unit how far its changes go from where they would lie in the order of the line."""
    at = marks.nonzero().view(-1)
    targets = torch.arange(total, device=apart.device) + shifts[at // ALIGN]
    places, differences = torch.empty(total, dtype=torch.int32), torch.empty(total, dtype=apart.dtype)
    places, differences = places.to(apart.device), differences.to(apart.device)
    places[targets] = (at - line.starts[line.units[at // ALIGN]]).to(torch.int32)
    differences[targets] = apart[at]
    return places, differences


def fetch(
    line: Line, base: torch.Tensor, tensors: Mapping[str, torch.Tensor], whole: npt.NDArray[np.bool_]
) -> list[tuple[int, Array, Array]]:
    """Those blocks, old and new, in one go."""
    chosen = np.flatnonzero(whole)
    if not len(chosen):
        return []
    blocks = [line.blocks[index] for index in chosen]
    old = torch.cat([base[each.start : each.start + each.length] for each in blocks])
    firsts = [each.index * line.block for each in blocks]
    new = torch.cat(
        [as_integers(tensors[each.name])[at : at + each.length] for each, at in zip(blocks, firsts, strict=True)]
    )
    kind, cuts = np.dtype(f"<u{line.width}"), np.cumsum([block.length for block in blocks])[:-1]
    pairs = zip(*(np.split(each.view(kind), cuts) for each in to_host([old, new])), strict=True)
    return [(int(index), *pair) for index, pair in zip(chosen, pairs, strict=True)]


_MOVED = 1 << 26
"""Changes that are made at a time: 8 bytes of device memory each, and their elements twice."""


def apply(line: Line, base: torch.Tensor, found: Found) -> None:
    """Make the changes in `base`."""
    order = np.argsort(found.begins, kind="stable")
    ends = to_device(found.changed[order].cumsum(), line.device)
    starts = line.starts[to_device(order, line.device)]
    for first in range(0, len(found.places), _MOVED):
        places, differences = (each[first : first + _MOVED] for each in (found.places, found.differences))
        number = torch.arange(first, first + len(places), device=line.device)
        base[starts[torch.searchsorted(ends, number, right=True)] + places] += differences
