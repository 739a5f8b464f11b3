"""A pass over old and new: what changed, and the sums of digests; one over what changed: places and differences; fold.

Both passes take one unit of a line in a program. The new elements are read where their tensors lie: a table has the
address of every block. Only a block's last KiB is read from a copy of it, in `rests`, that is filled up with zeros as
the base is, so everything else is read whole and without looking at its end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..flat import ALIGN, VECTOR, Line

_REST = tl.constexpr(1088)
_STRIPE = tl.constexpr(64)
_AT_ONCE = 64
"""Changed vectors of 16 bytes that are read at a time. That many and two warps were the fastest on an H200."""

_MARKS = {1: torch.int16, 2: torch.int8, 4: torch.int8}
"""By bytes of an element, what holds a bit for each of a vector's."""

_AHEAD = 16
"""KiB whose sums are fetched before they are folded: a fold waits for the one before, a fetch need not."""


def rests(line: Line, addresses: torch.Tensor) -> torch.Tensor:
    """[blocks, 1088] bytes: of every block the last stripe before its last KiB, that KiB, and zeros."""
    found = torch.empty(len(line.blocks), _REST.value, dtype=torch.uint8, device=addresses.device)
    _rests[(len(line.blocks),)](addresses, line.lengths, found, line.width)
    return found


