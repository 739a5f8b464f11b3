"""What the live model holds, read through the copy plan run backwards.

Three looks, from slow and absolute to fast:

- `checkpoint_digests`: live values in checkpoint layout, digested as the manifest does it. Proves, bit for bit,
  that the engine holds the published tensors. For tensors that this rank holds whole, and uncast.
- `differing`: live values compared with the payload, element by element, as bits. For slices and casts too.
- `sums`: on the device, one weighted sum for each copy (see `_weighed`); the same sums of the payload are taken on
  the host before the pause. The values are read twice at HBM speed, while later copies are still on their way
  (`put_and_sum`). Proves that each copy arrived, at its place: a changed, missing, shifted or swapped piece
  changes them. It is no defence against a forger, who could keep the sums of every row and every column.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from ckptsync.digest import DEFAULT, digest
from ckptsync.shards.tensors import tensor_bytes

from .copy_plan import CopyPlan

ROW = 4096
"""Words in a row of `_parts`."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differing(plan: CopyPlan, targets: Mapping[str, torch.Tensor], payload: Iterable[torch.Tensor]) -> list[str]:
    """Names of checkpoint tensors of which a live element differs from the payload, bit for bit."""
    wrong = dict.fromkeys(
        copy.source
        for copy, values in zip(plan.copies, payload, strict=True)
        if not _same_bits(copy.write.on(targets[copy.target]), values)
    )
    return [*wrong, *wrong_fills(plan, targets)]


