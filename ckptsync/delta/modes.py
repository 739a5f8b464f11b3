"""What a block's payload says in each mode. Both sides in one place: a payload is made and undone line by line.

Arrays are unsigned integers of the element's size; `base` is the old block, and is changed in place into the new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..errors import BadShard
from . import layout
from .classes import choose_limits
from .kernels import kernels
from .layout import MAX_CLASSES, Sections
from .reference import U8, U32, Elements

SPLIT = 256
"""Mean gap from which on a gap's low byte is stored by itself: runs of the digit 255 cost at least a bit each."""

CLASS = np.dtype([("limit", "<u4"), ("changed", "<u4"), ("split", "u1"), ("zero", "u1", 7)])
PER_CLASS = 6
"""Sections of each."""


def encode(mode: int, old: Elements, new: Elements, places: U32, differences: Elements) -> bytes:
    """The payload that makes `old` into `new`, which differ at `places` by `differences`."""
    if mode == layout.RAW:
        return layout.pack_sections([new])
    if mode == layout.PLANES:
        return layout.pack_sections(_planes(new))
    if mode == layout.DENSE_ULP:
        return layout.pack_sections(_planes(kernels().zigzag(old, new)))
    if mode == layout.MASK_ULP:
        mask = np.zeros(len(old), dtype=np.uint8)
        mask[places] = 1
        return layout.pack_sections([np.packbits(mask, bitorder="little"), *kernels().write_values(differences)])
    if mode == layout.SPARSE:
        split, *gaps = _gaps(places, len(old))
        return layout.pack_sections([records_of([(0, len(places), split)]), *gaps, *_planes(new[places])])
    return _encode_classes(mode, old, places, differences)


