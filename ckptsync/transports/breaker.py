"""Which transports are worth a try now: a circuit breaker for each.

A transport is probed before its first use and after each failure. One that fails `after` times in a row is benched:
the others go first, and it is probed again when `seconds` have passed, or when nothing else is left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from .base import Transport


@dataclass(slots=True)
class Lane:
    """One transport and how it has done."""

    transport: Transport
    probed: bool = False
    """Its last probe said yes, and it has not failed since."""

    failures: int = 0
    benched_until: float = 0.0

    @property
    def name(self) -> str:
        return self.transport.name


class Breaker:
    """The order of the lanes. Its clock is rank 0's: the caller tells the others."""

    def __init__(self, transports: Sequence[Transport], *, after: int, seconds: float) -> None:
        self.lanes = [Lane(transport) for transport in transports]
        self._after, self._seconds = after, seconds

    def order(self) -> list[int]:
        """Indices of all lanes, those on the bench last."""
        now = time.monotonic()
        return sorted(range(len(self.lanes)), key=lambda at: self.lanes[at].benched_until > now)

    def worked(self, lane: Lane) -> None:
        lane.failures, lane.benched_until = 0, 0.0

    def failed(self, lane: Lane) -> None:
        lane.probed, lane.failures = False, lane.failures + 1
        if lane.failures >= self._after:
            lane.benched_until = time.monotonic() + self._seconds
