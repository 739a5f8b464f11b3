"""Two passes over old and new: what changed and the sums of digests, then places and differences; and the fold.

Both take one unit of a line in a program. The new elements are read where their tensors lie: a table has the address
of every block. Only a block's last KiB is read from a copy of it, in `rests`, that is filled up with zeros as the base
is, so everything else is read whole and without looking at its end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..flat import ALIGN, Line

_REST = tl.constexpr(1088)
_STRIPE = tl.constexpr(64)
_AT_ONCE = 1024
"""Elements whose places are counted at a time."""

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
) -> tuple[torch.Tensor, torch.Tensor]:
    """[units], int32: how many elements changed in each. [KiB, 8], int64: the sums of `xxh3.sums`, of the new."""
    units = line.size // ALIGN
    counts = torch.empty(units, dtype=torch.int32, device=base.device)
    sums = torch.empty(base.nbytes // 1024, 8, dtype=torch.int64, device=base.device)
    _scan[(units,)](
        line.units, line.starts, line.lengths, addresses, tails, base.view(torch.int64), keys, sums, counts,
        ALIGN * line.width // 1024, line.width, num_warps=line.width,
    )  # fmt: skip
    return counts, sums


@triton.jit
def _scan(
    owners, starts, lengths, addresses, tails, base, keys, sums, counts, rows: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    block = tl.load(owners + program)
    last = (tl.load(lengths + block) * width - 1) // 1024
    row = program * rows + tl.arange(0, rows)[:, None]
    inside = row - tl.load(starts + block) * width // 1024
    copied = tails.to(tl.int64) + block * _REST + _STRIPE
    new = tl.where(inside < last, tl.load(addresses + block) + inside * 1024, copied).to(tl.pointer_type(tl.int64))
    lane = 2 * tl.arange(0, 4)[None, :]
    there = (inside <= last) & (lane >= 0)
    old = base + row * 128 + lane
    new = new + lane
    even_sum = tl.zeros([rows, 4], tl.int64)
    odd_sum = tl.zeros([rows, 4], tl.int64)
    changed = tl.zeros([rows, 4], tl.int64)
    for at in tl.static_range(0, 128, 8):
        even = tl.load(new + at, mask=there, other=0)
        odd = tl.load(new + at + 1, mask=there, other=0)
        changed += _apart(even ^ tl.load(old + at, mask=there, other=0), width)
        changed += _apart(odd ^ tl.load(old + at + 1, mask=there, other=0), width)
        # Each lane's words are added to its neighbour's sum.
        even_sum += odd + _product(even ^ tl.load(keys + at + lane))
        odd_sum += even + _product(odd ^ tl.load(keys + at + 1 + lane))
    tl.store(sums + row * 8 + lane, even_sum, mask=there)
    tl.store(sums + row * 8 + lane + 1, odd_sum, mask=there)
    tl.store(counts + program, tl.sum(tl.sum(_added(changed, width), axis=1), axis=0).to(tl.int32))


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


def compact(
    line: Line, base: torch.Tensor, addresses: torch.Tensor, tails: torch.Tensor, counts: torch.Tensor,
    targets: torch.Tensor, total: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Of `total` changes the place in their block, int32, and the difference; those of each unit from `targets` on."""
    places = torch.empty(total, dtype=torch.int32, device=base.device)
    differences = torch.empty(total, dtype=base.dtype, device=base.device)
    _compact[(line.size // ALIGN,)](
        line.units, line.starts, line.lengths, addresses, tails, base, counts, targets, places, differences, ALIGN,
        _AT_ONCE, line.width,
    )  # fmt: skip
    return places, differences


@triton.jit
def _compact(
    owners, starts, lengths, addresses, tails, base, counts, targets, places, differences,
    unit: tl.constexpr, at_once: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    if tl.load(counts + program) == 0:
        return
    block = tl.load(owners + program)
    length = tl.load(lengths + block)
    whole = (length * width - 1) // 1024 * 1024 // width
    first = tl.multiple_of(program * unit - tl.load(starts + block), unit)
    target = tl.load(targets + program)
    kind: tl.constexpr = base.dtype
    source = tl.multiple_of(tl.load(addresses + block).to(kind), 16)
    rest = (tails.to(tl.int64) + block * _REST + _STRIPE).to(kind)
    inside = tl.arange(0, at_once)
    for part in range(0, unit, at_once):
        at = first + part
        old = tl.load(base + (program * unit + part) + inside)
        if at + at_once <= whole:
            new = tl.load(source + at + inside)
        else:
            new = tl.load(source + at + inside, mask=at + inside < whole, other=0) | tl.load(
                rest + (at - whole) + inside, mask=(at + inside >= whole) & (at + inside < length), other=0
            )
        apart = new - old
        changed = apart != 0
        rank = tl.cumsum(changed.to(tl.int32), axis=0)
        tl.store(places + (target - 1) + rank, (at + inside).to(tl.int32), mask=changed)
        tl.store(differences + (target - 1) + rank, apart, mask=changed)
        target += tl.sum(changed.to(tl.int32), axis=0)


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
