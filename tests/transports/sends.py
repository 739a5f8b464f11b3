"""A small model and one send of it, on whichever ranks there are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ckptsync.export.source import open_source
from ckptsync.ranks import Ranks
from ckptsync.transports.base import Delivery, Sending, SyncEngine
from ckptsync.version import VersionId

BUCKET = 600
"""Bytes: the model takes several, and one of its tensors does not fit one."""


class Small(nn.Module):
    """Of two dtypes, with an odd number of elements in between, and an empty tensor."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator).to(dtype))

        self.embed = made(64, 8)
        self.odd = made(7)
        self.scale = made(3, dtype=torch.float32)
        self.empty = made(0, 4)
        self.layers = nn.ParameterList(made(8, 16) for _ in range(4))
        self.norm = made(1)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def delivery(
    model: Any, number: int = 7, ranks: Ranks | None = None, bucket_bytes: int = BUCKET, **more: Any
) -> Delivery:
    ranks = ranks or Ranks(timeout=60)
    return Delivery(
        version=VersionId(1, number), walks=[open_source(model, ranks)], ranks=ranks, bucket_bytes=bucket_bytes,
        to_files=lambda _: None, **more,  # type: ignore[arg-type, return-value]
    )  # fmt: skip


def send(
    transport: Any,
    model: Any,
    engines: list[SyncEngine],
    number: int = 7,
    ranks: Ranks | None = None,
    bucket_bytes: int = BUCKET,
) -> Sending:
    """One attempt, as the chain makes it. The Sending tells what was touched, also of an attempt that raised."""
    sending = Sending(delivery=delivery(model, number, ranks, bucket_bytes), engines=engines)
    transport.last = sending
    with sending.ranks.together():
        transport.send(sending)
    return sending


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) and tensor.dtype == other[name].dtype for name, tensor in one.items()
    )
