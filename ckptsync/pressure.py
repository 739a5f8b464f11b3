"""Back-pressure, where it was asked for: a publish that waits until readers are not too far behind.

Only readers count that are alive, serve something and are bound for every version or for the newest: one that stays on
version 42, or that has yet to load its first, never holds a trainer. And none does for ever.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable

from . import logs
from .channel import Channel
from .errors import CkptSyncError
from .holds import readers
from .store.base import Store
from .store.clock import StoreClock
from .wording import counted

log = logs.get(__name__)

POLL = 0.5

_BOUND_FOR_THE_NEWEST = {"latest", "every", "its fleet"}
"""What such a reader says that it follows; the last is a fleet's member."""


class BackPressure:
    """`max_lag`: so many versions may a reader lack. `seconds`: how long a slow one is waited for; 0 to only say so."""

    def __init__(self, store: Store, max_lag: int, seconds: float) -> None:
        # A channel of its own: it asks from whichever thread publishes.
        self._channel, self._max_lag, self._seconds = Channel.open(store), max_lag, seconds
        self._given_up: dict[str, str] = {}

    def wait(self, check: Callable[[], None]) -> None:
        """Return when no reader is too far behind, or after `seconds`, with one warning that names those who are.

        One that was waited for in vain is not waited for again until it has moved. `check` is called now and then,
        and may raise. A channel whose receipts cannot be read holds nobody up.
        """
        until = time.monotonic() + self._seconds
        while slow := self._slow():
            if time.monotonic() >= until:
                self._give_up(slow)
                return
            check()
            time.sleep(min(POLL, max(0.0, until - time.monotonic())))

    def _slow(self) -> dict[str, tuple[str, int]]:
        """Reader -> what it serves and how many versions it lacks, of those that are waited for."""
        try:
            live = self._channel.versions()
            found = [reader for reader in readers(self._channel.store, StoreClock.guess()) if reader.alive]
        except CkptSyncError as error:
            log.warning("nobody is waited for: %s", error, extra={"event": "no-back-pressure"})
            return {}
        slow = {}
        for reader in found:
            serves = reader.serves
            if serves is None or reader.follow not in _BOUND_FOR_THE_NEWEST:
                continue
            lag = len(live) - bisect_right(live, serves)
            if lag > self._max_lag and self._given_up.get(reader.reader) != reader.label:
                slow[reader.reader] = reader.label, lag
        return slow

    def _give_up(self, slow: dict[str, tuple[str, int]]) -> None:
        behind = ((reader, label, counted(lag, "version")) for reader, (label, lag) in slow.items())
        named = ", ".join(f"{reader} serves {label}, {lag} behind" for reader, label, lag in behind)
        log.warning("more than max_lag=%d: %s", self._max_lag, named, extra={"event": "readers-behind"})
        self._given_up |= {reader: label for reader, (label, _) in slow.items()}
