"""Tensors on their way to the writer: cast, gathered in lockstep, copied to host memory, bucket by bucket.

A bucket is what the ranks gather between two agreements. The order inside one is what keeps a job alive:
first everything that can fail alone (casts, user code), then the consensus, then nothing but the gathers.
While rank 0 writes, the others wait in the next consensus, never in a collective of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar, cast

import torch
from torch.distributed.tensor import DTensor

from ..errors import DuplicateName, InvalidInput
from ..manifest import TensorSpec
from ..ranks import Ranks
from ..shards.plan import check_specs
from ..shards.tensors import DTYPE_NAMES, spec_of
from .checks import check_items
from .names import clean_name

T = TypeVar("T")
Named = tuple[str, torch.Tensor]


def wire_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype on the wire: `dtype` for a floating tensor that is wider, else the tensor's own."""
    if dtype is not None and tensor.is_floating_point() and tensor.element_size() > dtype.itemsize:
        return dtype
    return tensor.dtype


def wire_spec(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> TensorSpec:
    """What the manifest will say of the tensor; costs no gather and no memory."""
    spec = spec_of(name, tensor)
    return TensorSpec(name, DTYPE_NAMES[wire_dtype(tensor, dtype)], spec.shape)


def stream_known(
    tensors: Sequence[tuple[TensorSpec, torch.Tensor]],
    ranks: Ranks,
    dtype: torch.dtype | None,
    bucket_bytes: int,
) -> Iterator[Named]:
    """Walk tensors that are all at hand (a module's, a dict's). Yields on the writer only.

    Host memory: one bucket (or one tensor, if that is larger) on the writer, nothing kept elsewhere.
    """
    for bucket in _buckets(tensors, bucket_bytes if ranks.world_size > 1 else 0):
        ready = [(spec.name, to_wire(tensor, dtype)) for spec, tensor in bucket]
        ranks.agree()
        yield from gather(ready, ranks)
        del ready


def stream_pulled(
    source: Iterable[Named],
    ranks: Ranks,
    dtype: torch.dtype | None,
    bucket_bytes: int,
    declared: Sequence[TensorSpec] | None,
) -> Iterator[Named]:
    """Walk an iterator, the same on every rank. Yields on the writer only.

    Raises RanksDisagree if ranks come with different tensors, InvalidInput if they are not the `declared`
    ones, DuplicateName if a name comes twice. What is yielded is a copy where more than one is held at a
    time, since a generator may reuse its buffer.
    """
    pull = _Puller(iter(source), ranks, dtype, declared)
    limit = bucket_bytes if ranks.world_size > 1 else 0
    while True:
        bucket = ranks.run(_as_here(lambda: pull(limit)), "the next tensors of the source")
        ranks.same([describe(spec) for spec, _ in bucket], "the tensors that the source yields")
        if not bucket:
            return
        yield from gather([(spec.name, tensor) for spec, tensor in bucket if tensor is not None], ranks)


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
            return spec, to_wire(tensor, self._dtype)
        if not self._keep:
            return spec, None
        return spec, tensor.detach().to("cpu", wire_dtype(tensor, self._dtype), copy=self._copy)

    def _check_complete(self) -> None:
        if self._declared is not None and (missing := next(self._declared, None)) is not None:
            raise InvalidInput(f"the source ends before {describe(missing)}, which its metadata announces")


@torch.no_grad()
def to_wire(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Cast shard by shard, before the gather, so that half the bytes cross the network."""
    return tensor.detach().to(wire_dtype(tensor, dtype))


def gather(bucket: Sequence[Named], ranks: Ranks) -> Iterator[Named]:
    """All ranks gather the bucket's DTensors; the writer gets full CPU tensors, one after another."""

    def gather_all() -> list[Named]:
        return [(name, full) for name, tensor in bucket if (full := _full(tensor, ranks.is_writer)) is not None]

    full = ranks.run(_as_here(gather_all), f"the gather of {bucket[0][0]}") if bucket else []
    full.reverse()
    while full:
        yield full.pop()  # the list lets go of each tensor before it is written


def _full(tensor: torch.Tensor, keep: bool) -> torch.Tensor | None:
    if isinstance(tensor, DTensor):
        if tensor.device.type != (device := tensor.device_mesh.device_type):
            tensor = cast(DTensor, tensor.to(device))  # offloaded shards: NCCL gathers on the GPU only
        tensor = tensor.full_tensor()
    return tensor.cpu() if keep else None


def _as_here(work: Callable[[], T]) -> Callable[[], T]:
    """`work` for a side thread, which would start on another device and stream and record gradients."""
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]

    def there() -> T:
        if stream is not None:
            torch.cuda.set_stream(stream)
        with torch.no_grad():
            return work()

    return there


def describe(spec: TensorSpec | None) -> str:
    """A tensor in one line, for comparisons and messages."""
    return "nothing" if spec is None else f"{spec.name!r} {spec.dtype}{list(spec.shape)}"


def _buckets(
    tensors: Sequence[tuple[TensorSpec, torch.Tensor]], limit: int
) -> Iterator[list[tuple[TensorSpec, torch.Tensor]]]:
    bucket: list[tuple[TensorSpec, torch.Tensor]] = []
    size = 0
    for spec, tensor in tensors:
        if bucket and size + spec.nbytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((spec, tensor))
        size += spec.nbytes
    if bucket:
        yield bucket
