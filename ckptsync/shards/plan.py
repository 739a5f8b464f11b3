"""Which tensor goes into which file, and in what order: arithmetic over specs, nothing is read or written.

Engines load layer by layer, so the source's order is kept and layers stay whole: a reader that has the first
shard can load the first layers. safetensors' own `save_file` sorts by dtype and then by name as text, which
puts `layers.10` before `layers.2`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import msgspec

from ..errors import DuplicateName, InvalidInput, InvalidName, UnsupportedTensor
from ..manifest import MAX_RANK, TensorSpec, check_basename
from ..safetensors_format import DTYPE_BITS, MAX_HEADER

MAX_BYTES = 4 << 30
"""Default size of a shard: large enough to stream, small enough to retry and to hold once in host memory."""

_METADATA_ROOM = 1 << 20
_LAYER = re.compile(r"(?:^|\.)\d+(?=\.|$)", re.ASCII)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One file: its name, and its tensors in the order in which their bytes lie in it."""

    file: str
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, without the header."""
        return sum(spec.nbytes for spec in self.tensors)


def plan_shards(
    specs: Iterable[TensorSpec],
    *,
    max_bytes: int = MAX_BYTES,
    max_header: int = MAX_HEADER - _METADATA_ROOM,
    numbered: bool = True,
    stem: str = "model",
) -> list[ShardPlan]:
    """Cut `specs` into shards, in their order, whole layers per shard.

    A shard ends before the layer that would take it over `max_bytes` of tensors or `max_header` bytes of
    header (the reference reader refuses more than 100 MB; the default leaves 1 MiB for metadata). A layer
    that is larger by itself gets shards of its own, a tensor that is larger a shard of its own. Files are
    `<stem>-00001-of-0000N.safetensors`; with `numbered=False` everything goes into `<stem>.safetensors`,
    whatever its size, as PEFT wants it.

    Raises InvalidName, DuplicateName, UnsupportedTensor, or InvalidInput if an unnumbered header is too
    large.
    """
    specs = list(specs)
    check_specs(specs)
    check_basename(f"{stem}.safetensors")
    if not numbered:
        if _weigh(specs).header > max_header:
            raise InvalidInput(f"{len(specs)} tensors do not fit the header of one file: publish numbered shards")
        return [ShardPlan(f"{stem}.safetensors", aligned(specs))]
    cuts = list(_cut(specs, _Weight(max_bytes, max_header)))
    return [
        ShardPlan(f"{stem}-{number:05d}-of-{len(cuts):05d}.safetensors", aligned(tensors))
        for number, tensors in enumerate(cuts, start=1)
    ]


def layer_of(name: str) -> str:
    """The layer a tensor belongs to: its name up to the first numeric part, else the name of its module."""
    found = _LAYER.search(name)
    return name[: found.end()] if found else name.rpartition(".")[0] or name


def in_layer_order(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Sorted by name with numbers compared as numbers: for sources that come sorted as text."""
    return sorted(specs, key=lambda spec: _natural(spec.name))


def aligned(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The same order if every tensor then starts at a multiple of its element size, or else by size.

    A safetensors file has no holes, so three I8 values before a BF16 tensor would put it on an odd address,
    where torch refuses a view. After a stable sort by element size, descending, everything is aligned by
    itself.
    """
    offset = 0
    for spec in specs:
        if offset % element_size(spec.dtype):
            return tuple(sorted(specs, key=lambda s: -element_size(s.dtype)))
        offset += spec.nbytes
    return tuple(specs)


def element_size(dtype: str) -> int:
    """Bytes of one element, 1 for the packed dtypes F4 and F6."""
    return max(1, DTYPE_BITS[dtype] // 8)


def check_specs(specs: Iterable[TensorSpec]) -> None:
    """Refuse what no reader would take back, before the first byte is written."""
    seen: dict[str, TensorSpec] = {}
    for spec in specs:
        check_tensor_name(spec.name)
        _check_layout(spec)
        if twin := seen.get(spec.name):
            raise DuplicateName(
                f"two tensors claim the name {spec.name!r}: {_describe(twin)} and {_describe(spec)}; "
                "an engine would load both and keep the last"
            )
        seen[spec.name] = spec


def check_tensor_name(name: str) -> str:
    """The name, if it can be written and read back. `__metadata__` saves but can never be opened again."""
    if name == "__metadata__":
        raise InvalidName("a tensor may not be named '__metadata__': the format keeps that key for itself")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidName(f"tensor name {name!r} holds a lone surrogate, which UTF-8 cannot carry") from None
    return name


def _check_layout(spec: TensorSpec) -> None:
    if spec.dtype not in DTYPE_BITS:
        raise UnsupportedTensor(f"tensor {spec.name!r}: dtype {spec.dtype!r} is not one of safetensors'")
    if len(spec.shape) > MAX_RANK or any(not 0 <= size < 1 << 62 for size in spec.shape):
        raise UnsupportedTensor(f"tensor {spec.name!r}: shape {list(spec.shape)} is not possible")
    if not fills_bytes(spec):
        raise UnsupportedTensor(
            f"tensor {spec.name!r}: {_describe(spec)} does not fill whole bytes, which safetensors refuses"
        )


def fills_bytes(spec: TensorSpec) -> bool:
    """Whether the elements fill whole bytes; only F4 and F6 can fail to."""
    return math.prod(spec.shape) * DTYPE_BITS[spec.dtype] % 8 == 0


def _describe(spec: TensorSpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"


def _cut(specs: list[TensorSpec], limit: _Weight) -> Iterator[list[TensorSpec]]:
    layers = (list(group) for _, group in groupby(specs, key=lambda spec: layer_of(spec.name)))
    for shard in _pack(layers, limit):
        # Only a layer that is too large by itself does not fit here: it is cut between its tensors.
        yield from [shard] if _weigh(shard).fits(limit) else _pack(([spec] for spec in shard), limit)


def _pack(groups: Iterable[list[TensorSpec]], limit: _Weight) -> Iterator[list[TensorSpec]]:
    """Greedy and in order: a shard ends before the group that would take it over the limit."""
    shard: list[TensorSpec] = []
    weight = _Weight(0, 0)
    for group in groups:
        more = _weigh(group)
        if shard and not weight.plus(more).fits(limit):
            yield shard
            shard, weight = [], _Weight(0, 0)
        shard += group
        weight = weight.plus(more)
    if shard:
        yield shard


class _Weight(NamedTuple):
    data: int
    header: int

    def plus(self, other: _Weight) -> _Weight:
        return _Weight(self.data + other.data, self.header + other.header)

    def fits(self, limit: _Weight) -> bool:
        return self.data <= limit.data and self.header <= limit.header


def _weigh(specs: Iterable[TensorSpec]) -> _Weight:
    weights = [(spec.nbytes, _header_bound(spec)) for spec in specs]
    return _Weight(sum(data for data, _ in weights), sum(header for _, header in weights))


def _header_bound(spec: TensorSpec) -> int:
    """At most this many bytes of header: the JSON of the entry with two offsets of up to 20 digits."""
    return len(msgspec.json.encode(spec.name)) + sum(len(str(size)) + 1 for size in spec.shape) + 100


def _natural(name: str) -> list[tuple[int, str] | str]:
    # Digits by length and then as text: compares as numbers do, without a limit on how many there are.
    parts = re.split(r"(\d+)", name, flags=re.ASCII)
    return [(len(p.lstrip("0")), p.lstrip("0")) if i % 2 else p for i, p in enumerate(parts)]
