"""The bytes of one encoded tensor: header, block table, payloads of sections. See docs/delta-format.md.

Every number is checked against the blob's own size and against what its mode allows before anything is allocated
by it. The header and the table carry a digest of their own, and so does each payload: damage is found out before
the base is touched.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from ..errors import BadShard

MAGIC = b"CKPTSYN1"
BLOCK = 1 << 22
"""Elements of a block: what one thread encodes, applies and proves at a time."""

RAW, PLANES, SPARSE, SPARSE_ULP, CLASS_ULP, DENSE_ULP, MASK_ULP = range(7)

MAX_CLASSES = 8
LEVEL = 1
"""Of zstd. Higher levels find nothing more in gaps and signs, and on byte planes they are worse."""

_HEADER = struct.Struct("<8sBBHIQQQ16xQ")
HEADER_BYTES = _HEADER.size
_ROW = struct.Struct("<BBHIQIIQQQ")
ROW = np.dtype(
    [("mode", "u1"), ("zero", "u1", 3), ("changed", "<u4"), ("offset", "<u8"), ("length", "<u4"), ("zeros", "<u4"),
     ("payload", "<u8"), ("base", "<u8"), ("new", "<u8")]
)  # fmt: skip
"""A row of the table, for many at a time."""

_SECTION = struct.Struct("<II")
ALIGN = 8
"""Bytes: payloads, and sections in them, begin at a multiple."""

Bytes = bytes | bytearray | memoryview
Array = npt.NDArray[Any]


class BlockEntry(NamedTuple):
    """One row of the table. Digests are xxh3-64; `changed` counts elements."""

    mode: int
    changed: int
    offset: int
    length: int
    payload: int
    base: int
    new: int


class Blob(NamedTuple):
    """A parsed blob: what it says, and the bytes that it says it of."""

    element_size: int
    block: int
    elements: int
    changed: int
    rows: tuple[BlockEntry, ...]
    data: memoryview

    def span(self, index: int) -> slice:
        """The elements of a block."""
        return slice(index * self.block, min((index + 1) * self.block, self.elements))

    def payload(self, index: int) -> memoryview:
        """The payload of a block, proven by its digest. BadShard if it is not what was written."""
        row = self.rows[index]
        part = self.data[row.offset : row.offset + row.length]
        if xxhash.xxh3_64_intdigest(part) != row.payload:
            raise BadShard(f"delta: block {index} is damaged: its payload's digest differs")
        return part


def pack(element_size: int, elements: int, rows: Sequence[BlockEntry], payloads: Sequence[Bytes], block: int) -> bytes:
    """The blob. `rows` come without offsets."""
    at = head_bytes(len(rows))
    table, placed = [], []
    for row, payload in zip(rows, payloads, strict=True):
        table.append(_ROW.pack(row.mode, 0, 0, row.changed, at, len(payload), 0, row.payload, row.base, row.new))
        placed.append(payload)
        placed.append(bytes(-len(payload) % ALIGN))
        at += len(payload) + len(placed[-1])
    changed = sum(row.changed for row in rows)
    return b"".join([head(element_size, elements, changed, at, block, b"".join(table)), *placed])


def head_bytes(blocks: int) -> int:
    return _HEADER.size + _ROW.size * blocks


def head(element_size: int, elements: int, changed: int, length: int, block: int, table: bytes) -> bytes:
    """Header and table of a blob of `length` bytes; `table` has a ROW for each block."""
    facts = (MAGIC, element_size, block.bit_length() - 1, 0, len(table) // _ROW.size, elements, changed, length)
    start = _HEADER.pack(*facts, 0)[:-8]
    return b"".join([start, xxhash.xxh3_64_intdigest(start + table).to_bytes(8, "little"), table])


def parse(data: Bytes, element_size: int, elements: int) -> Blob:
    """The blob of a tensor of this element size and count. BadShard for anything else; nothing is decoded."""
    view = memoryview(data).cast("B")
    if len(view) < _HEADER.size:
        raise BadShard(f"delta: {len(view)} bytes are less than a header")
    magic, size, exponent, zero, blocks, count, changed, length, digest = _HEADER.unpack_from(view)
    if magic != MAGIC:
        raise BadShard("delta: not of the encoding ckptsync-1")
    if length != len(view):
        raise BadShard(f"delta: says it has {length} bytes, and has {len(view)}")
    if not 3 <= exponent <= 24 or zero or blocks != -(-count // (1 << exponent)):
        raise BadShard("delta: impossible header")
    end = _HEADER.size + _ROW.size * blocks
    if end > len(view):
        raise BadShard("delta: truncated inside the table")
    state = xxhash.xxh3_64(view[: _HEADER.size - 8])
    state.update(view[_HEADER.size : end])
    if state.intdigest() != digest:
        raise BadShard("delta: header or table are damaged: their digest differs")
    if (size, count) != (element_size, elements):
        raise BadShard(
            f"delta: for {count} elements of {size} bytes, where the tensor has {elements} of {element_size}"
        )
    rows = tuple(_row(view, index, end) for index in range(blocks))
    blob = Blob(size, 1 << exponent, count, changed, rows, view)
    _check_rows(blob)
    return blob


def read_counts(head: Bytes) -> int:
    """Changed elements, from a blob's first HEADER_BYTES. BadShard if they are no header. Not proven."""
    magic, _, _, _, _, elements, changed, _, _ = _HEADER.unpack_from(head)
    if magic != MAGIC or changed > elements:
        raise BadShard("delta: not of the encoding ckptsync-1")
    return int(changed)


