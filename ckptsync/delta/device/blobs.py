"""The blobs of a line's tensors, out of the payloads of its blocks: each byte is put where it stays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import layout
from ..codec import digest
from .flat import Counts, Line
from .payloads import Payloads
from .transfer import host_memory

Rows = npt.NDArray[Any]
"""Of `layout.ROW`."""

_NOTHING = digest(b"")


class Made(NamedTuple):
    """A block that the host encoded."""

    mode: int
    changed: int
    payload: bytes
    proven: tuple[int, int]
    """The digests of the old and the new block."""


class Written(NamedTuple):
    """A run of a line's blocks: their rows, and their payloads in `out`, from `starts` on.

    Where a tensor begins there is room for its head.
    """

    first: int
    rows: Rows
    out: npt.NDArray[np.uint8]
    starts: Counts


def written(
    line: Line, span: range, digests: tuple[Any, Any], run: Payloads | None, made: Mapping[int, Made]
) -> Written:
    """`digests`: of every old and every new block of the span, where the host did not prove them."""
    rows = _rows(span, digests, run, made)
    lengths, heads = rows["length"].astype(np.int64), line.heads[span.start : span.stop]
    ends = (lengths + heads).cumsum()
    starts = ends - lengths
    out = host_memory(int(ends[-1]), line.device)
    if run is not None:
        run.write(out, starts[run.indexes - span.start])
    for index, each in made.items():
        start = int(starts[index - span.start])
        out.data[start : start + len(each.payload)] = each.payload
    changed = np.flatnonzero(rows["changed"])
    spans = zip(starts[changed].tolist(), ends[changed].tolist(), strict=True)
    rows["payload"][changed] = [digest(out.data[start:end]) for start, end in spans]
    return Written(span.start, rows, out, starts)


def blobs_of(line: Line, lengths: Mapping[str, int], runs: Sequence[Written]) -> Iterator[tuple[str, memoryview]]:
    """Of each tensor that changed its blob, as `layout.pack` makes it: a view of the memory of its run, which is joined
    only where a tensor lies in several. `lengths`: elements, by tensor. `runs`: all blocks, in order."""
    rows = np.concatenate([run.rows for run in runs])
    owners = np.repeat(np.arange(len(runs)), [len(run.rows) for run in runs])
    firsts = line.firsts
    changed = np.add.reduceat(rows["changed"], firsts, dtype=np.int64)
    for at in np.flatnonzero(changed).tolist():
        first, last = int(firsts[at]), int(firsts[at + 1]) if at + 1 < len(firsts) else len(rows)
        own = rows[first:last]
        size = own["length"].sum(dtype=np.int64) + layout.head_bytes(len(own))
        own["offset"] = size - own["length"][::-1].cumsum(dtype=np.int64)[::-1]
        name = line.blocks[first].name
        head = layout.head(line.width, lengths[name], int(changed[at]), int(size), line.block, own.tobytes())
        yield name, _blob(head, int(size), runs[owners[first] : owners[last - 1] + 1], first, last)


def _blob(head: bytes, size: int, runs: Sequence[Written], first: int, last: int) -> memoryview:
    if len(runs) > 1:
        return memoryview(b"".join([head, *(_payloads(run, first, last) for run in runs)]))
    ((begin, _, out, starts),) = runs
    start = int(starts[first - begin]) - len(head)
    out.data[start : start + len(head)] = head
    return out.data[start : start + size].toreadonly()


def _payloads(run: Written, first: int, last: int) -> memoryview:
    """Of those of the blocks that are in the run."""
    from_, to = max(0, first - run.first), min(len(run.rows), last - run.first)
    return run.out.data[int(run.starts[from_]) : int(run.starts[to - 1]) + int(run.rows["length"][to - 1])]


def _rows(span: range, digests: tuple[Any, Any], run: Payloads | None, made: Mapping[int, Made]) -> Rows:
    """Without offsets, and without the payloads' digests."""
    rows = np.zeros(len(span), dtype=layout.ROW)
    rows["mode"], rows["payload"], (rows["base"], rows["new"]) = layout.SPARSE_ULP, _NOTHING, digests
    if run is not None:
        at = run.indexes - span.start
        rows["mode"][at] = [block.mode for block in run.blocks]
        rows["changed"][at] = [block.changed for block in run.blocks]
        rows["length"][at] = run.sizes()
    for index, each in made.items():
        rows[["mode", "changed", "length", "base", "new"]][index - span.start] = (
            each.mode, each.changed, len(each.payload), *each.proven,
        )  # fmt: skip
    return rows
