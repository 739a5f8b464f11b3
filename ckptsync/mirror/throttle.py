"""Not more than so many bytes a second, on average, whoever takes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

STEP = 0.5
"""Seconds that one piece takes at most: progress is told, and whoever ends the mirror is heard, as often."""

NAP = 0.2
"""Seconds of sleep at once."""

PAGE = 4096
"""Pieces are multiples of it, so that a local store can read past the page cache; a rate below it a step is as slow."""


class Throttle:
    """`take` sleeps until the bytes are due; with no rate it never does. What was not used while idle is not made up
    for. For any number of threads: they wait for each other's bytes too."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._due = 0.0
        self._one = threading.Lock()

    def piece(self, most: int) -> int:
        """How many bytes to take at once, `most` at most."""
        if self._rate is None:
            return most
        return min(most, max(PAGE, int(self._rate * STEP) // PAGE * PAGE))

    def take(self, count: int, awake: Callable[[], None] = lambda: None) -> None:
        """`awake` is called between naps; what it raises ends the sleep."""
        if self._rate is None:
            return
        with self._one:
            now = time.monotonic()
            self._due = due = max(self._due, now) + count / self._rate
        # Slept before the next read, so a pause is never in the middle of one, which a server might cut.
        left = due - now
        while left > 0:
            nap = min(left, NAP)
            time.sleep(nap)
            left = min(left - nap, due - time.monotonic())  # a sleep may take longer than it was asked to
            awake()
