"""xxh3-64 of blocks where they lie: only a kibibyte of each comes to the host.

xxh3 takes 1 KiB at a time. Within one it only adds up, so all of them are summed at once, which is the whole work of
reading; the sums (a sixteenth of the bytes) are then folded one after another, each block by itself, and the host takes
the last KiB of a block. https://github.com/Cyan4973/xxHash, `xxhash.h`: XXH3_hashLong_64b.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch

from .flat import Line
from .transfer import to_device, triton_runs_on

U64 = npt.NDArray[np.uint64]
KIB, STRIPE = 1024, 64

LEAST = 4096
"""Bytes that a block has at least; smaller ones are digested on the host."""

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_P32_1, _P32_2, _P32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_P64_1, _P64_2, _P64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P64_4, _P64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5


def _words(at: int, count: int) -> U64:
    return np.frombuffer(_SECRET[at : at + 8 * count], dtype="<u8")


_KEYS = np.stack([_words(8 * stripe, 8) for stripe in range(16)])
_SCRAMBLE = _words(128, 8)
_START = np.array([_P32_3, _P64_1, _P64_2, _P64_3, _P64_4, _P32_2, _P64_5, _P32_1], dtype=np.uint64)


def kibs(line: Line) -> npt.NDArray[np.int64]:
    """How many KiB of each block are folded: all but the last; none of one that is too small."""
    sizes = line.sizes * line.width
    return np.where(sizes >= LEAST, (sizes - 1) // KIB, 0)


def sums(values: torch.Tensor) -> torch.Tensor:
    """[KiB, 8], int64: the sums of every KiB on a line."""
    words = values.view(torch.int64).view(-1, 16, 8)
    keyed = words ^ constants(words.device)[0]
    # Each lane's words are added to its neighbour's sum.
    return ((keyed & 0xFFFFFFFF) * (keyed >> 32 & 0xFFFFFFFF)).sum(1) + words.sum(1).view(-1, 4, 2).flip(2).view(-1, 8)


def fold(line: Line, each: torch.Tensor) -> torch.Tensor:
    """[blocks, 8]: the states after the KiB of each block, from the `sums` of a line."""
    _, start, scramble = constants(each.device)
    firsts, counts = line.starts * line.width // KIB, to_device(kibs(line), each.device)
    if triton_runs_on(each):
        from . import kernels

        return kernels.fold(each, firsts, counts, start, scramble)
    states = start.expand(len(firsts), 8)
    for at in range(int(counts.max())):
        more = states + each[(firsts + at).clamp(max=len(each) - 1)]
        more = (more ^ (more >> 47 & 0x1FFFF) ^ scramble) * _P32_1
        states = torch.where((at < counts)[:, None], more, states)
    return states


def rests(line: Line, values: torch.Tensor) -> torch.Tensor:
    """[blocks, KIB + STRIPE] bytes: the last KiB of each block, of which at least a byte is left, and a stripe before;
    what does not belong to the block means nothing."""
    begins = line.starts + (((line.lengths * line.width - 1) // KIB) * KIB - STRIPE) // line.width
    where = begins[:, None] + torch.arange((KIB + STRIPE) // line.width, device=values.device)
    return values[where.clamp(min=0, max=len(values) - 1)].view(torch.uint8)


def finish(line: Line, states: npt.NDArray[np.int64], ends: npt.NDArray[np.uint8]) -> U64:
    """The digests of blocks, from `fold` and `rests`; of no meaning for those below LEAST."""
    return _finished(states.view(np.uint64), ends, line.sizes * line.width)


def _finished(states: U64, ends: npt.NDArray[np.uint8], sizes: npt.NDArray[np.int64]) -> U64:
    left = sizes - (sizes - 1) // KIB * KIB
    for stripe in range(15):
        words = np.ascontiguousarray(ends[:, STRIPE * (1 + stripe) : STRIPE * (2 + stripe)]).view("<u8")
        states = np.where((stripe < (left - 1) // STRIPE)[:, None], _accumulate(states, words, _KEYS[stripe]), states)
    last = np.take_along_axis(ends, left[:, None] + np.arange(STRIPE), axis=1)
    states = _accumulate(states, np.ascontiguousarray(last).view("<u8"), _words(121, 8))
    keyed = states ^ _words(11, 8)
    folded = _folded(keyed[:, 0::2], keyed[:, 1::2]).sum(axis=1, dtype=np.uint64)
    return _avalanche(sizes.astype(np.uint64) * np.uint64(_P64_1) + folded)


def _accumulate(states: U64, words: U64, keys: U64) -> U64:
    keyed = words ^ keys
    return states + words.reshape(-1, 4, 2)[:, :, ::-1].reshape(-1, 8) + _low(keyed) * (keyed >> np.uint64(32))


def _low(values: U64) -> U64:
    return values & np.uint64(0xFFFFFFFF)


def _folded(left: U64, right: U64) -> U64:
    """Both halves of the product of 128 bits, one over the other."""
    half = np.uint64(32)
    low, high = _low(left) * _low(right), (left >> half) * (right >> half)
    cross = (low >> half) + _low((left >> half) * _low(right)) + _low(_low(left) * (right >> half))
    high += ((left >> half) * _low(right) >> half) + (_low(left) * (right >> half) >> half) + (cross >> half)
    return np.bitwise_xor(_low(low) | cross << half, high)


def _avalanche(values: U64) -> U64:
    values = (values ^ values >> np.uint64(37)) * np.uint64(0x165667919E3779F9)
    return values ^ values >> np.uint64(32)


@functools.cache
def constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, start and scramble, as they are on the device."""
    return _on(_KEYS, device), _on(_START, device), _on(_SCRAMBLE, device)


def _on(values: U64, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)
