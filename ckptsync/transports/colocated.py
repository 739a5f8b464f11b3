"""Sending to engines that share this trainer's GPUs: each bucket is packed on the GPU, and its handle sent.

Each rank that exports for an engine packs the bucket into a buffer on that engine's GPU; its handle goes to the
slot's coordinator, which sends all of them to the engine; the engine's ranks map the buffer, and load from it. The
buffer is filled again only after the engine has answered: every bucket begins with a consensus, and a coordinator
comes to it when its engine has. See `slots` for who exports what.

All ranks mark all engines as touched before the first is, so that every rank knows the same of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from ..errors import TransportError
from .base import Delivery, Sending, SyncEngine
from .devices import CudaDevices, Devices
from .packing import Named, arranged, layout_of, pack
from .receivers import HttpEngine, Layout, Receiver, at_once, check_carried, dial, is_here, of_one_model
from .slots import Slot, SlotGroups, here, plan_slots
from .sums import Verification, finish, why_none

R = TypeVar("R", bound=Receiver)


class Colocated(Generic[R]):
    """What the colocated transports have in common.

    `gpus`: engine name -> UUIDs of its GPUs, by rank of the engine; by default engines take the trainer's GPUs in
    order, those that need nothing too. `devices` makes handles; CUDA by default. `verify`: after each send the engines'
    own checksums are compared, before they have the label (`sums.py`).
    """

    name: str
    pauses = True
    reuses_buffers = True
    """Whether an engine is done with a buffer when it answers. If not, torch keeps the memory until it is."""

    def __init__(
        self,
        *,
        gpus: Mapping[str, Sequence[str]] | None = None,
        devices: Devices | None = None,
        verify: bool = False,
    ) -> None:
        self._gpus = dict(gpus or {})
        self._devices = devices or CudaDevices()
        self._groups: SlotGroups | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        self._known: Sequence[SyncEngine] = ()
        self.verification = Verification() if verify else None

    def probe(self, engines: Sequence[SyncEngine]) -> str | None:
        """No CUDA, memory that cannot be shared, a GPU that is not seen, no engine on this host, a server that was
        started otherwise."""
        self._known = engines
        if why := self._devices.why_not():
            return why
        try:
            receivers = dial(engines, self.receiver)
        except TransportError as error:
            return str(error)
        local = [receiver for receiver in receivers.values() if is_here(receiver.http.url)]
        if not local:
            return "no engine runs on this host"
        return why_none(local, sums=self.verification is not None)

    def carries(self, delivery: Delivery) -> str | None:
        return of_one_model(delivery)

    def send(self, sending: Sending) -> None:
        check_carried(self.carries(sending.delivery), self.name)
        try:
            self._send(sending)
            sending.ranks.agree()
        except BaseException:
            self._groups = None  # left alone, by every rank: one may be in the middle of a gather
            raise
        finally:
            self._let_go()

    def close(self) -> None:
        if self._groups is not None:
            self._groups.close()
        self._groups = None

    # -- for the transports --------------------------------------------------------------------------------------------

    def receiver(self, engine: HttpEngine) -> R:
        raise NotImplementedError

    def _handle(self, buffer: torch.Tensor, gpu: str, layout: Layout) -> Any:
        """What the engine's rank on that GPU is sent for the bucket. Picklable."""
        raise NotImplementedError

    # -- inside --------------------------------------------------------------------------------------------------------

    def _send(self, sending: Sending) -> None:
        receivers, label = dial(sending.engines, self.receiver), sending.delivery.label
        slots, groups = self._slots(sending)
        mine = {slot.engine: receivers[slot.engine] for slot in slots if slot.coordinator == sending.ranks.rank}
        self._check_here(mine.values(), sending)
        at_once([each.connect for each in mine.values()])
        sending.ranks.agree()
        sending.touch(*sending.engines)
        at_once([partial(each.begin, label) for each in mine.values()])
        self._send_buckets(sending, slots, groups, mine)
        sending.ranks.agree()
        finish(sending, mine, self.verification)

    def _slots(self, sending: Sending) -> tuple[list[Slot], SlotGroups]:
        """The same on every rank, before anything is touched. Of the engines that are sent to; planned with all, so
        that an engine has its place whoever else needs the version."""
        ranks, names = sending.ranks, [engine.name for engine in sending.engines]
        all_engines = {engine.name: engine for engine in (*self._known, *sending.engines)}
        asked = dial(list(all_engines.values()), self.receiver) if sending.is_sender else {}
        sizes = ranks.broadcast({name: each.world_size() for name, each in asked.items()})
        places = ranks.gather(here(self._devices.own(), self._devices.visible()))
        slots = [slot for slot in plan_slots(sizes, places, self._gpus) if slot.engine in names]
        if self._groups is None:
            self._groups = SlotGroups(ranks)
        self._groups.prepare(slots)
        return slots, self._groups

    @staticmethod
    def _check_here(receivers: Iterable[R], sending: Sending) -> None:
        away = [receiver.http.url for receiver in receivers if not is_here(receiver.http.url)]
        if away:
            raise TransportError(f"{', '.join(away)}: on another host than its trainer, rank {sending.ranks.rank}")

    def _send_buckets(self, sending: Sending, slots: Sequence[Slot], groups: SlotGroups, mine: Mapping[str, R]) -> None:
        sending.enter("bucket")
        member_of = [slot for slot in slots if sending.ranks.rank in slot.ranks]
        for bucket in sending.delivery.buckets(everywhere=True):
            tensors = arranged(bucket.tensors)
            layout = layout_of(tensors)
            payloads = {}
            for slot in member_of:
                made = {gpu: self._fill(gpu, tensors, layout, sending) for gpu in slot.gpus_of(sending.ranks.rank)}
                handles = groups.gather(slot, made)
                payloads[slot.engine] = [handles.get(gpu) for gpu in slot.gpus]
            at_once([partial(each.update, layout, payloads[name]) for name, each in mine.items()])
            del bucket, tensors
            if not self.reuses_buffers:
                self._let_go()

    def _fill(self, gpu: str, tensors: Sequence[Named], layout: Layout, sending: Sending) -> Any:
        buffer = self._buffer(gpu, layout.nbytes, sending.delivery.bucket_bytes)
        pack(tensors, buffer)
        return self._handle(buffer[: layout.nbytes], gpu, layout)

    def _let_go(self) -> None:
        self._buffers.clear()
        self._devices.collect()

    def _buffer(self, gpu: str, nbytes: int, usual: int) -> torch.Tensor:
        """Held until the send has ended: receivers read from it."""
        if gpu not in self._buffers or self._buffers[gpu].nbytes < nbytes:
            self._buffers[gpu] = self._devices.buffer(gpu, max(nbytes, usual))
        return self._buffers[gpu]
