"""What a fast transport asks of one engine over HTTP, whichever engine it is.

    connect     harmless: get ready to receive
    begin       from here on the engine may hold a mix; its label says so, and is no version's
    update      one bucket is in, on every rank of the engine, when it returns
    finish      the engine holds all of it, and its label says which
    sums        of what it holds, by the engine itself (`sums.py`)

The label is that of a version only after everything else has succeeded: a trainer that dies in mid-send leaves an
engine that names no version, so that whoever comes next, a watcher or the trainer's successor, does not take the old
label for the truth.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable
from urllib.parse import urlsplit

from ..engine_http import EngineHttp
from ..errors import TransportError
from .base import Delivery, SyncEngine

T = TypeVar("T")


@runtime_checkable
class HttpEngine(Protocol):
    """An engine behind HTTP, as the adapters of `watchers.engines` are."""

    http: EngineHttp

    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Layout:
    """What lies in a bucket, in order, without gaps."""

    names: list[str]
    dtypes: list[str]
    """torch's names: `bfloat16`."""

    shapes: list[list[int]]
    sizes: list[int]
    """Bytes."""

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)


class Receiver(Protocol):
    """One engine as the receiving end of one transport. Its methods raise as the engine adapters' do."""

    def why_not(self) -> str | None:
        """A clause if the server says of itself that this transport cannot work; nothing is changed."""
        ...

    def world_size(self) -> int:
        """How many ranks, each with a GPU of its own, hold the model."""
        ...

    @property
    def http(self) -> EngineHttp: ...

    def connect(self) -> None: ...

    def begin(self, label: str) -> None: ...

    def update(self, layout: Layout, payload: Sequence[Any]) -> None: ...

    def finish(self, label: str) -> None: ...

    def set_label(self, label: str) -> None:
        """After the end, where that was not to say it yet."""
        ...

    def why_no_sums(self) -> str | None:
        """A clause if the engine takes no sums of its weights. Takes none."""
        ...

    def sums(self, nbytes: int) -> Mapping[str, str]:
        """Rank and tensor -> the engine's own checksum of it, empty where it takes none. `nbytes` of the version."""
        ...


def partial_label(label: str) -> str:
    """What an engine reports while it may hold a mix: text that is no version."""
    return f"partial {label}"


def dial(engines: Sequence[SyncEngine], make: Callable[[HttpEngine], T]) -> dict[str, T]:
    """Engine -> its receiver. TransportError for an engine that is not behind HTTP."""
    found: dict[str, T] = {}
    for engine in engines:
        if not isinstance(engine, HttpEngine):
            raise TransportError(f"{engine.name} is not reached over HTTP")
        found[engine.name] = make(engine)
    return found


def at_once(works: Sequence[Callable[[], T]]) -> list[T]:
    """All of them, each in a thread; then the first error, if any."""
    if not works:
        return []
    with ThreadPoolExecutor(len(works)) as pool:
        running = [pool.submit(work) for work in works]
    return [each.result() for each in running]


def of_one_model(delivery: Delivery) -> str | None:
    """Why a stock server's update routes do not take it, if so: they load full weights into one model."""
    if delivery.kind != "full":
        return f"it carries full weights, and {delivery.label} is an adapter: merge_lora=True folds it in"
    if len(delivery.walks) > 1:
        return f"the server has one model, and {delivery.label} the tracks {', '.join(delivery.specs)}"
    return None


def check_carried(why: str | None, name: str) -> None:
    """TransportError, for a send past the chain's own question."""
    if why:
        raise TransportError(f"{name}: {why}")


def is_here(url: str) -> bool:
    """Whether the host in `url` is this one: an address that can be bound here is."""
    host = urlsplit(url).hostname or ""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)}
    except OSError:
        return False
    return any(_can_bind(str(address)) for address in found)


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ipaddress.ip_address(address.partition("%")[0]).version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def address_towards(url: str) -> str:
    """This host's address on the way to the engine: where the engine's ranks find the trainer."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as way:
            way.connect(address)  # sends nothing: a datagram socket only picks its route
            return str(way.getsockname()[0])
    except OSError as error:
        raise TransportError(f"no route to {parts.hostname}: {error}") from error


def free_port(address: str) -> int:
    """A port that nobody listens on at this moment."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as taken:
        taken.bind((address, 0))
        return int(taken.getsockname()[1])
