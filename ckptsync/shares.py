"""Who writes what: byte-balanced shares of whole layers, one for each rank that writes."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING

from .config import Writers
from .manifest import TensorSpec
from .ranks import Ranks
from .shards.plan import ShardPlan, layer_of, plan_shards

if TYPE_CHECKING:
    from .export.pieces import Layout
    from .export.source import Walk
    from .export.stream import Item


def writing_ranks(writers: Writers, ranks: Ranks) -> tuple[int, ...]:
    """Collective. Rank 0 is always among them: it commits, and writes what only it can."""
    if writers == "all":
        return tuple(range(ranks.world_size))
    if writers == "rank0" or ranks.world_size == 1:
        return (0,)
    places = ranks.gather((socket.gethostname(), os.environ.get("LOCAL_RANK")))
    if all(local is not None for _, local in places):
        return tuple(sorted({0, *(rank for rank, (_, local) in enumerate(places) if local == "0")}))
    hosts = [host for host, _ in places]
    return tuple(rank for rank, host in enumerate(hosts) if hosts.index(host) == rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One track's walk, and who writes which part of it into which files."""

    walk: Walk
    shares: Mapping[int, Sequence[Item]]
    plans: Mapping[int, Sequence[ShardPlan]] | None
    """By rank; None where the files are found out while walking, by rank 0."""

    layouts: Mapping[str, Layout] | None = None
    """How the pieces of a snapshot lie across the ranks; None while the model itself is read."""

    @property
    def nbytes(self) -> int | None:
        """Bytes of all tensors as written; None if only the walk can tell."""
        return None if self.walk.specs is None else sum(spec.nbytes for spec in self.walk.specs)


def assign(walk: Walk, writers: Sequence[int], shard_bytes: int) -> Assignment:
    """The same on every rank. Files never straddle two shares, so each has one writer."""
    if walk.specs is None:
        return Assignment(walk=walk, shares={0: walk.items or ()}, plans=None)
    if walk.items is None:
        return Assignment(walk=walk, shares={}, plans={0: plan_shards(walk.specs, max_bytes=shard_bytes)})
    shares = dict(zip(writers, _cut(walk.items, len(writers)), strict=True))
    each = {rank: _plans(share, shard_bytes) for rank, share in shares.items()}
    return Assignment(walk=walk, shares=shares, plans=_numbered(each))


def assign_file(walk: Walk, file: str) -> Assignment:
    """Everything into one file, by rank 0: an adapter."""
    items = walk.items or ()
    specs = tuple(spec for item in items for _, spec in item.outputs or ())
    return Assignment(walk=walk, shares={0: items}, plans={0: [ShardPlan(file, specs)]})


def _plans(share: Sequence[Item], shard_bytes: int) -> tuple[ShardPlan, ...]:
    return _planned(tuple(spec for item in share for _, spec in item.outputs or ()), shard_bytes)


@lru_cache(maxsize=8)
def _planned(specs: tuple[TensorSpec, ...], shard_bytes: int) -> tuple[ShardPlan, ...]:
    """A training publishes the same tensors at each step, and waits for this."""
    return tuple(plan_shards(specs, max_bytes=shard_bytes))


def _numbered(each: Mapping[int, Sequence[ShardPlan]]) -> dict[int, list[ShardPlan]]:
    total, number = sum(map(len, each.values())), 0
    numbered: dict[int, list[ShardPlan]] = {}
    for rank, plans in each.items():
        numbered[rank] = []
        for plan in plans:
            number += 1
            numbered[rank].append(ShardPlan(f"model-{number:05d}-of-{total:05d}.safetensors", plan.tensors))
    return numbered


def _cut(items: Sequence[Item], parts: int) -> list[list[Item]]:
    """`parts` runs of whole layers, each layer in the part where its middle lies; some empty if layers are few."""
    layers = [list(layer) for _, layer in groupby(items, key=lambda item: layer_of(_first_name(item)))]
    sizes = [sum(item.nbytes for item in layer) for layer in layers]
    total, done = max(1, sum(sizes)), 0
    cut: list[list[Item]] = [[] for _ in range(parts)]
    for layer, size in zip(layers, sizes, strict=True):
        cut[min(parts - 1, (2 * done + size) * parts // (2 * total))] += layer
        done += size
    return cut


def _first_name(item: Item) -> str:
    return item.outputs[0][1].name if item.outputs else item.name
