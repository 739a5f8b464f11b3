"""Weights and updates to try the encoding on."""

from __future__ import annotations

import numpy as np
import torch

from ckptsync.delta import codec
from ckptsync.delta.device import DeviceBaseline

SIZES = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def to_bf16(values: np.ndarray) -> np.ndarray:
    """float32 -> the bits of bf16, rounded to nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def adam_like(
    count: int, density: float, seed: int = 0, *, sample: int = 1 << 18, halvings: int = 30
) -> tuple[np.ndarray, np.ndarray]:
    """bf16 weights before and after a step of a size at which about `density` of them change: found on the first
    `sample` of them, by so many halvings."""
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal(count, dtype=np.float32) * 0.02
    step = np.clip(rng.standard_normal(count, dtype=np.float32) * 0.7, -1.5, 1.5)
    old, low, high = to_bf16(weights), 1e-9, 1e-1
    part = slice(0, sample)
    for _ in range(halvings):
        rate = (low * high) ** 0.5
        dense = np.mean(to_bf16(weights[part] - rate * step[part]) != old[part]) >= density
        low, high = (low, rate) if dense else (rate, high)
    return old, to_bf16(weights - rate * step)


def many(seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Tensors of every element size before and after, of lengths at which blocks, KiB and bytes end unevenly."""
    rng, found = np.random.default_rng(seed), {}
    for at, size in enumerate(rng.integers(1, 200_000, 40)):
        length = int(size) if at % 4 else int(size) % 700 + 1
        kind = (torch.uint8, torch.int16, torch.int32)[at % 3]
        old = torch.from_numpy(rng.integers(-(2**31), 2**31, length)).to(kind)
        step = torch.from_numpy(rng.integers(-(2 ** int(rng.integers(1, 32))), 2 ** int(rng.integers(1, 32)), length))
        hit = torch.from_numpy(rng.random(length) < rng.choice([0, 0.001, 0.01, 0.1, 0.4, 0.9]))
        found[f"{at}"] = old, torch.where(hit, old + step.to(kind), old)
    return found


def lying(tensor: torch.Tensor, at: int) -> torch.Tensor:
    """On the GPU: some at an address that is no multiple of 16, some with gaps between elements."""
    if at % 5 == 1:
        return torch.cat([tensor[:1], tensor]).cuda()[1:]
    return tensor.repeat_interleave(2).cuda()[::2] if at % 5 == 2 else tensor.cuda()


def proven_on_a_gpu(effort: codec.Effort, seed: int) -> None:
    """Without pytest, so that a machine that has only torch can run it."""
    tensors = many(seed)
    before, after = ({name: lying(pair[at], int(name)) for name, pair in tensors.items()} for at in (0, 1))
    baseline = DeviceBaseline(before, block=1 << 15, chunk=1 << 18)
    changes = baseline.encode(after, effort=effort)
    for name, pair in tensors.items():
        old, new = (each.numpy().tobytes() for each in pair)
        assert changes.blobs.get(name) == codec.encode(old, new, pair[0].itemsize, effort=effort, block=1 << 15), name
    baseline.move(changes)
    assert not baseline.encode(after, effort=effort).blobs
