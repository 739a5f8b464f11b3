"""What the live model holds, read through the copy plan run backwards.

Three looks, from slow and absolute to fast:

- `checkpoint_digests`: live values in checkpoint layout, digested as the manifest does it. Proves, bit for bit,
  that the engine holds the published tensors. For tensors that this rank holds whole, and uncast.
- `differing`: live values compared with the payload, element by element, as bits. For slices and casts too.
- `sums`: on the device, one weighted sum for each copy (see `_sum`); the same sums of the payload are taken on
  the host before the pause. The values are read twice at HBM speed, while later copies are still on their way
  (`apply_and_sum`). Proves that each copy arrived, at its place: a changed, missing, shifted or swapped piece
  changes them. It is no defence against a forger, who could keep the sums of every row and every column.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from ckptsync.digest import DEFAULT, digest
from ckptsync.shards.tensors import tensor_bytes

from .copy_plan import CopyPlan, apply

ROW = 4096
"""Words in a row of `_sum`."""

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


def sums(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One int64 for each tensor, on their device; equal for equal bits in equal order."""
    found = [_sum(tensor) for tensor in tensors]
    return torch.stack(found) if found else torch.empty(0, dtype=torch.int64, device="cpu")


@torch.no_grad()
def apply_and_sum(
    plan: CopyPlan, targets: Mapping[str, torch.Tensor], payload: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, float]:
    """`apply`, and the sums of what is live then, on the host. Also the seconds that the sums took beyond the
    copies: on CUDA each piece is summed on a second stream as soon as it has arrived."""
    live = live_views(plan, targets)
    if not live or not live[0].is_cuda:
        apply(plan, targets, payload)
        started = time.monotonic()
        return sums(live), time.monotonic() - started
    copying, summing = torch.cuda.current_stream(live[0].device), torch.cuda.Stream(live[0].device)  # type: ignore[no-untyped-call]
    arrived = []
    for target, values in zip(live, payload, strict=True):
        target.copy_(values, non_blocking=True)
        arrived.append(copying.record_event())
    found = []
    with torch.cuda.stream(summing):
        for target, event in zip(live, arrived, strict=True):
            summing.wait_event(event)
            found.append(_sum(target))
        total = torch.stack(found)
    copying.synchronize()
    started = time.monotonic()
    with torch.cuda.stream(summing):
        return total.cpu(), time.monotonic() - started


def live_views(plan: CopyPlan, targets: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The live side of each copy."""
    return [copy.write.on(targets[copy.target]) for copy in plan.copies]


def disagreeing(plan: CopyPlan, live: torch.Tensor, expected: torch.Tensor) -> list[str]:
    """Names of checkpoint tensors of which the sums differ."""
    wrong = (live.cpu() != expected.cpu()).nonzero().flatten().tolist()
    return list(dict.fromkeys(plan.copies[index].source for index in wrong))


def _same_bits(live: torch.Tensor, values: torch.Tensor) -> bool:
    expected = values.to(device=live.device, dtype=live.dtype)
    return torch.equal(_words(live), _words(expected))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_WORDS[tensor.element_size()])  # integers: a NaN equals itself, 0.0 is not -0.0


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of all rows and of all columns of the words, each times an odd number that depends on its place.
    Few and wide reductions, which widen as they read: a model has hundreds of pieces, and each launch counts."""
    words = _wide(_words(tensor.contiguous()).flatten())
    whole = len(words) // ROW * ROW
    parts = []
    if whole:
        table = words[:whole].view(-1, ROW)
        parts = [table.sum(dim=1, dtype=torch.int64), table.sum(dim=0, dtype=torch.int64)]
    if whole < len(words) or not whole:
        parts.append(words[whole:].to(torch.int64))
    values = torch.cat(parts) if len(parts) > 1 else parts[0]
    return (values * _weights(len(values), values.device)).sum()


def _wide(words: torch.Tensor) -> torch.Tensor:
    """As int32 where the size allows, whatever the address: both sides must sum the same words."""
    narrow = 4 // words.element_size()
    if narrow <= 1 or len(words) % narrow:
        return words
    aligned = words if words.storage_offset() % narrow == 0 else words.clone()
    return aligned.view(torch.int32)


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """The first odd int64s of a fixed sequence that differ from place to place."""
    return _weight_table(1 << max(count - 1, 1).bit_length(), device)[:count]


@functools.cache
def _weight_table(count: int, device: torch.device) -> torch.Tensor:
    places = torch.arange(count, dtype=torch.int64, device=device)
    mixed = places * 6364136223846793005 + 1442695040888963407
    return (mixed ^ (mixed >> 29)) * 2862933555777941757 | 1
