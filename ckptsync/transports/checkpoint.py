"""The way that always works: publish to the channel, and let watchers load.

It touches no engine itself. Engines that a fast path left dirty are handed over: the version says so to their watchers
(`handover`), which load it completely, prove it and resume them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial

from .. import logs
from ..engine import EngineStatus
from ..errors import CkptSyncError, InvalidInput
from ..lane import once
from .base import Delivery, Sending, SyncEngine
from .handover import FILES

log = logs.get(__name__)

LOOK_EVERY = 0.2
"""Seconds between two looks at engines and receipts."""


class Checkpoint:
    """`wait`: seconds that the sync gives engines and readers to confirm the version; 0 does not wait. Who has not
    confirmed by then is behind, not an error: a trainer never depends on a reader. An engine that does not answer costs
    no more.

    `readers`: names of watchers, for engines that this trainer cannot reach: their receipts in the channel count.
    """

    name = FILES
    pauses = False

    def __init__(self, *, wait: float = 0.0, readers: Sequence[str] = ()) -> None:
        if isinstance(readers, str):
            raise InvalidInput(f"readers={readers!r}: must be a list of names")
        if wait < 0:
            raise InvalidInput(f"wait={wait!r}: must be 0 or more seconds")
        self._wait, self._readers = wait, tuple(readers)

    def probe(self, engines: Sequence[SyncEngine]) -> str | None:  # noqa: ARG002
        """Always: whether the store can be written is found out by writing."""
        return None

    def send(self, sending: Sending) -> None:
        """Publish, and wait for confirmations on rank 0."""
        sending.delivery.to_files(self.name)
        if self._wait and sending.is_sender:
            behind = self._behind_at_deadline(sending)
            if behind:
                more = logs.about(sending.delivery.version, event="not-confirmed")
                text = "%s: not confirmed after %g s by %s"
                log.warning(text, sending.delivery.label, self._wait, ", ".join(behind), extra=more)

    def close(self) -> None:
        """Nothing is held."""

    def _behind_at_deadline(self, sending: Sending) -> list[str]:
        deadline, looks = time.monotonic() + self._wait, Looks(sending.engines)
        while True:
            found = looks.take()
            sending.heard.update(found)
            behind = [each.name for each in sending.engines if not _serves(found.get(each.name), sending)]
            behind += [reader for reader in self._readers if not _says(reader, sending.delivery)]
            if not behind or time.monotonic() > deadline:
                return behind
            time.sleep(LOOK_EVERY)


class Looks:
    """What engines say of themselves, again and again. One that has not answered yet is not asked a second time, and
    keeps no look waiting."""

    def __init__(self, engines: Sequence[SyncEngine]) -> None:
        self._engines = engines
        self._asked: dict[str, Future[EngineStatus | None]] = {}
        self._said: dict[str, EngineStatus | None] = {}

    def take(self) -> dict[str, EngineStatus]:
        """The last answer of each that has given one."""
        for engine in self._engines:
            if engine.name not in self._asked:
                self._asked[engine.name] = once("ckptsync-look", partial(_status, engine))
        wait(self._asked.values(), LOOK_EVERY)
        for name in [name for name, answer in self._asked.items() if answer.done()]:
            self._said[name] = self._asked.pop(name).result()
        return {name: said for name, said in self._said.items() if said is not None}


def _status(engine: SyncEngine) -> EngineStatus | None:
    try:
        return engine.status()
    except CkptSyncError:
        return None


def _serves(status: EngineStatus | None, sending: Sending) -> bool:
    return status is not None and status.label == sending.delivery.label and not status.paused


def _says(reader: str, delivery: Delivery) -> bool:
    try:
        receipt = delivery.channel.receipt(reader) if delivery.channel else {}
    except CkptSyncError:
        return False
    return receipt.get("state") == "serving" and receipt.get("label") == delivery.label
