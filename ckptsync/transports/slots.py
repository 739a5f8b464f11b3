"""Colocated trainers and engines: which trainer rank exports memory for which of an engine's GPUs.

An engine's *slot* is the range of GPUs that it runs on, with the trainer ranks that export for them. The lowest of
these ranks, the coordinator, gathers the handles of the slot and talks to the engine. Every rank has the whole
tensors, so the trainer's parallelism need not be the engine's:

    trainer ranks   engines       slots
    0 1             TP=2          {0, 1}
    0 1             TP=1, TP=1    {0} {1}
    0 1             TP=1          {0}; rank 1 exports nothing, and takes part in every collective
    0               TP=2          {0}, which exports on a second GPU that it sees

Handles are found by physical GPU UUID: device numbers differ between processes.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ..errors import TransportError
from ..ranks import Ranks


class Place(NamedTuple):
    """Where a trainer rank is."""

    host: str
    gpu: str
    """UUID of the GPU that it computes on; empty where it has none."""

    visible: tuple[str, ...]
    """UUIDs of all GPUs that it sees, by device number."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One engine among the trainer's ranks."""

    engine: str
    gpus: tuple[str, ...]
    """UUIDs by rank of the engine."""

    exporter: tuple[int, ...]
    """For each of `gpus` the trainer rank that exports there."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.exporter)))

    @property
    def coordinator(self) -> int:
        return self.ranks[0]

    def gpus_of(self, rank: int) -> list[str]:
        """Where this rank exports; empty for a rank outside of the slot."""
        return [gpu for gpu, exporter in zip(self.gpus, self.exporter, strict=True) if exporter == rank]


def here(gpu: str, visible: Sequence[str]) -> Place:
    """Of this rank."""
    return Place(socket.gethostname(), gpu, tuple(visible))


def plan_slots(
    sizes: Mapping[str, int], places: Sequence[Place], given: Mapping[str, Sequence[str]] | None = None
) -> list[Slot]:
    """A slot for each engine of so many ranks, in order.

    `given` are UUIDs by engine, in the order of its ranks. An engine without takes the next GPUs: those of the
    trainer's ranks in their order, then others that a rank sees. TransportError where there is no GPU for a rank of
    an engine, or none that a trainer rank sees.
    """
    given = given or {}
    taken = {gpu for gpus in given.values() for gpu in gpus}
    free = [gpu for gpu in _in_order(places) if gpu not in taken]
    slots = []
    for engine, size in sizes.items():
        gpus = tuple(given.get(engine, ()))
        if not gpus:
            gpus, free = tuple(free[:size]), free[size:]
        if len(gpus) != size:
            raise TransportError(f"{engine} has {size} ranks, and there are {len(gpus)} GPUs for them: pass gpus=")
        slots.append(Slot(engine, gpus, tuple(_exporter(engine, gpu, places) for gpu in gpus)))
    return slots


def _in_order(places: Sequence[Place]) -> list[str]:
    """GPUs of ranks first, each once."""
    found = [place.gpu for place in places] + [gpu for place in places for gpu in place.visible]
    return list(dict.fromkeys(gpu for gpu in found if gpu))


def _exporter(engine: str, gpu: str, places: Sequence[Place]) -> int:
    own = [rank for rank, place in enumerate(places) if place.gpu == gpu]
    sees = own or [rank for rank, place in enumerate(places) if gpu in place.visible]
    if not sees:
        raise TransportError(f"{engine} runs on the GPU {gpu}, which no trainer rank sees")
    return sees[0]


class SlotGroups:
    """The gloo groups of slots, for gathering handles. Every rank makes every group, also those it is not in."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._groups: dict[tuple[int, ...], Any] = {}

    def prepare(self, slots: Sequence[Slot]) -> None:
        """Collective, on all ranks of the job."""
        if self._ranks.world_size == 1:
            return
        import torch.distributed as dist

        for ranks in (slot.ranks for slot in slots if len(slot.ranks) > 1):
            if ranks not in self._groups:
                make = partial(dist.new_group, list(ranks), backend="gloo")
                self._groups[ranks] = self._ranks.run(make, f"the group of ranks {ranks}")

    def gather(self, slot: Slot, mine: dict[str, Any]) -> dict[str, Any]:
        """Collective in the slot: what its ranks bring, on its coordinator; elsewhere nothing."""
        if len(slot.ranks) == 1:
            return mine
        import torch.distributed as dist

        is_coordinator = self._ranks.rank == slot.coordinator
        every: list[dict[str, Any]] | None = [{} for _ in slot.ranks] if is_coordinator else None
        group = self._groups[slot.ranks]
        self._ranks.run(
            lambda: dist.gather_object(mine, every, dst=slot.coordinator, group=group), f"the handles for {slot.engine}"
        )
        return {gpu: handle for each in every or [] for gpu, handle in each.items()}

    def close(self) -> None:
        """Give the groups back, on every rank."""
        import torch.distributed as dist

        for group in self._groups.values():
            if dist.is_initialized() and group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        self._groups.clear()
