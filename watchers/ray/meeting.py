"""Where processes of a group meet: the address and a port of an actor, as Ray's other nodes see it."""

from __future__ import annotations

from typing import Any, NamedTuple

import ray
from ray.actor import ActorHandle

from ckptsync.transports.receivers import free_port

from .calls import get


class Meeting(NamedTuple):
    """Where rank 0 of a group is found."""

    address: str
    port: int
    """Nobody listened there when it was picked. Rank 0 is to listen soon."""

    @property
    def url(self) -> str:
        """`tcp://10.0.0.7:40123`, for `torch.distributed.init_process_group(init_method=…)`."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"tcp://{host}:{self.port}"


def node_address() -> str:
    """This node's address, as Ray's other nodes reach it: `VllmNccl(address=node_address())`."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def meeting_here() -> Meeting:
    """On this process's node."""
    address = node_address()
    return Meeting(address, free_port(address))


def meet_at(actor: ActorHandle[Any], *, timeout: float = 300.0) -> Meeting:
    """On the node of `actor`, the group's rank 0; any actor, it needs no method for it.

        place = meet_at(trainers[0])
        ray.get([trainer.join.remote(place.url, rank, len(trainers)) for rank, trainer in enumerate(trainers)])

    Waits for the actor to start, and for what it is at; Ray's GetTimeoutError or RayActorError.
    """
    return get(actor.__ray_call__.remote(lambda _: meeting_here()), timeout)
