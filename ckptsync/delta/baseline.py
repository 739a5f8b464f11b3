"""What a rank that writes remembers of a committed version: the bytes of every tensor that it writes, in host memory.

Moves to the next version only when that is committed. The bytes come from what was published, or out of the committed
chain after a restart; never from a model, which has moved on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np

from ..channel import Channel
from ..digest import Bytes, digest
from ..errors import BadShard, BrokenChain
from ..manifest import MAIN_TRACK, Manifest, Parent, TensorSpec
from ..shards.plan import ShardPlan
from ..shards.read import read_header
from ..shards.write import header_bytes
from ..store.base import Reader
from . import whole
from .codec import Effort, apply, element_size, encode, parse
from .reference import U8

Key = tuple[str, str]
"""Track and tensor name."""

Plans = Mapping[str, Sequence[ShardPlan]]
"""What this rank writes, by track."""


@dataclass(slots=True)
class Baseline:
    """The bytes of one committed version. `version` has no files: it is what a delta's base says."""

    version: Parent
    tensors: dict[Key, U8] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(data.nbytes for data in self.tensors.values())

    def keep(self, key: Key, data: Bytes) -> None:
        self.tensors[key] = np.array(np.frombuffer(data, dtype=np.uint8))

    def follow(self, blobs: Mapping[Key, Bytes], specs: Mapping[Key, TensorSpec], version: Parent) -> None:
        """Become the next version, in place, by the changes that were published; proven block by block."""
        for key, blob in blobs.items():
            change(self.tensors[key], blob, specs[key])
        self.version = version

    def copy_to(self, other: Baseline | None) -> Baseline:
        """A copy, in the other's memory where there is one."""
        if other is None or other.tensors.keys() != self.tensors.keys():
            return Baseline(self.version, {key: data.copy() for key, data in self.tensors.items()})
        for key, data in self.tensors.items():
            np.copyto(other.tensors[key], data)
        other.version = self.version
        return other


@dataclass(slots=True)
class Comparison:
    """One publish, as this rank sees it: what differs from each base."""

    bases: Sequence[Baseline]
    effort: Effort
    pool: ThreadPoolExecutor
    fresh: Baseline | None = None
    """Filled with the new bytes where there is nothing to compare with."""

    known: Mapping[Key, Bytes | None] = field(default_factory=dict)
    """Changes against the first base that are made already; None where nothing changed."""

    blobs: list[dict[Key, Bytes]] = field(default_factory=list)
    specs: dict[Key, TensorSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.blobs = [{} for _ in self.bases]

    def __call__(self, track: str, spec: TensorSpec, data: memoryview) -> None:
        key = (track, spec.name)
        self.specs[key] = spec
        if self.fresh is not None:
            self.fresh.keep(key, data)
        for base, blobs in zip(self.bases, self.blobs, strict=True):
            if base is self.bases[0] and key in self.known:
                blob = self.known[key]
            else:
                old, size = base.tensors[key].data, element_size(spec.dtype)
                blob = encode(old, data, size, effort=self.effort, pool=self.pool)
            if blob is not None:
                blobs[key] = blob

    def nbytes(self) -> list[int]:
        """Bytes of the changes against each base."""
        return [sum(map(len, blobs.values())) for blobs in self.blobs]


def change(data: U8, blob: Bytes, spec: TensorSpec) -> None:
    """Make a tensor's bytes the next version's, in place. BadShard if they would become others."""
    size = element_size(spec.dtype)
    apply(parse(blob, size, spec.nbytes // size), data.data)


def identity(manifest: Manifest) -> Parent:
    return Parent(epoch=manifest.epoch, number=manifest.number, content_digest=manifest.content_digest)


def restore(channel: Channel, manifest: Manifest, plans: Plans) -> Baseline:
    """This rank's tensors out of the committed version, each proven by its digest: a delta against other bytes would be
    refused by every reader. BrokenChain if its shards would not be laid out like these, BadShard for other bytes.

    Also raises what reading a version raises. A file's digest covers its header, so that has to agree to the byte.
    """
    baseline = Baseline(identity(manifest))
    with whole(channel, manifest) as (store, full):
        for track, each in plans.items():
            digests = {entry.name: entry.digest for entry in full.tracks[track].tensors}
            for plan in each:
                path = plan.file if track == MAIN_TRACK else f"{track}/{plan.file}"
                with closing(store.open(f"{full.folder}/{path}")) as reader:
                    for name, data in _tensors(reader, plan):
                        if digest(data, full.digest) != digests[name]:
                            raise BadShard(f"{path}: tensor {name!r} is not what was published")
                        baseline.keep((track, name), data)
    return baseline


def _tensors(reader: Reader, plan: ShardPlan) -> Iterator[tuple[str, bytearray]]:
    wanted = header_bytes(plan)
    found = bytearray(min(len(wanted), reader.size))
    reader.readinto(0, memoryview(found))
    if found != wanted:
        raise BrokenChain(f"{plan.file} of the version before has other tensors, or in another order")
    for name, stored in read_header(reader, name=plan.file).tensors.items():
        data = bytearray(stored.spec.nbytes)
        if data:
            reader.readinto(stored.offset, memoryview(data))
        yield name, data
