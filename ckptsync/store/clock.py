"""What time it is for a store, so that no clock of ours has a say in how old a file is."""

from __future__ import annotations

import time
import uuid
from typing import NamedTuple, Self

from .base import Store, put_bytes

MARGIN = 60.0
"""Seconds by which a file may be younger than it looks: servers of one store whose clocks differ."""

UNSURE = 600.0
"""The same where the store tells no times, and a writer's own statement is compared with this machine's clock."""


def store_time(store: Store, folder: str) -> float:
    """What time it is for the store, in seconds: that of a file written now below `folder`. 0 if it tells none."""
    folder = f"{folder}/probe-{uuid.uuid4().hex}"
    put_bytes(store, f"{folder}/now", b"now")
    try:
        return max((entry.modified for entry in store.list(folder)), default=0.0)
    finally:
        store.delete(f"{folder}/now")


class StoreClock(NamedTuple):
    """The store's time at one moment. `age` is a lower bound, for what may go by it; `estimate` is to be shown."""

    now: float

    @classmethod
    def ask(cls, store: Store, folder: str) -> Self:
        """Writes a probe below `folder`, and takes it away. Raises StoreError."""
        return cls(store_time(store, folder))

    @classmethod
    def guess(cls) -> Self:
        """This machine's, where nothing may be written: to show, not to delete by."""
        return cls(time.time())

    def age(self, modified: float, claimed: float = 0.0) -> float:
        """Seconds for which a file has been there at least. `claimed`: when its writer says that it wrote it."""
        if self.now and modified:
            return self.now - modified - MARGIN
        return time.time() - claimed - UNSURE if claimed else 0.0

    def estimate(self, modified: float, claimed: float = 0.0) -> float:
        """The same as far as the clocks agree, which may be more."""
        since = (self.now, modified) if self.now and modified else (time.time(), claimed)
        return max(0.0, since[0] - since[1]) if since[1] else 0.0
