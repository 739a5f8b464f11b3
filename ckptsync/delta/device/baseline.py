"""The bytes of a committed version on the device, and what changed since, as blobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ..codec import Effort, encode_block
from ..layout import BLOCK
from . import xxh3
from .blobs import Made, Written, blobs_of, written
from .compare import Array, Found, apply, changed_of, compact, fetch, laid_out, on_line, scan, whole_of
from .flat import INTEGERS, Line, aligned, line_of
from .groups import CHUNK, Grouped, grouped
from .magnitudes import sampled
from .payloads import packed
from .sections import Sections, sections_of
from .transfer import to_host

Digests = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(slots=True)
class _Held:
    """All tensors of one element size on one device, on a line, with what is known from when they were the new ones."""

    line: Line
    base: torch.Tensor
    digests: Digests
    samples: torch.Tensor | None = None
    """Taken when they are first needed; `prepare` does it before."""


class Move(NamedTuple):
    """How a line becomes the next version's."""

    found: Found
    digests: Digests


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs from a baseline."""

    blobs: Mapping[str, memoryview]
    """By tensor; one that did not change has none. They lie in one piece of memory, which each of them keeps."""

    moves: Sequence[Move]
    """For each line, on the device: 6 bytes for each changed element of two."""


class DeviceBaseline:
    """A copy of tensors on their device; they may be of any dtypes. `block` is a multiple of `flat.ALIGN`.

    Takes as much device memory as they do, and while it compares an eighth of that, 10 bytes for each change of an
    element of two, and what `groups.AT_ONCE` says; with effort "best" what `groups.CLASSED` and `groups.CHUNK` do.
    Kernels run on the current stream, which the calls wait for.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], *, block: int = BLOCK, chunk: int = CHUNK) -> None:
        lying = {name: aligned(tensor) for name, tensor in tensors.items()}
        self._lengths = {name: tensor.numel() for name, tensor in tensors.items()}
        self._chunk = chunk
        self._held = [
            _hold(line_of({name: self._lengths[name] for name in group}, size, device, block), lying)
            for (device, size), group in _groups(tensors).items()
        ]

    @property
    def nbytes(self) -> int:
        return sum(held.base.nbytes for held in self._held)

    @property
    def names(self) -> set[str]:
        return set(self._lengths)

    def prepare(self) -> None:
        """Take the samples that the next `encode` with effort "best" needs: best after `move`, while nobody waits."""
        for held in self._held:
            if held.samples is None:
                held.samples = sampled(held.line, held.base)

    @torch.no_grad()
    def encode(
        self, tensors: Mapping[str, torch.Tensor], *, effort: Effort = "best", pool: Executor | None = None
    ) -> Changes:
        """The blobs that make the baseline into `tensors`, which have the names and shapes of those that it is of.

        To the byte what `codec.encode` makes. The tensors may change as soon as it returns. `pool`: threads for what
        the host does while the device goes on; with one, every core compresses.
        """
        if effort == "best":
            self.prepare()
        lying = {name: aligned(tensor) for name, tensor in tensors.items()}
        each = [_Encoding(held, effort, pool) for held in self._held]
        for encoding in each:
            encoding.run(lying, self._chunk)
        blobs = {name: blob for encoding in each for name, blob in encoding.blobs(self._lengths)}
        return Changes(blobs, [encoding.move for encoding in each])

    @torch.no_grad()
    def move(self, changes: Changes) -> None:
        """Become the version that `changes` lead to."""
        for held, move in zip(self._held, changes.moves, strict=True):
            apply(held.line, held.base, move.found)
            held.digests, held.samples = move.digests, None


def _hold(line: Line, tensors: Mapping[str, torch.Tensor]) -> _Held:
    base = line.fill(torch.zeros(line.size, dtype=INTEGERS[line.width], device=line.device), tensors)
    scanned = scan(line, base, on_line(line, base))
    states, rests = to_host([xxh3.fold(line, scanned.sums), scanned.rests])
    return _Held(line, base, xxh3.finish(line, states, rests))


