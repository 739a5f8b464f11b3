"""What one rank needs of a version, one piece for each copy of a plan, ready to be copied."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from .copy_plan import CopyPlan, apply, gather
from .readback import apply_and_sum, differing, disagreeing, sums, wrong_fills

ALIGN = 512
CHUNK = 512 << 20


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces, and how a load of them is proven."""

    folder: str
    pieces: list[torch.Tensor]
    expected: torch.Tensor | None
    """Their sums, taken before the pause; None where the proof is element by element."""

    @property
    def proof(self) -> Literal["elements", "sums"]:
        return "elements" if self.expected is None else "sums"

    def load(self, plan: CopyPlan, targets: Mapping[str, torch.Tensor]) -> tuple[list[str], float]:
        """Put them into the live model. Names of what differs there afterwards, and the seconds that this look
        added."""
        if self.expected is None:
            apply(plan, targets, self.pieces)
            started = time.monotonic()
            return differing(plan, targets, self.pieces), time.monotonic() - started
        live, seconds = apply_and_sum(plan, targets, self.pieces)
        return disagreeing(plan, live, self.expected) + wrong_fills(plan, targets), seconds


class Payload:
    """Pinned memory of the size of this rank's weights, used again for each version; on a CPU just views."""

    def __init__(self) -> None:
        self._chunks: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._ready: Pieces | None = None
        self._plan: CopyPlan | None = None

    def of(
        self,
        folder: str,
        plan: CopyPlan,
        targets: Mapping[str, torch.Tensor],
        checkpoint: Mapping[str, torch.Tensor],
        pinned: bool,
    ) -> Pieces:
        """The pieces of the version in `folder`; the bytes move only if they are not here yet. RuntimeError if
        there is no pinned memory to be had."""
        if not pinned:
            return Pieces(folder, gather(plan, checkpoint), None)
        if self._ready is None or self._ready.folder != folder or self._plan is not plan:
            self._ready, self._plan = None, plan
            pieces = self._fill(plan, targets, gather(plan, checkpoint))
            self._ready = Pieces(folder, pieces, sums(pieces))
        return self._ready

    def forget(self) -> None:
        """Give the memory back."""
        self._chunks, self._sizes, self._ready, self._plan = [], [], None, None

    def _fill(
        self, plan: CopyPlan, targets: Mapping[str, torch.Tensor], views: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Contiguous, in the live dtype: a cast or a strided read happens here and not in the pause."""
        dtypes = [targets[copy.target].dtype for copy in plan.copies]
        used = [view.numel() * dtype.itemsize for view, dtype in zip(views, dtypes, strict=True)]
        places = self._places([-(-size // ALIGN) * ALIGN for size in used])
        return [
            place[:size].view(dtype).view(view.shape).copy_(view)
            for place, size, dtype, view in zip(places, used, dtypes, views, strict=True)
        ]

    def _places(self, sizes: list[int]) -> Iterator[torch.Tensor]:
        """Memory for each piece, in order."""
        if self._sizes != sizes:
            self._chunks = []  # first, so that both need not fit
            pinned = torch.cuda.is_available()
            self._chunks = [
                torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned) for size in _chunks(sizes)
            ]
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
