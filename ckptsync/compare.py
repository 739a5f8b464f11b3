"""What differs between two versions, tensor by tensor: the first thing to look at when a reward collapses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import msgspec
import numpy as np
import torch

from .channel import Channel
from .delta import whole
from .manifest import MAIN_TRACK, Manifest, TensorEntry
from .reading import leased
from .schema_change import SchemaChange, schema_change
from .shards.plan import layer_of
from .shards.tensors import TORCH_DTYPES
from .version_tensors import VersionTensors

_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor, or a layer of them. Norms are Euclidean, in float64, over the elements that are finite in both
    versions; None where the dtype has no arithmetic."""

    name: str
    elements: int
    changed: int
    max_ulp: int
    """The largest distance in steps from one number of the dtype to the next."""

    norm: float | None
    """Of the difference."""

    base_norm: float | None
    """Of the older weights."""

    nonfinite: int = 0
    """Elements that are NaN or infinite in one of the versions, counted in the tensors that differ."""

    @property
    def fraction(self) -> float:
        return self.changed / self.elements if self.elements else 0.0

    @property
    def relative(self) -> float | None:
        """The difference's norm over the older weights'."""
        return self.norm / self.base_norm if self.norm is not None and self.base_norm else None


class Differences(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors that both versions have in one dtype and shape, and what they do not have in common."""

    tensors: tuple[Change, ...]
    schema: SchemaChange


def compare(channel: Channel, old: Manifest, new: Manifest, track: str = MAIN_TRACK) -> Differences:
    """Reads the tensors whose digests differ, from both versions. InvalidInput if one has no such track.

    A delta version is rebuilt; BrokenChain, BadShard or NotFound if one cannot be read.
    """
    with ExitStack() as stack:
        for manifest in (old, new):
            stack.enter_context(leased(channel, manifest.id, "diff"))
        stores = [stack.enter_context(whole(channel, manifest)) for manifest in (old, new)]
        sides = [VersionTensors(store, full, track) for store, full in stores]
        before, after = (side.entries for side in sides)
        both = [name for name in after if name in before and before[name].spec == after[name].spec]
        changes = tuple(_change(before[name], after[name], sides, old.digest == new.digest) for name in both)
    schema = schema_change(*({name: entry.spec for name, entry in side.items()} for side in (before, after)))
    return Differences(tensors=changes, schema=schema)


def by_layer(changes: Iterable[Change]) -> list[Change]:
    """The same, summed over the tensors of each layer, in their order."""
    layers: dict[str, list[Change]] = {}
    for change in changes:
        layers.setdefault(layer_of(change.name), []).append(change)
    return [_sum(name, each) for name, each in layers.items()]


def _sum(name: str, changes: list[Change]) -> Change:
    return Change(
        name=name,
        elements=sum(change.elements for change in changes),
        changed=sum(change.changed for change in changes),
        max_ulp=max(change.max_ulp for change in changes),
        norm=math.hypot(*(change.norm or 0.0 for change in changes)),
        base_norm=math.hypot(*(change.base_norm or 0.0 for change in changes)),
        nonfinite=sum(change.nonfinite for change in changes),
    )


def _change(old: TensorEntry, new: TensorEntry, sides: Sequence[VersionTensors], comparable: bool) -> Change:
    spec = new.spec
    elements = math.prod(spec.shape)
    if comparable and old.digest == new.digest:
        return Change(name=new.name, elements=elements, changed=0, max_ulp=0, norm=0.0, base_norm=None)
    changed, ulp, squares, base, nonfinite = 0, 0, 0.0, 0.0, 0
    dtype = TORCH_DTYPES.get(spec.dtype)
    plain = dtype is not None and spec.dtype not in {"F4", "C64", "BOOL"}
    for before, after in zip(sides[0].chunks(old), sides[1].chunks(new), strict=True):
        a, b = (_integers(data, dtype.itemsize if plain and dtype else 1) for data in (before, after))
        hit = np.flatnonzero(a != b)
        changed += len(hit)
        if plain and dtype is not None:
            ulp = max(ulp, _distance(a[hit], b[hit], dtype))
            more, more_base, not_finite = _squares(before, after, dtype)
            squares, base, nonfinite = squares + more, base + more_base, nonfinite + not_finite
    norms = (math.sqrt(squares), math.sqrt(base)) if plain else (None, None)
    return Change(name=new.name, elements=elements, changed=changed, max_ulp=ulp, norm=norms[0], base_norm=norms[1],
                  nonfinite=nonfinite)  # fmt: skip


def _squares(before: memoryview, after: memoryview, dtype: torch.dtype) -> tuple[float, float, int]:
    """Sums of squares, of the difference and of the older side; and of how many elements they are not, since a single
    NaN would make them NaN."""
    x, y = (torch.frombuffer(data, dtype=dtype).to(torch.float64) for data in (before, after))
    finite = x.isfinite() & y.isfinite()
    x, y = x[finite], y[finite]
    return float((y - x).square().sum()), float(x.square().sum()), len(finite) - len(x)


def _integers(data: memoryview, size: int) -> np.ndarray:
    return np.frombuffer(data, dtype=_INTEGERS[size])


def _distance(old: np.ndarray, new: np.ndarray, dtype: torch.dtype) -> int:
    if not len(old):
        return 0
    before, after = _place(old, dtype), _place(new, dtype)
    at = int(np.argmax(np.abs(after.astype(np.float64) - before.astype(np.float64))))
    return abs(int(after[at]) - int(before[at]))


def _place(bits: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Numbers in the order of the values that the bits stand for: floats are sign and magnitude, integers are not."""
    size = bits.dtype.itemsize * 8
    signed = bits.view(f"i{bits.dtype.itemsize}").astype(np.int64)
    if not dtype.is_floating_point:
        return signed if dtype.is_signed else bits.astype(np.int64)
    magnitude = signed & ((1 << (size - 1)) - 1)
    return np.where(signed < 0, -magnitude, magnitude)
