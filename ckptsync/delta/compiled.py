"""The kernels of `reference`, compiled by numba to single passes without the interpreter lock.

Compiled at the first use, about four CPU seconds for each element size, and kept in numba's cache after
that where the package's folder or the user's cache can be written.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from . import reference
from .reference import F64, U8, U32, Elements


def _jit(function: Any) -> Any:
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder for the cache that can be written
        return numba.njit(nogil=True)(function)


WORDS = 4
"""Words of eight bytes that are compared at a time; of so many one in seven differs at 1 % of changes."""

CHUNK = 64
"""Elements that are counted at a time."""

TILE = 4096
"""Elements that are classified at a time: what stays in the nearest cache."""


@_jit
def _changed(old: Any, new: Any, old_words: Any, new_words: Any, places: Any, differences: Any) -> int:
    n, per = 0, WORDS * 8 // old.itemsize
    for run in range(len(old_words) // WORDS):
        found = np.uint64(0)
        for word in range(run * WORDS, run * WORDS + WORDS):
            found |= old_words[word] ^ new_words[word]
        if found != 0:
            for at in range(run * per, run * per + per):
                places[n], differences[n] = at, new[at] - old[at]
                n += old[at] != new[at]
    for at in range(len(old_words) // WORDS * per, len(old)):
        places[n], differences[n] = at, new[at] - old[at]
        n += old[at] != new[at]
    return n


def changed(old: Elements, new: Elements) -> tuple[U32, Elements]:
    places, differences = np.empty(len(old) + 1, dtype=np.uint32), np.empty(len(old) + 1, dtype=old.dtype)
    whole = old.nbytes // 8 * 8 // old.itemsize
    words = old[:whole].view(np.uint64), new[:whole].view(np.uint64)
    count = _changed(old, new, *words, places, differences)
    return places[:count], differences[:count]


@_jit
def _write_digits(gaps: Any, out: Any) -> int:
    n = 0
    for gap in gaps:
        left = gap
        while left >= 255:
            out[n] = 255
            n += 1
            left -= 255
        out[n] = left
        n += 1
    return n


def write_digits(gaps: U32) -> U8:
    out = np.empty(len(gaps) + int(gaps.sum(dtype=np.int64)) // 255, dtype=np.uint8)
    return out[: _write_digits(gaps, out)]


@_jit
def _read_digits(digits: Any, out: Any) -> int:
    n, value = 0, 0
    for digit in digits:
        value += digit
        if digit != 255:
            if n == len(out) or value >= 1 << 32:
                return -1
            out[n] = value
            n += 1
            value = 0
    return -1 if value else n


def read_digits(digits: U8, count: int) -> U32 | None:
    out = np.empty(count, dtype=np.uint32)
    return out if _read_digits(digits, out) == count else None


@_jit
def _ranks(gaps: Any, limit: int, out: Any) -> bool:
    at = np.int64(-1)
    for n in range(len(gaps)):
        at += np.int64(gaps[n]) + 1
        if at >= limit:
            return False
        out[n] = at
    return True


def ranks_from_gaps(gaps: U32, limit: int) -> U32 | None:
    out = np.empty(len(gaps), dtype=np.uint32)
    return out if _ranks(gaps, limit, out) else None


@_jit
def _write_values(differences: Any, top: int, negative: Any, codes: Any, small: Any, large: Any) -> Any:
    n_small, n_large, mask = 0, 0, 2 * top - 1
    for n in range(len(differences)):
        difference = np.int64(differences[n])
        sign = np.int64(difference >= top)
        size = ((difference ^ -sign) + sign) & mask
        negative[n] = sign
        codes[n] = min(size - 1, 3)
        if size >= 4:
            small[n_small] = min(size - 4, 255)
            n_small += 1
            if size - 4 >= 255:
                large[n_large] = size
                n_large += 1
    return n_small, n_large


def write_values(differences: Elements) -> tuple[U8, U8, U8, Elements]:
    count, top = len(differences), 1 << (differences.itemsize * 8 - 1)
    negative, codes, small = (np.empty(count, dtype=np.uint8) for _ in range(3))
    large = np.empty(count, dtype=differences.dtype)
    n_small, n_large = _write_values(differences, top, negative, codes, small, large)
    return np.packbits(negative, bitorder="little"), reference.pack_quads(codes), small[:n_small], large[:n_large]


@_jit
def _add_values(target: Any, places: Any, signs: Any, quads: Any, small: Any, large: Any) -> None:
    n_small, n_large = 0, 0
    for n in range(len(places)):
        code = (quads[n >> 2] >> (2 * (n & 3))) & 3
        size = np.int64(code) + 1
        if code == 3:
            size = np.int64(small[n_small]) + 4
            n_small += 1
            if size == 259:
                size = np.int64(large[n_large])
                n_large += 1
        at = places[n]
        target[at] += -size if (signs[n >> 3] >> (n & 7)) & 1 else size


@_jit
def _fits(quads: Any, count: int, small: Any, n_large: int) -> bool:
    n_small, n = 0, 0
    for at in range(count):
        n_small += ((quads[at >> 2] >> (2 * (at & 3))) & 3) == 3
    for each in small:
        n += each == 255
    return n_small == len(small) and n == n_large


def add_values(target: Elements, places: U32, signs: U8, quads: U8, small: U8, large: Elements) -> bool:
    if not _fits(quads, len(places), small, len(large)):
        return False
    _add_values(target, places, signs, quads, small, large)
    return True


@_jit
def _classify(old: Any, limits: Any, mask: Any, out: Any) -> None:
    """The class of each element; 255, which nothing has, for what is left of `out`."""
    out[:] = 255
    for at in range(len(old)):
        out[at] = 0
    for limit in limits:
        for at in range(len(old)):
            above = np.greater_equal(np.bitwise_and(old[at], mask), limit)
            out[at] = np.uint8(out[at] + np.uint8(above))


@_jit
def _count(chunk: Any, index: Any) -> Any:
    # Of fixed length and in bytes: a vector instruction or two. Any wider type, or length, costs ten times as much.
    found = np.uint8(0)
    for at in range(CHUNK):
        found = np.uint8(found + np.uint8(chunk[at] == index))
    return found


@_jit
def _count_before(chunk: Any, index: Any, stop: Any) -> Any:
    found = np.uint8(0)
    for at in range(CHUNK):
        found = np.uint8(found + np.uint8((chunk[at] == index) & (np.uint8(at) < stop)))
    return found


@_jit
def _class_ranks(old: Any, places: Any, limits: Any, mask: Any, own: Any, ranks: Any) -> None:
    before, n, tile = np.zeros(len(limits) + 1, dtype=np.int64), 0, np.empty(TILE, dtype=np.uint8)
    for first in range(0, len(old), TILE):
        _classify(old[first : first + TILE], limits, mask, tile)
        for start in range(0, min(TILE, len(old) - first), CHUNK):
            chunk = tile[start : start + CHUNK]
            while n < len(places) and places[n] < first + start + CHUNK:
                at = places[n] - first - start
                own[n] = index = chunk[at]
                ranks[n] = before[index] + _count_before(chunk, index, np.uint8(at))
                n += 1
            for index in range(len(before)):
                before[index] += _count(chunk, np.uint8(index))


def class_ranks(old: Elements, places: U32, limits: Elements) -> tuple[U8, U32]:
    own, ranks = np.empty(len(places), dtype=np.uint8), np.empty(len(places), dtype=np.uint32)
    _class_ranks(old, places, limits, _mask(old), own, ranks)
    return own, ranks


@_jit
def _class_places(old: Any, ranks: Any, starts: Any, limits: Any, mask: Any, out: Any) -> bool:
    cursor, seen = starts[:-1].copy(), np.zeros(len(starts) - 1, dtype=np.int64)
    members, tile = np.empty(CHUNK + 1, dtype=np.uint32), np.empty(TILE, dtype=np.uint8)
    for first in range(0, len(old), TILE):
        _classify(old[first : first + TILE], limits, mask, tile)
        for start in range(0, min(TILE, len(old) - first), CHUNK):
            chunk = tile[start : start + CHUNK]
            for index in range(len(seen)):
                after = seen[index] + _count(chunk, np.uint8(index))
                at, last = cursor[index], starts[index + 1]
                if at < last and ranks[at] < after:
                    _members(chunk, first + start, np.uint8(index), members)
                    while at < last and ranks[at] < after:
                        out[at] = members[ranks[at] - seen[index]]
                        at += 1
                    cursor[index] = at
                seen[index] = after
    missing = 0
    for index in range(len(seen)):
        missing += starts[index + 1] - cursor[index]
    return missing == 0


@_jit
def _members(chunk: Any, start: int, index: Any, members: Any) -> None:
    n = 0
    for at in range(CHUNK):
        members[n] = start + at
        n += chunk[at] == index


def class_places(old: Elements, ranks: U32, counts: Any, limits: Elements) -> U32 | None:
    out = np.empty(len(ranks), dtype=np.uint32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return out if _class_places(old, ranks, starts, limits, _mask(old), out) else None


@_jit
def _histogram(values: Any, step: int, mask: Any, shift: int, out: Any) -> None:
    for at in range(0, len(values), step):
        out[(values[at] & mask) >> shift] += 1


def histogram(values: Elements, step: int = 1) -> Any:
    out = np.zeros(256, dtype=np.int64)
    _histogram(values, step, _mask(values), max(0, values.itemsize * 8 - 9), out)
    return out


@_jit
def _bits(there: Any, hit: Any, cost: Any) -> None:
    for first in range(len(there)):
        n, k = 0.0, 0.0
        for last in range(first, len(there)):
            n += there[last]
            k += hit[last]
            kept = k * np.log2(n / k) if k > 0 else 0.0
            cost[first, last] = kept + ((n - k) * np.log2(n / (n - k)) if n > k else 0.0)


@_jit
def _cut(cost: Any, best: Any, steps: Any) -> None:
    """`best[j]`: bins 0..j in the classes so far; `steps`: at which bin the last one of these begins."""
    for step in range(len(steps)):
        for j in range(len(best) - 1, -1, -1):
            found, at = np.inf, 0
            for k in range(1, j + 1):
                way = best[k - 1] + cost[k, j]
                if way < found:
                    found, at = way, k
            best[j], steps[step, j] = found, at


def cut(there: F64, hit: F64, classes: int) -> list[int]:
    count = len(there)
    cost, steps = np.empty((count, count)), np.empty((min(classes, count) - 1, count), dtype=np.int64)
    _bits(there, hit, cost)
    _cut(cost, cost[0].copy(), steps)
    return reference.traced(steps, count)


def _mask(old: Elements) -> Any:
    return old.dtype.type((1 << (old.itemsize * 8 - 1)) - 1)


zigzag = reference.zigzag
unzigzag = reference.unzigzag