@triton.jit
def _rests(addresses, lengths, found, width: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    size = tl.load(lengths + block) * width
    inside = tl.arange(0, 2048)
    at = (size - 1) // 1024 * 1024 - _STRIPE + inside
    source = tl.load(addresses + block).to(tl.pointer_type(tl.uint8))
    value = tl.load(source + at, mask=(at >= 0) & (at < size) & (inside < _REST), other=0)
    tl.store(found + block * _REST + inside, value, mask=inside < _REST)


def scan(
    line: Line, base: torch.Tensor, addresses: torch.Tensor, tails: torch.Tensor, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[units], int32: how many elements changed in each. A bit for each element: whether it changed. [KiB, 8], int64:
    the sums of `xxh3.sums`, of the new."""
    counts = torch.empty(line.size // ALIGN, dtype=torch.int32, device=base.device)
    marks = torch.empty(base.nbytes // VECTOR, dtype=_MARKS[line.width], device=base.device)
    sums = torch.empty(base.nbytes // 1024, 8, dtype=torch.int64, device=base.device)
    _scan[(len(counts),)](
        line.units, line.starts, line.lengths, addresses, tails, base.view(torch.int64), keys, counts, marks, sums,
        ALIGN * line.width // 1024, line.width, num_warps=2,
    )  # fmt: skip
    return counts, marks, sums


@triton.jit
def _scan(
    owners, starts, lengths, addresses, tails, base, keys, counts, marks, sums,
    rows: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    block = tl.load(owners + program)
    last = (tl.load(lengths + block) * width - 1) // 1024
    first = program * rows - tl.load(starts + block) * width // 1024
    row, word = tl.arange(0, rows)[:, None], tl.arange(0, 128)[None, :]
    at = row * 128 + word
    source = tl.multiple_of(tl.load(addresses + block).to(tl.pointer_type(tl.int64)), 16) + first * 128
    old = tl.load(base + program * (rows * 128) + at)
    if first + rows <= last:
        new = tl.load(source + at)
    else:
        rest = (tails.to(tl.int64) + block * _REST + _STRIPE).to(tl.pointer_type(tl.int64))
        new = tl.load(source + at, mask=(first + row < last) & (word >= 0), other=0) | tl.load(
            rest + row * 0 + word, mask=(first + row == last) & (word >= 0), other=0
        )
    apart = _apart(old ^ new, width)
    tl.store(counts + program, tl.sum(_added(tl.sum(apart, axis=1), width), axis=0).to(tl.int32))
    low, high = tl.split(tl.reshape(_bits(apart, width), [rows, 64, 2]))
    vector = (program * rows + row) * 64 + tl.arange(0, 64)[None, :]
    tl.store(marks + vector, (low | (high << (8 // width))).to(marks.dtype.element_ty))
    # Each lane's words are added to its neighbour's sum.
    even, odd = tl.split(tl.reshape(new, [rows, 64, 2]))
    added = _product(new ^ tl.load(keys + word)) + tl.reshape(tl.join(odd, even), [rows, 128])
    lane = tl.arange(0, 8)[None, :]
    found = sums + (program * rows + row) * 8 + lane
    tl.store(found, tl.sum(tl.reshape(added, [rows, 16, 8]), axis=1), mask=(first + row <= last) & (lane >= 0))


@triton.jit
def _product(keyed):
    return (keyed & 0xFFFFFFFF) * ((keyed >> 32) & 0xFFFFFFFF)


@triton.jit
def _apart(word, width: tl.constexpr):
    """1 in every element of a word that is not zero: its lower bits carry into the top one, or that is set."""
    if width == 1:
        return ((((word & 0x7F7F7F7F7F7F7F7F) + 0x7F7F7F7F7F7F7F7F) | word) >> 7) & 0x0101010101010101
    if width == 2:
        return ((((word & 0x7FFF7FFF7FFF7FFF) + 0x7FFF7FFF7FFF7FFF) | word) >> 15) & 0x0001000100010001
    return ((((word & 0x7FFFFFFF7FFFFFFF) + 0x7FFFFFFF7FFFFFFF) | word) >> 31) & 0x0000000100000001


@triton.jit
def _added(word, width: tl.constexpr):
    """The sum of a word's elements, 16 bits of it."""
    if width == 1:
        word = (word & 0x00FF00FF00FF00FF) + ((word >> 8) & 0x00FF00FF00FF00FF)
    return ((word * 0x0001000100010001) >> 48) & 0xFFFF


@triton.jit
def _bits(word, width: tl.constexpr):
    """The lowest bits of a word's elements, next to each other: each product has but one that lands there."""
    if width == 1:
        return ((word * 0x0102040810204080) >> 56) & 0xFF
    if width == 2:
        return ((word * 0x0001000200040008) >> 48) & 0xF
    return (word | (word >> 31)) & 3


def compact(
    line: Line, base: torch.Tensor, addresses: torch.Tensor, tails: torch.Tensor, counts: torch.Tensor,
    marks: torch.Tensor, targets: torch.Tensor, total: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Of `total` changes the place in their block, int32, and the difference; those of each unit from `targets` on."""
    places, vectors = torch.empty(2, total, dtype=torch.int32, device=base.device)
    differences = torch.empty(total, dtype=base.dtype, device=base.device)
    _compact[(len(counts),)](
        line.units, line.starts, line.lengths, addresses, tails, base, counts, marks, targets, vectors, places,
        differences, ALIGN, _AT_ONCE, line.width, num_warps=2,
    )  # fmt: skip
    return places, differences


@triton.jit
def _compact(
    owners, starts, lengths, addresses, tails, base, counts, marks, targets, vectors, places, differences,
    unit: tl.constexpr, at_once: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    if tl.load(counts + program) == 0:
        return
    block, target = tl.load(owners + program), tl.load(targets + program)
    first = tl.multiple_of(program * unit - tl.load(starts + block), unit)
    # From here on, in elements of this unit, only the copy is read.
    whole = (tl.load(lengths + block) * width - 1) // 1024 * 1024 // width - first
    kind: tl.constexpr = base.dtype
    source = tl.multiple_of(tl.load(addresses + block).to(kind), 16) + first
    rest = (tails.to(tl.int64) + block * _REST + _STRIPE).to(kind) - whole
    per: tl.constexpr = 16 // width
    number = _changed_vectors(marks + program * (unit // per), vectors + target, unit // per)
    tl.debug_barrier()  # what other threads of the program stored is read
    element, done = tl.arange(0, per)[None, :], 0
    while done < number:
        there = done + tl.arange(0, at_once) < number
        vector = tl.load(vectors + target + done + tl.arange(0, at_once), mask=there, other=0)
        at, there = (vector & 0xFFFF)[:, None] * per + element, there[:, None] & (element >= 0)
        old = tl.load(base + program * unit + at, mask=there, other=0)
        new = tl.load(source + at, mask=there & (at < whole), other=0) | tl.load(
            rest + at, mask=there & (at >= whole), other=0
        )
        apart = new - old
        changed = apart != 0
        place = target + (vector >> 16)[:, None] + tl.cumsum(changed.to(tl.int32), axis=1) - 1
        tl.store(places + place, (first + at).to(tl.int32), mask=changed)
        tl.store(differences + place, apart, mask=changed)
        done += at_once


@triton.jit
def _changed_vectors(marks, found, count: tl.constexpr):
    """How many of a unit's vectors changed. In `found` each of these, and above 16 bits the changes before it."""
    vector = tl.arange(0, count)
    mark = tl.load(marks + vector).to(tl.int32) & ((1 << marks.dtype.element_ty.primitive_bitwidth) - 1)
    ones = mark - ((mark >> 1) & 0x5555)
    ones = (ones & 0x3333) + ((ones >> 2) & 0x3333)
    ones = (ones + (ones >> 4)) & 0x0F0F
    ones = (ones + (ones >> 8)) & 0x1F
    some = (mark != 0).to(tl.int32)
    sums = tl.cumsum(ones | (some << 16), axis=0)
    tl.store(found + (sums >> 16) - 1, (((sums & 0xFFFF) - ones) << 16) | vector, mask=mark != 0)
    return tl.sum(some, axis=0)


def fold(
    each: torch.Tensor, firsts: torch.Tensor, counts: torch.Tensor, start: torch.Tensor, scramble: torch.Tensor
) -> torch.Tensor:
    states = torch.empty(len(firsts), 8, dtype=torch.int64, device=each.device)
    _fold[(len(firsts),)](each, firsts, counts, start, scramble, states, _AHEAD, num_warps=1)
    return states


@triton.jit
def _fold(each, firsts, counts, start, scramble, states, ahead: tl.constexpr):
    block = tl.program_id(0)
    lane = tl.arange(0, 8)
    first, count = tl.load(firsts + block), tl.load(counts + block)
    state, key = tl.load(start + lane), tl.load(scramble + lane)
    each += first * 8 + lane
    # Without masks, of which there are too few for as many fetches.
    for at in range(0, count // ahead * ahead, ahead):
        for step in tl.static_range(ahead):
            state = _scrambled(state + tl.load(each + (at + step) * 8), key)
    for at in range(count // ahead * ahead, count):
        state = _scrambled(state + tl.load(each + at * 8), key)
    tl.store(states + block * 8 + lane, state)


@triton.jit
def _scrambled(state, key):
    return (state ^ ((state >> 47) & 0x1FFFF) ^ key) * 0x9E3779B1
