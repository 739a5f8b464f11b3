"""A reader as its channel knows it: what it serves, and that it is alive."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from ckptsync import logs
from ckptsync.channel import Channel
from ckptsync.errors import CkptSyncError, StoreError
from ckptsync.holds import Reader

from .health import Health, Receipt

log = logs.get(__name__)

HEARTBEAT = 300.0
"""Seconds after which the receipt is written again although nothing changed: retention and back-pressure take a reader
that is silent for an hour for dead."""


HISTORY = 32
"""So many attempts are in a receipt: what `ckptsync dashboard` draws. Some 5 KB."""

_KEPT = ("version", "state", "created", "stage_seconds", "pause_seconds", "load_seconds")


class Presence:
    """Writes one reader's receipt, from its first attempt on, or from the start if one of its name is there: its
    watcher was killed, and what it says is not true any more. Never in the way of a load: a channel that may only be
    read has no receipts. `follow`: what the reader follows now."""

    def __init__(self, channel: Channel, reader: str, follow: Callable[[], str]) -> None:
        self._channel, self._reader, self._follow = channel, reader, follow
        self._record: dict[str, Any] = {}
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._followed = ""
        self._written = float("-inf")
        self._failed = self._begun = False

    def report(self, receipt: Receipt) -> None:
        """After an attempt."""
        self._go_on()
        confirmed, record = receipt.label or self._record.get("confirmed", ""), receipt.as_dict()
        self._history.append({"at": time.time(), **{name: record[name] for name in _KEPT}})
        self._write({**record, "confirmed": confirmed, "history": list(self._history)})

    def beat(self, health: Health) -> None:
        """Between attempts. Writes at once if the engine does not serve any more what was said last, or if the reader
        follows something else: somebody may have loaded a version by hand."""
        self._go_on()
        if not self._record:
            return
        said = (self._record["label"], self._followed)
        if said != (health.version, self._follow()) or time.monotonic() - self._written > HEARTBEAT:
            self._write({**self._record, "label": health.version})

    def leave(self) -> None:
        """The reader ends: nobody speaks for the engine any more, and an hour of waiting finds out nothing else."""
        if not self._record or self._failed:
            return
        self._record = {}
        try:
            self._channel.withdraw_receipt(self._reader)
        except CkptSyncError as error:
            more = {"event": "receipt-stays"}
            log.warning("%s: its receipt stays until it is an hour old: %s", self._reader, error, extra=more)

    def _go_on(self) -> None:
        """From what a watcher that was killed said under this name."""
        if self._begun:
            return
        try:
            left = self._channel.receipt(self._reader)
            history = msgspec.convert(left, Reader).history if left else ()
        except StoreError:
            return  # away: the next look
        except msgspec.ValidationError:
            left, history = {}, ()
        self._begun, self._record = True, {"label": "", **left} if left else {}
        self._history.extend(msgspec.to_builtins(attempt) for attempt in history)

    def _write(self, record: dict[str, Any]) -> None:
        self._record, self._written, self._followed = record, time.monotonic(), self._follow()
        try:
            self._channel.write_receipt(self._reader, {**record, "follow": self._followed, "seen": time.time()})
            self._failed = False
        except CkptSyncError as error:  # also a bucket that is gone, or a name that is contended
            if not self._failed:
                log.warning("%s: no receipt can be written: %s", self._reader, error, extra={"event": "no-receipt"})
            self._failed = True
