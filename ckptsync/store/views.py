"""Flat views of callers' buffers."""

from __future__ import annotations

from ..digest import Bytes
from ..errors import BadShard


def flat(data: Bytes) -> memoryview:
    """The bytes of any contiguous buffer. (A memoryview with a 0 in its shape cannot be cast.)"""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def target(action: str, offset: int, buffer: memoryview, size: int) -> memoryview:
    """`buffer` as bytes to be read from `offset`. BadShard if that is not inside a file of `size` bytes."""
    view = flat(buffer)
    if offset < 0 or offset + len(view) > size:
        raise BadShard(f"{action}: bytes {offset} to {offset + len(view)} of only {size}")
    return view
