"""The kernels in plain numpy: what the compiled ones are tested against, and what runs where there is no numba.

All take unsigned arrays of one element type (u8, u16, u32). "Magnitude" is the bit pattern without its top bit:
for floats it grows with |x|, and for every other type it is just a number that both sides know.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
F64 = npt.NDArray[np.float64]
Elements = npt.NDArray[Any]


def changed(old: Elements, new: Elements) -> tuple[U32, Elements]:
    """Where the two differ, ascending, and by how much: new less old, modulo the element's size."""
    places = np.flatnonzero(old != new).astype(np.uint32)
    return places, (new[places] - old[places]).astype(old.dtype)


def write_digits(gaps: U32) -> U8:
    """Each number as so many digits 255 as it has 255s, and the rest."""
    whole, rest = np.divmod(gaps, 255)
    ends = np.cumsum(whole.astype(np.int64) + 1)
    digits = np.full(int(ends[-1]) if len(ends) else 0, 255, dtype=np.uint8)
    digits[ends - 1] = rest
    return digits


def read_digits(digits: U8, count: int) -> U32 | None:
    """Back; None unless they are exactly `count` numbers that fit 32 bits."""
    ends = np.flatnonzero(digits != 255)
    if len(ends) != count or (len(digits) and digits[-1] == 255):
        return None
    whole = np.diff(ends, prepend=-1) - 1
    numbers = whole * 255 + digits[ends]
    return numbers.astype(np.uint32) if not len(numbers) or numbers.max() < 1 << 32 else None


def ranks_from_gaps(gaps: U32, limit: int) -> U32 | None:
    """Ascending places from the gaps before them; None if one is not below `limit`."""
    ranks = np.cumsum(gaps.astype(np.int64) + 1) - 1
    return ranks.astype(np.uint32) if not len(ranks) or ranks[-1] < limit else None


def write_values(difference: Elements) -> tuple[U8, U8, U8, Elements]:
    """Integer differences as signs (bits), magnitudes less one (two bits each, 3 goes on in the third), what goes on
    (bytes, 255 goes on in the fourth), and magnitudes as they are."""
    kind, bits = difference.dtype, difference.dtype.itemsize * 8
    negative = difference >> kind.type(bits - 1) != 0
    size = np.where(negative, (~difference + kind.type(1)).astype(kind), difference)
    quads = np.minimum(size - kind.type(1), 3).astype(np.uint8)
    rest = (size[quads == 3] - kind.type(4)).astype(kind)
    small = np.minimum(rest, 255).astype(np.uint8)
    return np.packbits(negative, bitorder="little"), pack_quads(quads), small, size[quads == 3][small == 255]


