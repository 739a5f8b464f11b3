"""A sidecar beside a watcher whose loop runs, as `ckptsync watch --serve` has it; and one beside a stand-in."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from watchers.health import Health, Receipt
from watchers.metrics import Metrics
from watchers.sidecar import Sidecar
from watchers.watcher import Watcher


@dataclass
class StandIn:
    """Says what a test wants it to say."""

    health: Health = field(default_factory=Health)
    silence: float | None = 0.0
    loads: Callable[[str], Receipt] | None = None
    woken: int = 0

    def members(self) -> Mapping[str, Health]:
        return {"http://a:8000": self.health}

    def wake(self) -> None:
        self.woken += 1

    def load_version(self, text: str) -> Receipt:
        assert self.loads is not None
        return self.loads(text)


@contextmanager
def serving(watched: Any, metrics: Metrics | None = None, **options: Any) -> Iterator[httpx.Client]:
    """A client of a sidecar on a free port."""
    with Sidecar(watched, metrics or Metrics(), ":0", **options) as sidecar:
        limits = httpx.Limits(max_connections=None)
        with httpx.Client(base_url=sidecar.url, trust_env=False, timeout=30, limits=limits) as client:
            yield client


@contextmanager
def running(watcher: Watcher) -> Iterator[None]:
    """Its loop goes on in a thread inside `with`."""
    stop = threading.Event()
    thread = threading.Thread(target=watcher.run, args=(stop,))
    thread.start()
    try:
        until(lambda: watcher.silence is not None)
        yield
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()


def until(done: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.005)