def wrong_fills(plan: CopyPlan, targets: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of parameters of which a constant part, such as the padding of a vocabulary, changed."""
    live = ((fill, fill.write.on(targets[fill.target])) for fill in plan.fills)
    return [fill.target for fill, values in live if values.numel() and not bool((values == fill.value).all())]


def checkpoint_digests(plan: CopyPlan, targets: Mapping[str, torch.Tensor], algorithm: str = DEFAULT) -> dict[str, str]:
    """name -> digest of the live values in checkpoint layout, of every tensor that this rank holds whole."""
    return {name: digest(tensor_bytes(tensor), algorithm) for name, tensor in live_tensors(plan, targets)}


def live_tensors(plan: CopyPlan, targets: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint again, in host memory, one tensor at a time: those that are held whole and uncast."""
    by_source: dict[str, list[int]] = {}
    for index, copy in enumerate(plan.copies):
        by_source.setdefault(copy.source, []).append(index)
    for name, indices in by_source.items():
        shape, dtype = plan.layouts[name]
        copies = [plan.copies[index] for index in indices]
        whole = torch.Size(shape).numel() == sum(copy.read.numel for copy in copies)
        if not whole or any(targets[copy.target].dtype != dtype for copy in copies):
            continue
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        for copy in copies:
            copy.read.on(tensor).copy_(copy.write.on(targets[copy.target]))
        yield name, tensor


class Live:
    """The live side of each copy of a plan, and the words that its sums are taken over.

    Made while the engine serves: 400 pieces with ten views each cost 5 ms on the host.
    """

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self.views = views
        self._words = [_rows(view) if view.is_contiguous() and _in_place(view) else None for view in views]

    def parts(self, index: int) -> list[torch.Tensor]:
        return _parts(*(self._words[index] or _rows(self.views[index])))


def sums(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One int64 for each tensor, on their device; equal for equal bits in equal order."""
    parts = [_parts(*_rows(tensor)) for tensor in tensors]
    return _weighed(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")


@torch.no_grad()
def put_and_sum(live: Live, put: Iterable[int]) -> tuple[torch.Tensor, float]:
    """The sums of what is live after `put`, on the host, which yields the index of each piece once it is on its way.
    Also the seconds that the sums took beyond that: on CUDA each piece is summed on a second stream as soon as it has
    arrived."""
    if not live.views or not live.views[0].is_cuda:
        for _ in put:
            pass
        started = time.monotonic()
        return sums(live.views), time.monotonic() - started
    device = live.views[0].device
    copying, summing = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    arrived = [(index, copying.record_event()) for index in put]
    with torch.cuda.stream(summing):
        parts: list[list[torch.Tensor]] = [[] for _ in live.views]
        for index, event in arrived:
            summing.wait_event(event)
            parts[index] = live.parts(index)
        total = _weighed(parts)
    copying.synchronize()
    started = time.monotonic()
    with torch.cuda.stream(summing):
        return total.cpu(), time.monotonic() - started


def copies(live: Sequence[torch.Tensor], pieces: Iterable[torch.Tensor]) -> Iterator[int]:
    """Copy every piece into its live view, for `put_and_sum`. Asynchronous from pinned memory."""
    for index, (target, values) in enumerate(zip(live, pieces, strict=True)):
        target.copy_(values, non_blocking=True)
        yield index


def live_views(plan: CopyPlan, targets: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Where each copy goes."""
    return [copy.write.on(targets[copy.target]) for copy in plan.copies]


def disagreeing(plan: CopyPlan, live: torch.Tensor, expected: torch.Tensor) -> list[str]:
    """Names of checkpoint tensors of which the sums differ."""
    wrong = (live.cpu() != expected.cpu()).nonzero().flatten().tolist()
    return list(dict.fromkeys(plan.copies[index].source for index in wrong))


def _same_bits(live: torch.Tensor, values: torch.Tensor) -> bool:
    expected = values.to(device=live.device, dtype=live.dtype)
    return torch.equal(words(live), words(expected))


def words(tensor: torch.Tensor) -> torch.Tensor:
    """As integers: a NaN equals itself, 0.0 is not -0.0."""
    return tensor.view(_WORDS[tensor.element_size()])


def _rows(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Its words as rows, and those that fill no row."""
    flat = _wide(words(tensor.contiguous()).flatten())
    whole = len(flat) // ROW * ROW
    return flat[:whole].view(-1, ROW), flat[whole:]


def _parts(table: torch.Tensor, rest: torch.Tensor) -> list[torch.Tensor]:
    """Sums of all rows and of all columns of the words, and the words that fill no row, as int64. Few and wide
    reductions: a model has hundreds of pieces, and each launch counts."""
    if not len(table):
        return [rest.to(torch.int64)]
    if table.device.type == "cpu":
        # By numpy: 9.4 GB/s on one core where torch has 6.4, and no OpenMP team for each thread that fills.
        rows = table.numpy()
        return [*(torch.from_numpy(rows.sum(axis=axis, dtype=np.int64)) for axis in (1, 0)), rest.to(torch.int64)]
    return [table.sum(dim=1, dtype=torch.int64), table.sum(dim=0, dtype=torch.int64), rest.to(torch.int64)]


def _weighed(parts: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """One sum for each tensor, modulo 2**64: of its parts, each number times an odd one that depends on its place. All
    tensors together, since a launch for each would take longer than to read them (3,000 launches: 33 ms on an H200)."""
    values = torch.cat([part for each in parts for part in each])
    ends = list(itertools.accumulate((sum(map(len, each)) for each in parts), initial=0))
    bounds = torch.tensor(ends, device=values.device)
    starts = torch.repeat_interleave(bounds[:-1], bounds.diff(), output_size=len(values))
    places = torch.arange(len(values), device=values.device) - starts
    longest = max(stop - start for start, stop in itertools.pairwise(ends))
    running = (values * _weight_table(1 << max(longest - 1, 1).bit_length(), values.device)[places]).cumsum(0)
    return torch.cat([running.new_zeros(1), running])[bounds].diff()


def _wide(words: torch.Tensor) -> torch.Tensor:
    """As int64 where the size allows, whatever the address: both sides must sum the same words. A sum that need not
    widen as it reads is 15 times faster on a CPU (torch 2.13: 6 GB/s against 0.4 per core)."""
    narrow = 8 // words.element_size()
    if narrow == 1 or len(words) % narrow:
        return words
    return (words if _in_place(words) else words.clone()).view(torch.int64)


def _in_place(tensor: torch.Tensor) -> bool:
    """Whether its words can be seen as int64 where they are."""
    return tensor.storage_offset() % (8 // min(8, tensor.element_size())) == 0


@functools.cache
def _weight_table(count: int, device: torch.device) -> torch.Tensor:
    """The first odd int64s of a fixed sequence that differ from place to place."""
    places = torch.arange(count, dtype=torch.int64, device=device)
    mixed = places * 6364136223846793005 + 1442695040888963407
    return (mixed ^ (mixed >> 29)) * 2862933555777941757 | 1
