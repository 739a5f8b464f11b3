"""The first failure of a job, in the job's key-value store, where a rank stuck in a collective sees it."""

from __future__ import annotations

import json
import time
from typing import Literal

SIGN_OF_LIFE = 2.0
"""How long the ranks that are left have to say so, when one was lost: a few looks at the alarm."""

Kind = Literal["failed", "lost"]
"""`failed`: a rank has an error, and waits for the others to come and hear it. `lost`: a rank is dead or away
for good, and everybody is to leave."""


class Alarm:
    """Every method raises RuntimeError if the store is gone with its host."""

    def __init__(self, prefix: str, rank: int, world_size: int) -> None:
        from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

        # torch has no public way to the store it made itself; torch's own checkpoint code uses this one.
        self._store = PrefixStore(prefix, _get_default_store())
        self._rank, self._world_size, self._round = rank, world_size, 0

    def ring(self, kind: Kind, message: str) -> None:
        """Unless it was rung already: the first message stays."""
        self._store.compare_set(self._key(kind), "", json.dumps(message))

    def look(self, kind: Kind) -> str:
        """The message, or the empty string."""
        key = self._key(kind)
        return str(json.loads(self._store.get(key))) if self._store.check([key]) else ""

    def absent_ranks(self) -> list[int]:
        """Ranks that do not say within a moment that they are still here."""
        self._store.set(f"alive/{self._rank}", "1")
        deadline = time.monotonic() + SIGN_OF_LIFE
        while time.monotonic() < deadline:
            time.sleep(0.1)
            absent = [r for r in range(self._world_size) if not self._store.check([f"alive/{r}"])]
            if not absent:
                break
        return absent

    def next_round(self) -> None:
        """All ranks know of this failure: the next one has its own key."""
        self._round += 1

    def _key(self, kind: Kind) -> str:
        return f"{kind}/{self._round if kind == 'failed' else 0}"