def _row(view: memoryview, index: int, table_end: int) -> BlockEntry:
    mode, zero1, zero2, changed, offset, length, zero3, payload, base, new = _ROW.unpack_from(
        view, _HEADER.size + _ROW.size * index
    )
    if mode > MASK_ULP or zero1 or zero2 or zero3 or offset % ALIGN:
        raise BadShard(f"delta: block {index} has an impossible row")
    if not table_end <= offset <= len(view) or offset + length > len(view):
        raise BadShard(f"delta: block {index} lies outside the blob")
    return BlockEntry(mode, changed, offset, length, payload, base, new)


def _check_rows(blob: Blob) -> None:
    if sum(row.changed for row in blob.rows) != blob.changed:
        raise BadShard("delta: the blocks' changes do not add up")
    for index, row in enumerate(blob.rows):
        span = blob.span(index)
        if row.changed > span.stop - span.start or (row.changed == 0) != (row.length == 0):
            raise BadShard(f"delta: block {index} has {row.changed} changes in {row.length} bytes")


# -- sections ------------------------------------------------------------------------------------------------


_WORTH = 32
"""Bytes above which a frame may be smaller than what is in it."""


def pack_sections(sections: Sequence[Array]) -> bytes:
    """A payload: how long each section is, stored and raw, then the sections, aligned; raw where zstd gains nothing."""
    compressor, table, body = _zstd().compressor, [], []
    for section in sections:
        raw = np.ascontiguousarray(section).data.cast("B") if len(section) else memoryview(b"")
        stored: Bytes = compressor.compress(raw) if len(raw) > _WORTH else raw
        stored = stored if len(stored) < len(raw) else raw
        table.append(_SECTION.pack(len(stored), len(raw)))
        body += [stored, bytes(-len(stored) % ALIGN)]
    return b"".join([*table, *body])


def packed_sections(
    data: npt.NDArray[np.uint8], begins: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], threads: int
) -> tuple[list[Bytes], npt.NDArray[np.int64]]:
    """Sections that lie in `data`, as `pack_sections` stores them, and their lengths: the same frames, but made in one
    call by `threads`; 0 for this one, -1 for one on every core."""
    whole, worth, stored = data.data, np.flatnonzero(sizes > _WORTH), sizes.copy()
    found: list[Any] = [whole[at:end] for at, end in zip(begins.tolist(), (begins + sizes).tolist(), strict=True)]
    if len(worth):
        segments = zstandard.BufferWithSegments(whole, np.stack([begins, sizes], 1)[worth].astype("<u8").tobytes())
        frames = _zstd().compressor.multi_compress_to_buffer(segments, threads=threads)
        lengths = np.fromiter((len(frames[at]) for at in range(len(worth))), np.int64, len(worth))
        for number in np.flatnonzero(lengths < sizes[worth]).tolist():
            found[worth[number]] = frames[number]
        stored[worth] = np.minimum(lengths, sizes[worth])
    return found, stored


class Sections:
    """Takes the sections of a payload in order; the caller says how many there are, and how large each may be."""

    def __init__(self, payload: memoryview, count: int) -> None:
        self._payload, self._at = payload, _SECTION.size * count
        if self._at > len(payload):
            raise BadShard("delta: a payload ends inside its section table")
        self._table = iter(list(_SECTION.iter_unpack(payload[: self._at])))

    def take(self, at_most: int, *, exactly: bool = False) -> npt.NDArray[np.uint8]:
        """The next section's bytes, read-only. BadShard if it is larger than `at_most`, before it is inflated."""
        stored, raw = next(self._table)
        if raw > at_most or (exactly and raw != at_most) or stored > raw:
            raise BadShard(f"delta: a section of {raw} bytes, where {at_most} are possible")
        part = self._payload[self._at : self._at + stored]
        if len(part) != stored:
            raise BadShard("delta: a section ends outside its payload")
        self._at += stored + -stored % ALIGN
        return np.frombuffer(part if stored == raw else _inflate(part, raw), dtype=np.uint8)


class _Zstd(threading.local):
    """One of each for every thread: making them costs more than a small section does."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


@functools.cache
def _zstd() -> _Zstd:
    return _Zstd()


def _inflate(frame: memoryview, size: int) -> bytes:
    try:
        found = zstandard.get_frame_parameters(frame)
        # Without a content size in the frame the library takes `max_output_size` on trust.
        if found.content_size != size or found.dict_id:
            raise BadShard("delta: a zstd frame of another size than its section")
        data: bytes = _zstd().decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BadShard(f"delta: a section does not inflate: {error}") from error
    return data
