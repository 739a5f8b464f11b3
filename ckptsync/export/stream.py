"""Tensors on their way to the writers: cast, gathered in lockstep, copied to host memory, bucket by bucket.

A bucket is what the ranks gather between two agreements. The order inside one is what keeps a job alive:
first everything that can fail alone (casts, user code), then the consensus, then nothing but the gathers.
While the writers write, the others wait in the next consensus, never in a collective of the job.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeVar, cast

import torch
from torch.distributed.tensor import DTensor

from ..errors import DuplicateName, InvalidInput, UnsupportedTensor
from ..manifest import TensorSpec
from ..ranks import Ranks
from ..shards.plan import check_specs
from ..shards.tensors import DTYPE_NAMES, spec_of
from .checks import check_items
from .collect import Messages, Wanted, as_here, collect
from .names import clean_name
from .pieces import Box, Layout, Piece, Weight, layout_of, local_of

T = TypeVar("T")
Named = tuple[str, torch.Tensor]
Transform = Callable[[str, torch.Tensor], Iterable[Named]]
Outputs = tuple[tuple[str, TensorSpec], ...]
"""Name from the transform (the tensor's own without one), and the spec under the name in the version."""

Place = Callable[[str], str | None]
"""The name in the version; None for one that a rule drops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One tensor of the model, and what becomes of it in the version."""

    name: str
    weight: Weight
    outputs: Outputs | None
    """As written; None if a transform cannot tell before it sees the values."""

    @property
    def nbytes(self) -> int:
        return self.weight.dtype.itemsize * torch.Size(self.weight.shape).numel()


def wire_dtype(tensor: Weight, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype on the wire: `dtype` for a floating tensor that is wider, else the tensor's own."""
    if dtype is not None and tensor.dtype.is_floating_point and tensor.dtype.itemsize > dtype.itemsize:
        return dtype
    return tensor.dtype


def like(tensor: Weight, dtype: torch.dtype | None) -> torch.Tensor:
    """The whole tensor as it will be on the wire, without values."""
    return torch.empty(tuple(tensor.shape), dtype=wire_dtype(tensor, dtype), device="meta")


def wire_spec(name: str, tensor: Weight, dtype: torch.dtype | None) -> TensorSpec:
    """What the manifest will say of the tensor; costs no gather and no memory."""
    spec = spec_of_meta(name, like(tensor, None)) if isinstance(tensor, Piece) else spec_of(name, tensor)
    return TensorSpec(name, DTYPE_NAMES[wire_dtype(tensor, dtype)], spec.shape)


@torch.no_grad()
def to_wire(tensor: Weight, dtype: torch.dtype | None) -> Weight:
    """Cast shard by shard, before the gather, so that half the bytes cross the network."""
    to = wire_dtype(tensor, dtype)
    if isinstance(tensor, Piece):
        return tensor if tensor.dtype == to else dataclasses.replace(tensor, dtype=to, local=tensor.local.to(to))
    return tensor.detach().to(to)


Shares = Mapping[int, Sequence[Item]]
"""By rank that writes: what it writes, in order."""


def agreed_layouts(
    items: Sequence[Item], ranks: Ranks, *, snapshot: bool, by_messages: bool = False
) -> dict[str, Layout]:
    """Rank 0's view of how the items lie. Without `snapshot`, DTensors are left to NCCL where they are on GPUs, or,
    `by_messages`, only those that cannot be put together from messages.

    Over gloo every rank would gather every tensor; by messages each byte goes to the rank that writes it, alone.
    """
    lies: dict[str, Layout] = {}
    for item in items if ranks.is_writer else ():
        if snapshot or _by_messages(item.name, item.weight, by_messages):
            lies[item.name] = layout_of(item.name, item.weight, ranks.world_size)
    return ranks.broadcast(lies)


def _by_messages(name: str, weight: Weight, wished: bool) -> bool:
    """Whether the tensor can be put together from messages, and should: not where NCCL does it on the GPU."""
    if not isinstance(weight, DTensor):
        return True
    try:
        layout_of(name, weight, 1)
    except UnsupportedTensor:  # partial sums, and shards of several blocks: only a collective puts them together
        return False
    return wished or weight.device_mesh.device_type == "cpu"


def stream_items(
    shares: Shares,
    layouts: Mapping[str, Layout],
    ranks: Ranks,
    dtype: torch.dtype | None,
    bucket_bytes: int,
    transform: Transform | None,
    place: Place,
    messages: Messages | None = None,
) -> Iterator[Named]:
    """Walk tensors that are all at hand (a module's, a dict's, a snapshot's). Yields what this rank owns.

    In each round every writer gets a bucket of its own, so that they write at the same time. Host memory: one
    bucket (or one tensor, if that is larger) on a writer, nothing kept elsewhere.
    """
    if messages is not None:
        messages.compare(_boxes_here(shares, layouts, ranks.rank, dtype))
    for bucket in _rounds(shares, bucket_bytes if ranks.world_size > 1 else 0):
        outputs = {item.name: item.outputs for _, item in bucket}
        wanted = [
            Wanted(i.name, to_wire(i.weight, dtype), owner, layouts.get(i.name), messages=messages)
            for owner, i in bucket
        ]
        for each in wanted:
            each.ready(ranks.rank)
        if messages is None:
            ranks.agree()
        else:
            _announce(wanted, ranks)
        for name, tensor in collect(wanted, ranks, ranks.rank):
            yield from written(name, tensor, outputs[name], transform, place)
            del tensor


def _boxes_here(
    shares: Shares, layouts: Mapping[str, Layout], rank: int, dtype: torch.dtype | None
) -> Iterator[tuple[str, Box, torch.Tensor]]:
    """What this rank has to send or to write, as it will be on the wire."""
    for owner, items in shares.items():
        for item in items:
            layout = layouts.get(item.name)
            box = layout.box_of(rank) if layout is not None else None
            if layout is not None and box is not None and box.source(owner) == rank:
                local = local_of(item.name, to_wire(item.weight, dtype), layout, rank)
                yield item.name, box, cast(torch.Tensor, local)


def _announce(wanted: Sequence[Wanted], ranks: Ranks) -> None:
    """As good as `agree`: everybody learns how long each message will be."""
    mine = {each.name: (each.message[0], len(each.message[1])) for each in wanted if each.message is not None}
    announced = ranks.gather(mine)
    for each in wanted:
        each.announced = announced


def outputs_of(name: str, model: torch.Tensor, transform: Transform | None, place: Place) -> Outputs | None:
    """What will be written of a tensor like `model` (on the meta device); None if the transform needs the values.

    Every rank comes to the same answer. Outputs that a rule drops are not in it.
    """
    try:
        made = [(name, model)] if transform is None else list(transform(name, model))
    except (
        RuntimeError,
        NotImplementedError,
        ValueError,
    ):  # what torch says of a meta tensor whose values are asked for
        return None
    return tuple((inner, spec_of_meta(final, each)) for inner, each in made if (final := place(inner)) is not None)


def spec_of_meta(name: str, tensor: torch.Tensor) -> TensorSpec:
    """`spec_of` for a tensor on the meta device, which is refused there."""
    empty = torch.empty(0, dtype=tensor.dtype)
    if tensor.ndim:
        empty = empty.view(*(0 if at == 0 else 1 for at in range(tensor.ndim)))
    elif tensor.dtype.itemsize:
        empty = torch.empty((), dtype=tensor.dtype)
    factor = 2 if DTYPE_NAMES.get(tensor.dtype) == "F4" else 1
    shape = (*tensor.shape[:-1], factor * tensor.shape[-1]) if tensor.ndim else ()
    return TensorSpec(name, spec_of(name, empty).dtype, tuple(shape))


def written(
    item_name: str, tensor: torch.Tensor, outputs: Outputs | None, transform: Transform | None, place: Place
) -> Iterator[Named]:
    """`tensor` under its names in the version. InvalidInput if a transform does not keep to what it announced."""
    made = [(item_name, tensor)] if transform is None else list(transform(item_name, tensor))
    del tensor
    if outputs is None:
        yield from ((final, each) for name, each in made if (final := place(name)) is not None)
        return
    due = dict(outputs)
    for name, each in made:
        if (spec := due.pop(name, None)) is None:
            continue  # dropped
        if (found := spec_of(spec.name, each)) != spec:
            raise InvalidInput(f"transform of {item_name!r}: yields {describe(found)}, announced {describe(spec)}")
        yield spec.name, each
    if due:
        raise InvalidInput(f"transform of {item_name!r}: does not yield {min(due)!r}, which it announced")


def stream_pulled(
    begin: Callable[[], Iterable[Named]],
    ranks: Ranks,
    dtype: torch.dtype | None,
    bucket_bytes: int,
    declared: Sequence[TensorSpec] | None,
) -> Iterator[Named]:
    """Walk what `begin()` gives, the same on every rank. Yields on rank 0 only.

    Raises RanksDisagree if ranks come with different tensors, InvalidInput if they are not the `declared`
    ones, DuplicateName if a name comes twice. What is yielded is a copy where more than one is held at a
    time, since a generator may reuse its buffer.
    """
    for _, tensors in pulled_buckets(begin, ranks, dtype, bucket_bytes if ranks.world_size > 1 else 0, declared):
        yield from tensors


def pulled_buckets(
    begin: Callable[[], Iterable[Named]],
    ranks: Ranks,
    dtype: torch.dtype | None,
    limit: int,
    declared: Sequence[TensorSpec] | None,
) -> Iterator[tuple[list[TensorSpec], Iterator[Named]]]:
    """The same, bucket by bucket on every rank: what is in it, and the tensors, which only rank 0 gets. Each bucket is
    to be walked to its end before the next one."""
    pull = _Puller(iter(begin()), ranks, dtype, declared)
    while True:
        bucket = ranks.run(as_here(lambda: pull(limit)), "the next tensors of the source")
        ranks.same([describe(spec) for spec, _ in bucket], "the tensors that the source yields")
        if not bucket:
            return
        wanted = [_pulled(spec, tensor) for spec, tensor in bucket if tensor is not None]
        specs = [spec for spec, _ in bucket]
        del bucket
        for each in wanted:
            each.ready(ranks.rank)
        yield specs, collect(wanted, ranks, ranks.rank)


def _pulled(spec: TensorSpec, tensor: torch.Tensor) -> Wanted:
    return Wanted(spec.name, tensor, 0, None if isinstance(tensor, DTensor) else layout_of(spec.name, tensor, 1))


class _Puller:
    """Pulls and checks a bucket's worth of items; keeps those that are to be written or gathered."""

    def __init__(
        self,
        source: Iterator[Named],
        ranks: Ranks,
        dtype: torch.dtype | None,
        declared: Sequence[TensorSpec] | None,
    ) -> None:
        self._source, self._keep, self._dtype = source, ranks.is_writer, dtype
        self._copy = declared is None or ranks.world_size > 1
        self._declared = None if declared is None else iter(declared)
        self._original: dict[str, str] = {}

    def __call__(self, limit: int) -> list[tuple[TensorSpec, torch.Tensor | None]]:
        bucket: list[tuple[TensorSpec, torch.Tensor | None]] = []
        size = 0
        while (not bucket or size < limit) and (item := next(self._source, None)) is not None:
            if not isinstance(item, tuple | list) or len(item) != 2:
                raise InvalidInput(
                    f"the source yields a {type(item).__name__}: publish a module, a state dict, a WeightSource or an "
                    "iterable of (name, tensor)"
                )
            spec, tensor = self._take(*item)
            size += spec.nbytes
            bucket.append((spec, tensor))
            del item, tensor
        if not bucket:
            self._check_complete()
        return bucket

    def _take(self, name: str, tensor: torch.Tensor) -> tuple[TensorSpec, torch.Tensor | None]:
        check_items({name: tensor})
        short = clean_name(name) if self._declared is None else name
        if short in self._original:
            raise DuplicateName(f"the source yields {self._original[short]!r} and {name!r}: both are {short!r}")
        self._original[short] = name
        spec = wire_spec(short, tensor, self._dtype)
        check_specs([spec])
        if self._declared is not None and (expected := next(self._declared, None)) != spec:
            raise InvalidInput(f"the source yields {describe(spec)} where its metadata says {describe(expected)}")
        if isinstance(tensor, DTensor):
            return spec, cast(torch.Tensor, to_wire(tensor, self._dtype))
        if not self._keep:
            return spec, None
        return spec, tensor.detach().to("cpu", wire_dtype(tensor, self._dtype), copy=self._copy)

    def _check_complete(self) -> None:
        if self._declared is not None and (missing := next(self._declared, None)) is not None:
            raise InvalidInput(f"the source ends before {describe(missing)}, which its metadata announces")


def describe(spec: TensorSpec | None) -> str:
    """A tensor in one line, for comparisons and messages."""
    return "nothing" if spec is None else f"{spec.name!r} {spec.dtype}{list(spec.shape)}"


def _rounds(shares: Shares, limit: int) -> Iterator[list[tuple[int, Item]]]:
    """A bucket of each writer's share, over and over, until all shares are through."""
    each = [_buckets(owner, share, limit) for owner, share in shares.items()]
    for buckets in zip_longest(*each, fillvalue=()):
        yield [pair for bucket in buckets for pair in bucket]


def _buckets(owner: int, items: Sequence[Item], limit: int) -> Iterator[list[tuple[int, Item]]]:
    bucket: list[tuple[int, Item]] = []
    size = 0
    for item in items:
        if bucket and size + item.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((owner, item))
        size += item.nbytes
    if bucket:
        yield bucket
