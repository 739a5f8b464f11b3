"""Sending to engines over a group of rank 0 and the engine's ranks: each bucket is announced, and then broadcast.

An announcement is an HTTP call that is answered when every rank of the engine has loaded the bucket; while it is
under way rank 0 broadcasts. Each engine has a group of its own, so that one that is gone breaks no other's. A group
is made before the first engine is touched, kept between syncs, and made anew after a failure or a restart of the
engine. The other ranks of the trainer take part in the gathers, and in nothing else.

A broadcast whose other end died may never return (NCCL over NVLink does not notice). So it runs in a side thread, and
when the engine's answer is an error, or is late, the group is given up, the thread with it.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch

from ..errors import CkptSyncError, TransportError, TransportFailed, TransportUnavailable
from ..export.collect import as_here
from ..lane import Lane
from .base import Delivery, Sending, SyncEngine
from .packing import Named, arranged, layout_of
from .receivers import (
    HttpEngine,
    Layout,
    Receiver,
    address_towards,
    at_once,
    check_carried,
    dial,
    free_port,
    of_one_model,
)
from .sums import Verification, finish, why_none

RENDEZVOUS_SECONDS = 120.0
GRACE_SECONDS = 5.0
"""After an engine's answer: for what the trainer's end has left to do, and after an error for the true cause."""


class Group(Protocol):
    """Rank 0's end of a group with one engine's ranks."""

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Blocks until they are sent; forever, if the other end is gone."""
        ...

    def abort(self) -> None:
        """Give the group up. Does not wait for the other end."""
        ...


class GroupReceiver(Receiver, Protocol):
    """A receiver that joins groups."""

    def join(self, address: str, port: int, world_size: int, name: str) -> None:
        """Answered when all ranks of the engine are in the group."""
        ...


R = TypeVar("R", bound=GroupReceiver)
Open = Callable[[str, int, int, str], Group]
"""Address, port, world size, name -> rank 0's end. Returns when everyone is in."""


class Broadcasting(Generic[R]):
    """What the transports over a group have in common.

    `address` is where the engines' ranks reach rank 0; by default its address on the way to the engine. `verify`:
    after each send the engines' own checksums are compared, before they have the label (`sums.py`).
    """

    name: str
    pauses = True

    def __init__(self, *, address: str = "", open_group: Open | None = None, verify: bool = False) -> None:
        self._address = address
        self._open = open_group or self.open_group
        self._links: dict[str, _Link] = {}
        self._made = 0
        self.verification = Verification() if verify else None

    def why_not(self) -> str | None:
        """A clause if this trainer rank lacks what the group needs."""
        if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
            return "this trainer rank has no CUDA with NCCL"
        return None

    def probe(self, engines: Sequence[SyncEngine]) -> str | None:
        """What the trainer lacks, or what a server says of itself."""
        if why := self.why_not():
            return why
        try:
            receivers = dial(engines, self.receiver)
        except TransportError as error:
            return str(error)
        return why_none(receivers.values(), sums=self.verification is not None)

    def carries(self, delivery: Delivery) -> str | None:
        return of_one_model(delivery)

    def send(self, sending: Sending) -> None:
        check_carried(self.carries(sending.delivery), self.name)
        receivers = dial(sending.engines, self.receiver) if sending.is_sender else {}
        at_once([as_here(partial(self._connect, each, receivers[each.name])) for each in sending.engines if receivers])
        sending.ranks.agree()
        sending.touch(*sending.engines)
        at_once([partial(each.begin, sending.delivery.label) for each in receivers.values()])
        sending.enter("bucket")
        for bucket in sending.delivery.buckets():
            self._send_bucket(sending, receivers, arranged(bucket.tensors))
            del bucket
        sending.ranks.agree()
        finish(sending, receivers, self.verification)

    def close(self) -> None:
        for name in list(self._links):
            self._drop(name)

    # -- for the transports --------------------------------------------------------------------------------------------

    def receiver(self, engine: HttpEngine) -> R:
        raise NotImplementedError

    def open_group(self, address: str, port: int, world_size: int, name: str) -> Group:
        raise NotImplementedError

    def on_wire(self, tensors: Sequence[Named]) -> list[torch.Tensor]:
        """What is broadcast for these tensors, on the group's device."""
        raise NotImplementedError

    # -- inside --------------------------------------------------------------------------------------------------------

    def _connect(self, engine: SyncEngine, receiver: R) -> None:
        """Unless there is a group with this very process of the engine."""
        boot = engine.status().boot_id
        if engine.name in self._links and self._links[engine.name].boot == boot:
            return
        self._drop(engine.name)
        receiver.connect()
        world_size = 1 + receiver.world_size()
        address = self._address or address_towards(receiver.http.url)
        self._made += 1
        place = (address, free_port(address), world_size, f"ckptsync-{id(self):x}-{self._made}")
        link = _Link(boot)
        joined, opened = link.announce(partial(receiver.join, *place)), link.send(as_here(partial(self._open, *place)))
        _await([joined, opened], RENDEZVOUS_SECONDS, f"{engine.name} to join the group", TransportUnavailable)
        link.group = opened.result()
        self._links[engine.name] = link

    def _send_bucket(self, sending: Sending, receivers: Mapping[str, R], tensors: Sequence[Named]) -> None:
        if not receivers:
            return
        layout = layout_of(tensors)
        sent = self.on_wire(tensors)
        works = [as_here(partial(self._exchange, name, each, layout, sent)) for name, each in receivers.items()]
        sending.ranks.run(partial(at_once, works), "a bucket")

    def _exchange(self, name: str, receiver: R, layout: Layout, sent: Sequence[torch.Tensor]) -> None:
        link = self._links[name]
        group = link.group
        if group is None:
            raise TransportError(f"{self.name}: there is no group with {name}")
        told = link.announce(partial(receiver.update, layout, ()))
        done = link.send(as_here(partial(group.broadcast, sent)))
        seconds = receiver.http.options.load_timeout(layout.nbytes)
        try:
            _await([told, done], seconds + GRACE_SECONDS, f"{name} to take a bucket", TransportFailed)
        except BaseException:
            self._drop(name)
            raise

    def _drop(self, name: str) -> None:
        if (link := self._links.pop(name, None)) is not None:
            link.close()


class _Link:
    """A group with one process of an engine, and the threads that may get stuck with it."""

    def __init__(self, boot: str) -> None:
        self.boot = boot
        self.group: Group | None = None
        self._announcing, self._sending = Lane("ckptsync-announce"), Lane("ckptsync-broadcast")

    def announce(self, work: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        return self._announcing.submit(work)

    def send(self, work: Callable[[], Any]) -> concurrent.futures.Future[Any]:
        return self._sending.submit(work)

    def close(self) -> None:
        if self.group is not None:
            self.group.abort()
        self._announcing.close()
        self._sending.close()


def _await(
    running: Sequence[concurrent.futures.Future[Any]], seconds: float, what: str, late: type[CkptSyncError]
) -> None:
    """All of them. Their first error, the engine's own words first; `late` after so many seconds."""
    done, left = concurrent.futures.wait(running, seconds, concurrent.futures.FIRST_EXCEPTION)
    if left and any(each.exception() for each in done):
        concurrent.futures.wait(left, GRACE_SECONDS)
    for each in running:
        if each.done():
            each.result()
    if not all(each.done() for each in running):
        raise late(f"waited {seconds:.0f} s for {what}")
