"""Waiting for a condition, in place of a sleep that is long enough on most days."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from watchers.fleet import Fleet
from watchers.watcher import Watcher


def until(check: Callable[[], object], seconds: float = 60.0, what: str = "the condition") -> None:
    """Wait for it, with a deadline that names it."""
    if not within(seconds, check):
        pytest.fail(f"not within {seconds:.0f} s: {what}")


def within(seconds: float, check: Callable[[], object]) -> bool:
    """Wait for it, for so long; whether it came."""
    deadline = time.monotonic() + seconds
    while not check():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def running(watcher: Watcher | Fleet) -> Iterator[None]:
    """It watches in a thread of its own, and is closed at the end."""
    stop = threading.Event()
    thread = threading.Thread(target=watcher.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
        watcher.close()
    assert not thread.is_alive()
