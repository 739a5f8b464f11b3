"""Whole tensors where the model has them, bucket by bucket, for ways to an engine that do not end in files.

The same walk and the same order as a publish, without its copy to host memory: a DTensor is gathered by its own mesh
(NCCL, on GPUs), so that all of the mesh's ranks have it whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..manifest import TensorSpec
from ..ranks import Ranks
from ..shards.tensors import TORCH_DTYPES
from .collect import Wanted, as_bytes, as_here, collect, full_tensor
from .pieces import Piece, Weight
from .stream import Item, Named, Place, Transform, agreed_layouts, like, to_wire, written


def whole_items(
    items: Sequence[Item],
    ranks: Ranks,
    limit: int,
    everywhere: bool,
    dtype: torch.dtype | None,
    transform: Transform | None,
    place: Place,
) -> Iterator[list[Named]]:
    """Collective; see `Delivery.buckets`. Pieces of FSDP1 are put together on rank 0's CPU.

    Of a plain tensor that is no parameter rank 0's counts, as in a publish: `everywhere` costs a broadcast over gloo
    then, for a state dict of plain tensors too.
    """
    pieces = [item for item in items if isinstance(item.weight, Piece)]
    layouts = agreed_layouts(pieces, ranks, snapshot=True) if pieces else {}
    for bucket in _buckets(items, limit, dtype):
        weights = {item.name: to_wire(item.weight, dtype) for item in bucket}
        wanted = [Wanted(name, w, 0, layouts[name]) for name, w in weights.items() if isinstance(w, Piece)]
        for each in wanted:
            each.ready(ranks.rank)
        ranks.agree()
        put_together = dict(collect(wanted, ranks, ranks.rank))
        sent = {item.name for item in bucket if everywhere and not isinstance(item.weight, nn.Parameter | DTensor)}
        gathering = _Gathering(weights, put_together, sent, ranks)
        found = ranks.run(as_here(gathering), f"the gather of {bucket[0].name}")
        del weights, put_together, gathering
        if not (everywhere or ranks.is_writer):
            found.clear()
        yield [each for item in bucket if item.name in found
               for each in written(item.name, found.pop(item.name), item.outputs, transform, place)]  # fmt: skip


def whole_pulled(
    pulled: Iterator[Iterator[tuple[TensorSpec, Named | None]]], ranks: Ranks, limit: int, everywhere: bool
) -> Iterator[list[Named]]:
    """The buckets of a source that rank 0 alone gets whole, on the CPU. `pulled`: the same on every rank, with the
    tensors on rank 0 only."""
    bucket: list[Named] = []
    size = count = 0
    for spec, item in itertools.chain.from_iterable(pulled):
        if count and size + spec.nbytes > limit:
            yield bucket
            bucket, size, count = [], 0, 0
        if everywhere and ranks.world_size > 1:
            item = (spec.name, _shared(_empty(spec) if item is None else item[1], ranks))
        if item is not None:
            bucket.append(item)
        size, count = size + spec.nbytes, count + 1
        del item
    if count:
        yield bucket


# -- inside ----------------------------------------------------------------------------------------------------------


class _Gathering:
    """The collectives of one bucket, and nothing else: run in a side thread."""

    def __init__(
        self, weights: Mapping[str, Weight], put_together: Mapping[str, torch.Tensor], sent: set[str], ranks: Ranks
    ) -> None:
        self.weights, self.put_together, self.sent, self.ranks = weights, put_together, sent, ranks

    def __call__(self) -> dict[str, torch.Tensor]:
        found = ((name, self._whole(name, weight)) for name, weight in self.weights.items())
        return {name: tensor for name, tensor in found if tensor is not None}

    def _whole(self, name: str, weight: Weight) -> torch.Tensor | None:
        if isinstance(weight, DTensor):
            return full_tensor(weight)
        tensor = self.put_together.get(name) if isinstance(weight, Piece) else weight
        if name not in self.sent or self.ranks.world_size == 1:
            return tensor
        return _from_zero(torch.empty_like(like(weight, None), device="cpu") if tensor is None else tensor, self.ranks)


def _shared(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    return ranks.run(as_here(lambda: _from_zero(tensor, ranks)), "a broadcast of the source's tensors")


def _from_zero(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Rank 0's values; a tensor of this rank's own, on the device where `tensor` is.

    By messages, not by a collective: the consensus goes over the same group, and must stay in step when a rank fails.
    """
    copy = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    if copy.numel() and ranks.rank == 0:
        sends = [dist.isend(as_bytes(copy), rank, group=ranks.group) for rank in range(1, ranks.world_size)]
        for send in sends:
            send.wait()  # type: ignore[union-attr]
    elif copy.numel():
        dist.recv(as_bytes(copy), 0, group=ranks.group)
    return copy.to(tensor.device)


def _empty(spec: TensorSpec) -> torch.Tensor:
    shape = (*spec.shape[:-1], spec.shape[-1] // 2) if spec.dtype == "F4" else spec.shape  # torch packs two in a byte
    return torch.empty(shape, dtype=TORCH_DTYPES[spec.dtype])


def _buckets(items: Sequence[Item], limit: int, dtype: torch.dtype | None) -> Iterator[list[Item]]:
    """A bucket is closed before the tensor that would take it over the limit."""
    bucket: list[Item] = []
    size = 0
    for item in items:
        nbytes = like(item.weight, dtype).nbytes
        if bucket and size + nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += nbytes
    if bucket:
        yield bucket
