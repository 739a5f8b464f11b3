"""One tensor's change as bytes, and back: lossless for every bit pattern of every dtype.

    blob = encode(old, new, element_size=2)          # None if nothing changed
    apply(parse(blob, 2, len(old) // 2), image)      # image: a writable copy of old, becomes new

"ULP" is the difference of the raw integer patterns modulo the element's size: NaNs, infinities, fp8 and packed
integers take the same path, and nothing drifts.
"""

from __future__ import annotations

import functools
from concurrent.futures import Executor
from typing import Literal

import numpy as np
import xxhash

from ..errors import BadShard
from ..safetensors_format import DTYPE_BITS
from . import layout, modes
from .kernels import kernels
from .layout import BLOCK, Blob, BlockEntry, Bytes, parse
from .reference import U32, Elements

FEW = 256
"""Changes in a block below which the sections of several classes cost more than they save."""

Effort = Literal["fast", "best"]

DENSE = 0.6
"""Fraction of changed elements from which on every difference is stored."""

MASK = 0.3
"""Fraction from which on a bit for each element is less than a gap for each change."""


def element_size(dtype: str) -> int:
    """Bytes of what is compared as one integer. Eight-byte elements are taken as two, packed ones as bytes."""
    return min(4, max(1, DTYPE_BITS[dtype] // 8))


def encode(
    old: Bytes, new: Bytes, size: int, *, effort: Effort = "best", block: int = BLOCK, pool: Executor | None = None
) -> bytes | None:
    """The blob that makes `old` into `new`, two buffers of the same length; None if they are equal.

    `pool`: threads that encode blocks side by side. At most a hundredth larger than `new`.
    """
    if not len(old):
        return None
    before, after = as_elements(memoryview(old).toreadonly(), size), as_elements(memoryview(new).toreadonly(), size)
    starts = range(0, len(before), block)
    one = functools.partial(_encode_at, before, after, block, effort)
    rows, payloads = zip(*(pool.map if pool and len(starts) > 1 else map)(one, starts), strict=True)
    if not any(row.changed for row in rows):
        return None
    return layout.pack(size, len(before), rows, payloads, block)


def _encode_at(before: Elements, after: Elements, block: int, effort: Effort, at: int) -> tuple[BlockEntry, bytes]:
    return encode_block(before[at : at + block], after[at : at + block], effort)


def encode_block(old: Elements, new: Elements, effort: Effort) -> tuple[BlockEntry, bytes]:
    """A row of the table, without its offset, and the payload."""
    base = digest(old)
    places, differences = kernels().changed(old, new)
    if not len(places):
        return BlockEntry(layout.SPARSE_ULP, 0, 0, 0, digest(memoryview(b"")), base, base), b""
    mode, payload = _smallest(old, new, places, differences, effort)
    return BlockEntry(mode, len(places), 0, len(payload), digest(payload), base, digest(new)), payload


def _smallest(old: Elements, new: Elements, places: U32, differences: Elements, effort: Effort) -> tuple[int, bytes]:
    tried = [(mode, modes.encode(mode, old, new, places, differences)) for mode in _modes(old, places, effort)]
    mode, payload = min(tried, key=lambda each: len(each[1]))
    if len(payload) < old.nbytes:
        return mode, payload
    return layout.RAW, modes.encode(layout.RAW, old, new, places, differences)


def _modes(old: Elements, places: U32, effort: Effort) -> tuple[int, ...]:
    """What may be smallest for so many changes."""
    density = len(places) / len(old)
    if density > DENSE:
        return layout.DENSE_ULP, layout.PLANES
    if effort == "best" and len(places) >= FEW:
        return (layout.CLASS_ULP,)
    return (layout.MASK_ULP if density > MASK else layout.SPARSE_ULP,)


def apply(blob: Blob, image: memoryview | bytearray, *, prove: bool = True) -> None:
    """Change `image`, which holds the old tensor, into the new one, block by block.

    BadShard at the first block that is not the base (it is untouched), or that does not become what was published
    (it is not the base any more). `prove`: by both digests of each block; only a caller who proves it otherwise may
    leave that out.
    """
    elements = as_elements(image, blob.element_size)
    for index in range(len(blob.rows)):
        apply_block(blob, index, elements[blob.span(index)], prove=prove)


def apply_block(blob: Blob, index: int, block: Elements, *, prove: bool = True) -> None:
    """The same for one block, given as its elements."""
    row = blob.rows[index]
    if prove and digest(block) != row.base:
        raise BadShard(f"delta: block {index} is not of the base that the delta was taken against")
    if not row.changed:
        return
    modes.apply(row.mode, blob.payload(index), block, row.changed)
    if prove and digest(block) != row.new:
        raise BadShard(f"delta: block {index} did not become what was published")


def as_elements(data: Bytes, size: int) -> Elements:
    """A buffer as unsigned integers of `size` bytes; writable if the buffer is."""
    return np.frombuffer(data, dtype=f"<u{size}")


def digest(data: Bytes | Elements) -> int:
    return xxhash.xxh3_64_intdigest(data.data if isinstance(data, np.ndarray) else data)


__all__ = ["apply", "apply_block", "as_elements", "digest", "element_size", "encode", "encode_block", "parse"]