def apply(mode: int, payload: memoryview, base: Elements, changed: int) -> None:
    """Make the new block of `base`, in place. BadShard for a payload that the mode does not allow.

    `base` may be half changed after an error: call it on a copy, or be able to fetch the block again.
    """
    if mode in (layout.RAW, layout.PLANES):
        _apply_whole(mode, payload, base)
    elif mode == layout.DENSE_ULP:
        sections = Sections(payload, base.itemsize)
        kernels().unzigzag(base, _from_planes(sections, len(base), base.dtype))
    elif mode == layout.MASK_ULP:
        sections = Sections(payload, 5)
        places = _masked(sections.take(-(-len(base) // 8), exactly=True), len(base), changed)
        _apply_values(sections, base, places)
    elif mode == layout.SPARSE:
        _apply_absolute(payload, base, changed)
    else:
        _apply_classes(mode, payload, base, changed)


# -- whole blocks --------------------------------------------------------------------------------------------


def _planes(values: Elements) -> list[U8]:
    """Byte 0 of every element, then byte 1 of every element, and so on: the exponents together."""
    return [np.ascontiguousarray(values.view(np.uint8)[at :: values.itemsize]) for at in range(values.itemsize)]


def _from_planes(sections: Sections, count: int, dtype: np.dtype[Any]) -> Elements:
    values = np.empty(count, dtype=dtype)
    for at in range(dtype.itemsize):
        values.view(np.uint8)[at :: dtype.itemsize] = sections.take(count, exactly=True)
    return values


def _apply_whole(mode: int, payload: memoryview, base: Elements) -> None:
    if mode == layout.RAW:
        base.view(np.uint8)[:] = Sections(payload, 1).take(base.nbytes, exactly=True)
    else:
        base[:] = _from_planes(Sections(payload, base.itemsize), len(base), base.dtype)


def _masked(mask: U8, count: int, changed: int) -> U32:
    places = np.flatnonzero(np.unpackbits(mask, bitorder="little")).astype(np.uint32)
    if len(places) != changed or (changed and places[-1] >= count):
        raise BadShard("delta: a mask marks another number of elements than its block says")
    return places


# -- places as gaps ------------------------------------------------------------------------------------------


def _gaps(ranks: U32, members: int) -> tuple[int, Elements, Elements]:
    """How the gaps are split, their low bytes if they are, and the digits of what is left."""
    gaps = np.diff(ranks, prepend=np.uint32(0xFFFFFFFF)) - np.uint32(1) if len(ranks) else ranks
    if members < SPLIT * max(1, len(ranks)):
        return 0, gaps[:0], kernels().write_digits(gaps)
    return 1, gaps.astype(np.uint8), kernels().write_digits(gaps >> np.uint32(8))


def _take_ranks(sections: Sections, split: int, count: int, members: int) -> U32:
    """Ascending, and all below `members`."""
    low = sections.take(count if split else 0, exactly=True)
    digits = sections.take(count + members // (255 * (256 if split else 1)) + 1)
    gaps = kernels().read_digits(digits, count)
    if gaps is not None and split:
        gaps = None if count and gaps.max() >= 1 << 24 else gaps << np.uint32(8) | low
    ranks = None if gaps is None else kernels().ranks_from_gaps(gaps, members)
    if ranks is None:
        raise BadShard("delta: the gaps lead outside their block")
    return ranks


# -- values --------------------------------------------------------------------------------------------------


def _apply_values(sections: Sections, base: Elements, places: U32) -> None:
    count = len(places)
    signs, quads = sections.take(-(-count // 8), exactly=True), sections.take(-(-count // 4), exactly=True)
    small, large = sections.take(count), sections.take(count * base.itemsize)
    if len(large) % base.itemsize or not kernels().add_values(
        base, places, signs, quads, small, large.view(base.dtype)
    ):
        raise BadShard("delta: the values do not belong to their places")


def _apply_absolute(payload: memoryview, base: Elements, changed: int) -> None:
    sections = Sections(payload, 3 + base.itemsize)
    (record,) = _take_records(sections, 1, changed)
    places = _take_ranks(sections, int(record["split"]), changed, len(base))
    base[places] = _from_planes(sections, changed, base.dtype)


# -- classes -------------------------------------------------------------------------------------------------


def records_of(rows: list[tuple[int, int, int]]) -> Elements:
    """The class table, from (limit, changed, split) of each class."""
    return np.array([(*row, [0] * 7) for row in rows], dtype=CLASS).view(np.uint8)


def _take_records(sections: Sections, classes: int, changed: int) -> Elements:
    records = sections.take(classes * CLASS.itemsize, exactly=True).view(CLASS)
    limits = records["limit"][:-1].astype(np.int64)
    if records["split"].max() > 1 or records["changed"].sum(dtype=np.int64) != changed or (np.diff(limits) <= 0).any():
        raise BadShard("delta: impossible classes")
    return records


def _encode_classes(mode: int, old: Elements, places: U32, differences: Elements) -> bytes:
    limits = choose_limits(old, places) if mode == layout.CLASS_ULP else old[:0]
    records, sections = [], []
    for index, (ranks, own) in enumerate(_by_class(old, places, differences, limits)):
        split, *gaps = _gaps(ranks, len(old))
        records.append((int(limits[index]) if index < len(limits) else 0, len(own), split))
        sections += [*gaps, *kernels().write_values(own)]
    return layout.pack_sections([records_of(records), *sections])


def _by_class(old: Elements, places: U32, differences: Elements, limits: Elements) -> Iterator[tuple[U32, Elements]]:
    """For each class how many of it lie before each change in it, and the differences there."""
    if not len(limits):
        yield places, differences
        return
    classes, ranks = kernels().class_ranks(old, places, limits)
    for index in range(len(limits) + 1):
        own = classes == index
        yield ranks[own], differences[own]


def _apply_classes(mode: int, payload: memoryview, base: Elements, changed: int) -> None:
    # The first section has a record for each class; its length is the first number of the table after `stored`.
    size = int.from_bytes(payload[4:8], "little")
    classes = size // CLASS.itemsize
    if not 1 <= classes <= MAX_CLASSES or (classes > 1) > (mode == layout.CLASS_ULP):
        raise BadShard(f"delta: {classes} classes")
    sections = Sections(payload, 1 + PER_CLASS * classes)
    records = _take_records(sections, classes, changed)
    values, ranks = [], []
    for record in records:
        count = int(record["changed"])
        ranks.append(_take_ranks(sections, int(record["split"]), count, len(base)))
        values.append([sections.take(most) for most in (-(-count // 8), -(-count // 4), count, count * base.itemsize)])
    starts = np.cumsum([0, *map(len, ranks)])
    places = ranks[0] if classes == 1 else _places(base, np.concatenate(ranks), records)
    for index, parts in enumerate(values):
        _add(base, places[starts[index] : starts[index + 1]], *parts)


def _places(base: Elements, ranks: U32, records: Elements) -> U32:
    limits = records["limit"][:-1].astype(base.dtype)
    places = kernels().class_places(base, ranks, records["changed"].astype(np.int64), limits)
    if places is None:
        raise BadShard("delta: a class has fewer members than its changes need")
    return places


def _add(base: Elements, places: U32, signs: U8, quads: U8, small: U8, large: U8) -> None:
    count = len(places)
    fits = len(signs) == -(-count // 8) and len(quads) == -(-count // 4) and not len(large) % base.itemsize
    if not fits or not kernels().add_values(base, places, signs, quads, small, large.view(base.dtype)):
        raise BadShard("delta: the values do not belong to their places")
