"""What one rank needs of a version, one piece for each copy of a plan, ready to be put into the live model."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import torch

from .changes import Changes, Found, fill, host_memory, most, pack, patch
from .copy_plan import CopyPlan, apply, gather
from .readback import Live, copies, differing, disagreeing, live_views, put_and_sum, sums, wrong_fills

ALIGN = 512
CHUNK = 512 << 20
FILLERS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Threads that fill pinned memory; the engine's own need cores meanwhile."""

Targets = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load found afterwards."""

    wrong: list[str]
    """Names of what differs in the live model."""

    seconds: float
    """What this look added."""

    moved: int | None = None
    """Bytes, where only what changed was put; None where all of it was."""

    why: str = ""
    """Why all of it was, after what changed had been put."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces, and how a load of them is proven."""

    folder: str
    pieces: list[torch.Tensor]
    expected: torch.Tensor | None = None
    """Their sums, taken before the pause; None where the proof is element by element."""

    number: int | None = None
    """Which filling of the pinned memory this is; None for views."""

    base: int | None = None
    """The filling before, if `changes` lead from it to this one."""

    changes: Changes | None = None

    targets: Targets | None = None
    """What was live while they were gathered, and its pieces: seen anew in the pause if that moved."""

    live: Live | None = None

    @property
    def proof(self) -> Literal["elements", "sums"]:
        return "elements" if self.expected is None else "sums"

    def load(self, plan: CopyPlan, targets: Targets, held: int | None = None) -> Loaded:
        """Put them into the live model, which holds the filling `held`: what changed since, where that is known, else
        all of it. If the model does not hold the version afterwards, somebody else has written to it since: then all of
        it after all."""
        if self.expected is None:
            apply(plan, targets, self.pieces)
            started = time.monotonic()
            return Loaded(differing(plan, targets, self.pieces), time.monotonic() - started)
        live = self.live if self.live and self.targets is targets else Live(live_views(plan, targets))
        why = ""

        def put(how: Iterable[int], expected: torch.Tensor = self.expected) -> tuple[list[str], float]:
            found, seconds = put_and_sum(live, how)
            return disagreeing(plan, found, expected) + wrong_fills(plan, targets), seconds

        if self.changes is not None and held is not None and self.base == held:
            wrong, seconds = put(self.changes.put(live.views, self.pieces))
            if not wrong:
                return Loaded([], seconds, self.changes.nbytes)
            why = f"{wrong[0]} was not what was loaded last, so everything was copied"
        return Loaded(*put(copies(live.views, self.pieces)), why=why)


class Payload:
    """Pinned memory of the size of this rank's weights, used again for each version; on a CPU just views.

    What it holds is `_ready`, or nothing that is known. Each filling has a number. Who knows the number of the one that
    the live model holds gets what changed since, if that is still here when the next one is filled in.
    """

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._ready: Pieces | None = None
        self._plan: CopyPlan | None = None
        self._numbers = itertools.count(1)

    def of(
        self,
        folder: str,
        plan: CopyPlan,
        targets: Targets,
        checkpoint: Mapping[str, torch.Tensor],
        pinned: bool,
        held: int | None = None,
    ) -> Pieces:
        """The pieces of the version in `folder`; the bytes move only if they are not here yet. `held`: the filling that
        the live model holds. RuntimeError if there is no pinned memory to be had."""
        if not pinned:
            return Pieces(folder, gather(plan, checkpoint))
        if self._ready is None or self._ready.folder != folder or self._plan is not plan:
            views = gather(plan, checkpoint)
            here = self._ready.number if self._ready is not None and self._plan is plan else None
            self._ready, self._plan = None, plan
            self._ready = self._filled(folder, plan, targets, views, held if here == held else None)
        return self._ready

    def forget(self) -> None:
        """Give the memory back."""
        self._chunks, self._sizes, self._ready, self._plan = [], [], None, None

    def _filled(
        self, folder: str, plan: CopyPlan, targets: Targets, views: list[torch.Tensor], base: int | None
    ) -> Pieces:
        """The pieces, contiguous and in the live dtype, their sums, and what makes them of `base`: a cast or a strided
        read happens here and not in the pause."""
        live = live_views(plan, targets)
        pieces = self._pieces(live)
        put: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Found | None] = _fill if base is None else _patch

        def each(piece: torch.Tensor, view: torch.Tensor, target: torch.Tensor) -> tuple[Found | None, torch.Tensor]:
            return put(piece, view, target), sums([piece])

        with ThreadPoolExecutor(FILLERS, thread_name_prefix="ckptsync-fill") as pool:
            done = list(pool.map(each, pieces, views, live))
        expected = torch.cat([sums([]), *(found for _, found in done)])
        changes = None if base is None else pack([found for found, _ in done], pieces)
        if changes is not None and len(changes.whole) == len(pieces):
            changes = None
        return Pieces(folder, pieces, expected, next(self._numbers), base, changes, targets, Live(live))

    def _pieces(self, live: list[torch.Tensor]) -> list[torch.Tensor]:
        """Pinned memory for each live view: the same every time, for one plan."""
        used = [target.numel() * target.element_size() for target in live]
        places = self._places([-(-size // ALIGN) * ALIGN for size in used])
        return [
            place[:size].view(target.dtype).view(target.shape)
            for place, size, target in zip(places, used, live, strict=True)
        ]

    def _places(self, sizes: list[int]) -> Iterator[torch.Tensor]:
        """Memory for each piece, in order."""
        if self._sizes != sizes:
            self._chunks = []  # first, so that both need not fit
            self._chunks = [host_memory(size) for size in _chunks(sizes)]
            self._sizes = sizes
        chunks, chunk, start = iter(self._chunks), torch.empty(0, dtype=torch.uint8, device="cpu"), 0
        for size in sizes:
            if start + size > chunk.numel():
                chunk, start = next(chunks), 0
            yield chunk[start : start + size]
            start += size


def _chunks(sizes: list[int]) -> Iterator[int]:
    """Sizes of chunks that hold whole pieces. torch rounds each pinned allocation up to a power of two: one for all
    would take up to twice the memory."""
    chunk = 0
    for size in sizes:
        if chunk and chunk + size > CHUNK:
            yield chunk
            chunk = 0
        chunk += size
    yield chunk


def _fill(piece: torch.Tensor, view: torch.Tensor, _: torch.Tensor) -> None:
    fill(piece, view)


def _patch(piece: torch.Tensor, view: torch.Tensor, live: torch.Tensor) -> Found | None:
    return patch(piece, view, most(live))