def pack_quads(quads: U8) -> U8:
    """Four numbers of two bits to a byte, the first lowest."""
    padded = np.zeros(-(-len(quads) // 4) * 4, dtype=np.uint8)
    padded[: len(quads)] = quads
    four = padded.reshape(-1, 4)
    packed: Elements = four[:, 0] | four[:, 1] << 2 | four[:, 2] << 4 | four[:, 3] << 6
    return packed


def add_values(target: Elements, places: U32, signs: U8, quads: U8, small: U8, large: Elements) -> bool:
    """Add them to `target` at `places`, modulo the element's size; False, and nothing done, if the parts do not fit."""
    kind = target.dtype.type
    each = ((quads[:, None] >> np.array([0, 2, 4, 6], dtype=np.uint8)) & 3).reshape(-1)[: len(places)]
    goes_on = each == 3
    if np.count_nonzero(goes_on) != len(small) or np.count_nonzero(small == 255) != len(large):
        return False
    size = each.astype(target.dtype) + kind(1)
    rest = small.astype(np.uint32).astype(target.dtype) + kind(4)
    rest[small == 255] = large
    size[goes_on] = rest
    negative = np.unpackbits(signs, count=len(places), bitorder="little").astype(bool)
    target[places] += np.where(negative, (~size + kind(1)).astype(target.dtype), size)
    return True


def class_ranks(old: Elements, places: U32, limits: Elements) -> tuple[U8, U32]:
    """Of each place: the class of the old magnitude, and how many of that class lie before it."""
    classes = _classes(old, limits)
    ranks = np.zeros(len(places), dtype=np.uint32)
    own = classes[places]
    for index in range(len(limits) + 1):
        before = np.cumsum(classes == index, dtype=np.int64)
        ranks[own == index] = before[places[own == index]] - 1
    return own, ranks


def class_places(old: Elements, ranks: U32, counts: npt.NDArray[np.int64], limits: Elements) -> U32 | None:
    """Where those ranks lie. `ranks` holds one run for each class; None if a class has fewer members."""
    classes, found, start = _classes(old, limits), [], 0
    for index, count in enumerate(counts):
        members = np.flatnonzero(classes == index).astype(np.uint32)
        own = ranks[start : start + count]
        if count and own[-1] >= len(members):
            return None
        found.append(members[own])
        start += count
    return np.concatenate(found)


def _classes(old: Elements, limits: Elements) -> U8:
    magnitude = old & old.dtype.type((1 << (old.dtype.itemsize * 8 - 1)) - 1)
    classes: Elements = np.searchsorted(limits, magnitude, side="right")
    return classes.astype(np.uint8)


def histogram(values: Elements, step: int = 1) -> npt.NDArray[np.int64]:
    """How many of each of 256 magnitudes are in every `step`-th value; of bf16 and f32 that is the exponent."""
    values = values[::step]
    bits = values.dtype.itemsize * 8
    magnitude = values & values.dtype.type((1 << (bits - 1)) - 1)
    return np.bincount((magnitude >> values.dtype.type(max(0, bits - 9))).astype(np.uint8), minlength=256)


def zigzag(old: Elements, new: Elements) -> Elements:
    """The differences with their sign in the lowest bit: small ones are small either way."""
    kind, bits = old.dtype.type, old.dtype.itemsize * 8
    difference = (new - old).astype(old.dtype)
    coded: Elements = (difference << kind(1)) ^ (kind(0) - (difference >> kind(bits - 1)))
    return coded


def unzigzag(target: Elements, coded: Elements) -> None:
    """Add them to `target`."""
    kind = target.dtype.type
    target += (coded >> kind(1)) ^ (kind(0) - (coded & kind(1)))


def cut(there: F64, hit: F64, classes: int) -> list[int]:
    """First bins of the second and every further class; the cheapest of all ways, by dynamic programming."""
    cost = _bits(there, hit)
    count = len(there)
    best, steps = cost[0, 1:], []
    for _ in range(min(classes, count) - 1):
        # best[j]: bins 0..j in the classes so far; another one may begin at any bin k.
        ways = np.full((count, count), np.inf)
        for k in range(1, count):
            ways[k, k:] = best[k - 1] + cost[k, k + 1 :]
        steps.append(ways.argmin(axis=0))
        best = ways.min(axis=0)
    return traced(steps, count)


def traced(steps: Iterable[npt.NDArray[np.int64]], count: int) -> list[int]:
    """The cuts of the cheapest way over so many bins, from where each further class begins on the way to each bin."""
    cuts, end = [], count - 1
    for step in reversed(list(steps)):
        begin = int(step[end])
        if begin == 0:
            break
        cuts.append(begin)
        end = begin - 1
    return cuts[::-1]


def _bits(there: F64, hit: F64) -> F64:
    """[i, j]: bits that the places in the bins i..j-1 cost if those are one class."""
    members, changes = (np.concatenate([[0.0], np.cumsum(each)]) for each in (there, hit))
    n, k = members[None, :] - members[:, None], changes[None, :] - changes[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        kept = np.where(k > 0, k * np.log2(n / k), 0) + np.where(n > k, (n - k) * np.log2(n / (n - k)), 0)
    return np.where(n > 0, kept, 0)
