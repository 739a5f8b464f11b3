"""What changed between two versions of a rank's pieces: found while the engine serves, scattered in the pause.

    found = [patch(piece, view, most(live)) for …]    each piece is the new version afterwards
    changes = pack(found, pieces)                     places and values, in a few pinned buffers
    for index in changes.put(live, pieces): …         into the live parameters

Elements are compared and moved as integers: a NaN equals itself, 0.0 is not -0.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .readback import words

MOST = 8
"""A piece of which more than one element in so many changed is copied whole. On an H200 a scatter of bf16 takes as long
as the copy at one in four (2.2 of 2.4 ms for 130 MB), and half as long at one in eight; places and values are three
times the bytes of what they stand for, in pinned memory too."""

SMALL = 16 << 10
"""Bytes of a piece that is copied whole if anything in it changed: one copy is cheaper to launch than a scatter."""

CHUNK = 32 << 20
"""Bytes of places and values that are on the device at a time: an engine leaves little memory free. Two to the power of
something, so that torch's cache of pinned memory has it again for the next version."""

PART = CHUNK // 16
"""Places and values of so many elements fit into a chunk, whatever the dtype."""

BLOCK = 256 << 10
"""Elements that are compared at a time: what stays in a core's own cache (three times faster than all at once)."""

SAMPLE = 4096
"""Elements of a piece that are compared first."""

Found = tuple[npt.NDArray[np.int32], npt.NDArray[Any]]
"""Places in a piece, ascending, and the new words there."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the changes of one piece, within a chunk."""

    piece: int
    places: slice
    """In the chunk's places."""

    values: slice
    """In the chunk's bytes."""

    last: bool
    """Whether the piece has no more of them."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The places of all parts, as int32, and after them the values of each."""

    memory: torch.Tensor
    count: int
    parts: list[Part]


@dataclass(frozen=True, slots=True)
class Changes:
    """What makes the live model the new version, if it holds the one before."""

    chunks: list[Chunk]
    whole: list[int]
    """Pieces that are copied whole."""

    untouched: list[int]
    nbytes: int
    """Bytes over the bus."""

    def put(self, live: Sequence[torch.Tensor], pieces: Sequence[torch.Tensor]) -> Iterator[int]:
        """Into the live views. Yields the index of every piece once all of it is on its way, on the current stream."""
        for chunk in self.chunks:
            yield from _scatter(chunk, live)
        for index in self.whole:
            live[index].copy_(pieces[index], non_blocking=True)
            yield index
        yield from self.untouched


def most(live: torch.Tensor) -> int:
    """Up to how many changed elements are scattered into this live view."""
    small = live.numel() * live.element_size() <= SMALL
    scattered = live.is_contiguous() and not small and live.numel() < 1 << 31
    return live.numel() // MOST if scattered else 0


def patch(piece: torch.Tensor, view: torch.Tensor, most: int) -> Found | None:
    """Make the piece what the view is, cast and contiguous. What changed; None for more than `most` elements."""
    old, new = _array(piece), _cast(view, piece)
    places = _differing(old, new, most)
    if places is None:
        np.copyto(old, new)
        return None
    values = new[places]
    old[places] = values
    return places, values


def fill(piece: torch.Tensor, view: torch.Tensor) -> None:
    """Make the piece what the view is, whatever was there. By numpy, which stays on this thread: torch would take a
    team of OpenMP for each of those that fill at once."""
    np.copyto(_array(piece), _cast(view, piece))


def pack(found: Sequence[Found | None], pieces: Sequence[torch.Tensor]) -> Changes:
    """RuntimeError if there is no pinned memory to be had."""
    whole = [index for index, each in enumerate(found) if each is None]
    untouched = [index for index, each in enumerate(found) if each is not None and not len(each[0])]
    chunks = [_chunk(parts) for parts in _batches(found)]
    nbytes = sum(chunk.memory.nbytes for chunk in chunks) + sum(pieces[index].nbytes for index in whole)
    return Changes(chunks, whole, untouched, nbytes)


def host_memory(nbytes: int) -> torch.Tensor:
    """Pinned where there is CUDA. RuntimeError if there is none to be had."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available())


def _array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    return words(tensor).flatten().numpy()


def _cast(view: torch.Tensor, piece: torch.Tensor) -> npt.NDArray[Any]:
    return _array(view.to(piece.dtype).contiguous())


def _differing(old: npt.NDArray[Any], new: npt.NDArray[Any], most: int) -> npt.NDArray[np.int32] | None:
    """Where the two differ; None as soon as there are more places than `most`, or if a sample says so at once: to list
    places that are many takes ten times longer than to copy all."""
    step = (len(old) // SAMPLE) | 1  # odd: rows are even, and it must not go down a column
    if np.count_nonzero(old[::step] != new[::step]) * step > 2 * most:
        return None
    found, count = [np.empty(0, np.int32)], 0
    for start in range(0, len(old), BLOCK):
        places = _differing_block(old[start : start + BLOCK], new[start : start + BLOCK])
        count += len(places)
        if count > most:
            return None
        found.append((places + start).astype(np.int32))
    return np.concatenate(found)


def _differing_block(old: npt.NDArray[Any], new: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Eight bytes at a time: at 1 % of bf16 elements, 24 of 25 such words are equal."""
    if old.nbytes % 8:
        return np.flatnonzero(old != new)
    olds, news, each = old.view(np.int64), new.view(np.int64), 8 // old.itemsize
    at = np.flatnonzero(olds != news)
    within = np.flatnonzero((olds[at] ^ news[at]).view(old.dtype))
    return at[within // each] * each + within % each


Share = tuple[int, Found, bool]


def _batches(found: Sequence[Found | None]) -> Iterator[list[Share]]:
    """The changes of all pieces in order, as much as goes into a chunk at a time."""
    batch, size = list[Share](), 0
    for index, each in enumerate(found):
        if each is None:
            continue
        places, values = each
        for start in range(0, len(places), PART):
            share = places[start : start + PART], values[start : start + PART]
            nbytes = _aligned(share[0].nbytes) + _aligned(share[1].nbytes)
            if batch and size + nbytes > CHUNK:
                yield batch
                batch, size = [], 0
            batch.append((index, share, start + PART >= len(places)))
            size += nbytes
    if batch:
        yield batch


def _chunk(shares: list[Share]) -> Chunk:
    count = sum(len(places) for _, (places, _), _ in shares)
    begin = _aligned(count * 4)
    memory = host_memory(begin + sum(_aligned(values.nbytes) for _, (_, values), _ in shares))
    there, parts, place = memory.numpy(), list[Part](), 0
    there[: count * 4].view(np.int32)[:] = np.concatenate([places for _, (places, _), _ in shares])
    for index, (places, values), last in shares:
        where = slice(begin, begin + values.nbytes)
        there[where] = values.view(np.uint8)
        parts.append(Part(index, slice(place, place + len(places)), where, last))
        place, begin = place + len(places), begin + _aligned(values.nbytes)
    return Chunk(memory, count, parts)


def _scatter(chunk: Chunk, live: Sequence[torch.Tensor]) -> Iterator[int]:
    memory = chunk.memory.to(live[chunk.parts[0].piece].device, non_blocking=True)
    places = memory[: chunk.count * 4].view(torch.int32).to(torch.int64)
    for part in chunk.parts:
        target = words(live[part.piece]).view(-1)
        target.index_copy_(0, places[part.places], memory[part.values].view(target.dtype))
        if part.last:
            yield part.piece


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
