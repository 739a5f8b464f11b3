"""One collector at a time on a channel: `collector/claim.json`, taken over when its holder has died.

That nothing is deleted wrongly does not hang on it: two collectors at once would do the same work twice.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from .errors import AlreadyExists, Conflict, NotFound, StoreError
from .layout import COLLECTOR
from .store.base import Store, put_bytes, read_bytes
from .store.clock import StoreClock
from .store.paths import process_runs

PATH = f"{COLLECTOR}/claim.json"
SECONDS = 120.0
"""A collector that has not renewed its claim for so long has died, as far as the next one is concerned. Until then
nothing is collected: a trainer that publishes each second and was killed at it leaves as many versions more."""


class _Claim(msgspec.Struct, frozen=True, kw_only=True):
    nonce: str
    host: str
    written: float


@contextmanager
def claimed(store: Store, clock: StoreClock) -> Iterator[Callable[[], None]]:
    """Be the only collector; the callable, called now and then, renews the claim. Conflict if another one is."""
    nonce, renewed = uuid.uuid4().hex, time.monotonic()
    _take(store, clock, nonce)

    def renew() -> None:
        nonlocal renewed
        if time.monotonic() - renewed > SECONDS / 3:
            renewed = time.monotonic()
            put_bytes(store, PATH, _claim(nonce))

    try:
        yield renew
    finally:
        with suppress(StoreError):  # the body's error is the one to see, and a claim that stays is taken over
            _let_go(store, nonce)


def _let_go(store: Store, nonce: str) -> None:
    holder = _holder(store)
    if holder is not None and holder.nonce == nonce:
        store.delete(PATH)


def _take(store: Store, clock: StoreClock, nonce: str) -> None:
    for _ in range(2):
        with suppress(AlreadyExists):  # perhaps our own, whose answer was lost
            store.create(PATH, _claim(nonce))
        holder = _holder(store)
        if holder is not None and holder.nonce == nonce:
            return
        if holder is not None and not _is_dead(store, clock, holder):
            raise Conflict(f"{holder.host} is collecting versions from {store.url} at this moment")
        store.delete(PATH)
    raise Conflict(f"somebody else began to collect versions from {store.url} at this moment")


def _is_dead(store: Store, clock: StoreClock, holder: _Claim) -> bool:
    host, _, pid = holder.host.rpartition(":")
    # A name of a host that is another's as well costs no more than two collectors at once do.
    if host == socket.gethostname() and pid.isdigit() and not process_runs(int(pid)):
        return True
    ages = [clock.age(entry.modified, holder.written) for entry in store.list(COLLECTOR) if entry.path == PATH]
    return all(age > SECONDS for age in ages)


def _claim(nonce: str) -> bytes:
    host = f"{socket.gethostname()}:{os.getpid()}"
    return msgspec.json.encode(_Claim(nonce=nonce, host=host, written=time.time()))


def _holder(store: Store) -> _Claim | None:
    try:
        return msgspec.json.decode(read_bytes(store, PATH, 1 << 16), type=_Claim)
    except (NotFound, msgspec.DecodeError):
        return None
