"""Buckets as bytes in one buffer, so that a bucket is one handle, or one broadcast."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .receivers import Layout

Named = tuple[str, torch.Tensor]


def arranged(tensors: Sequence[Named]) -> list[Named]:
    """In an order in which each lies aligned, packed without gaps: receivers view the bytes as the dtype.

    Wide elements first. All of one dtype, as nearly always, stay in model order, which is the order that vLLM's
    layerwise loading wants.
    """
    return sorted(tensors, key=lambda named: -named[1].element_size())


def layout_of(tensors: Sequence[Named]) -> Layout:
    """Of tensors in this order, packed without gaps."""
    return Layout(
        names=[name for name, _ in tensors],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in tensors],
        shapes=[list(tensor.shape) for _, tensor in tensors],
        sizes=[tensor.nbytes for _, tensor in tensors],
    )


@torch.no_grad()
def pack(tensors: Sequence[Named], buffer: torch.Tensor) -> None:
    """Into a buffer of bytes, from its beginning, in this order, from whatever device each is on."""
    start = 0
    for _, tensor in tensors:
        end = start + tensor.nbytes
        target = buffer[start:end].view(tensor.dtype).view(tensor.shape)
        target.copy_(tensor, non_blocking=target.is_cuda and tensor.is_cuda)
        start = end