def _groups(tensors: Mapping[str, torch.Tensor]) -> dict[tuple[torch.device, int], list[str]]:
    groups: dict[tuple[torch.device, int], list[str]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            groups.setdefault((tensor.device, min(4, tensor.dtype.itemsize)), []).append(name)
    return groups


@dataclass(slots=True)
class _Encoding:
    """One `encode` of one line: `run`, then `blobs`."""

    held: _Held
    effort: Effort
    pool: Executor | None
    runs: list[Future[Written]] = field(default_factory=list)
    whole: Future[dict[int, Made]] = field(init=False)
    found: Found = field(init=False)
    digests: Future[Digests] = field(init=False)

    @property
    def move(self) -> Move:
        return Move(self.found, self.digests.result())

    def run(self, tensors: Mapping[str, torch.Tensor], chunk: int) -> None:
        line, base, first = self.held.line, self.held.base, 0
        new = laid_out(line, tensors)
        scanned = scan(line, base, new)
        changed, states, rests = to_host([changed_of(line, scanned), xxh3.fold(line, scanned.sums), scanned.rests])
        whole = whole_of(line, changed, self.effort)
        self.whole = self._submit(_all_on_host, fetch(line, base, tensors, whole), self.effort)
        self.found = compact(line, base, new, scanned, changed, whole)
        self.digests = self._submit(xxh3.finish, line, states, rests)
        samples = self.held.samples if self.effort == "best" else None
        for each in grouped(line, base, self.found, samples, chunk):
            sections = sections_of(each.ranks, each.differences, each.counts, each.members)
            self.runs.append(self._submit(self._written, range(first, each.last), each, sections))
            first = each.last
        if first < len(line.blocks):
            self.runs.append(self._submit(self._written, range(first, len(line.blocks))))

    def blobs(self, lengths: Mapping[str, int]) -> Iterator[tuple[str, memoryview]]:
        return blobs_of(self.held.line, lengths, [run.result() for run in self.runs])

    def _submit(self, work: Callable[..., Any], *given: Any) -> Future[Any]:
        return self.pool.submit(work, *given) if self.pool else _at_once(work, *given)

    def _written(self, span: range, found: Grouped | None = None, sections: Sections | None = None) -> Written:
        line, run = self.held.line, None
        made = {index: each for index, each in self.whole.result().items() if index in span}
        if found is not None and sections is not None:
            run = packed(found.blocks, found.counts, sections, -1 if self.pool else 0)
            grown = run.sizes() >= line.sizes[run.indexes] * line.width
            made |= {index: _on_host(*self._both(index), self.effort) for index in run.indexes[grown].tolist()}
            run = run.only(~grown) if grown.any() else run
        old, new = (digests[span.start : span.stop] for digests in (self.held.digests, self.digests.result()))
        return written(line, span, (old, new), run, made)

    def _both(self, index: int) -> tuple[Array, Array]:
        """A block as it was and as it is."""
        block = self.held.line.blocks[index]
        before = self.held.base[block.start : block.start + block.length]
        after, (places, differences) = before.clone(), self.found.of(index)
        after[places.to(torch.int64)] += differences
        kind = np.dtype(f"<u{self.held.line.width}")
        old, new = (each.view(kind) for each in to_host([before, after]))
        return old, new


def _at_once(work: Callable[..., Any], *given: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(work(*given))
    return future


def _all_on_host(blocks: Sequence[tuple[int, Array, Array]], effort: Effort) -> dict[int, Made]:
    return {index: _on_host(old, new, effort) for index, old, new in blocks}


def _on_host(old: Array, new: Array, effort: Effort) -> Made:
    entry, payload = encode_block(old, new, effort)
    return Made(entry.mode, entry.changed, payload, (entry.base, entry.new))
