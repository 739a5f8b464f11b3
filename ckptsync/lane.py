"""A side thread for calls that block in C++, so that the main thread can wait in Python and give up."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from . import host

T = TypeVar("T")


class Lane:
    """Runs jobs in order. Unlike a pool's, its thread does not keep Python alive when a job hangs."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._jobs = queue.SimpleQueue()
        self._last: Future[Any] | None = None
        self.closed = False
        with host.threads():
            threading.Thread(target=self._loop, name=name, daemon=True).start()

    @property
    def busy(self) -> bool:
        return self._last is not None and not self._last.done()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._last = future
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        self.closed = True
        self._jobs.put(None)

    def _loop(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                future.set_result(job())
            except BaseException as error:  # noqa: BLE001 - belongs to whoever waits for the future
                future.set_exception(error)
            del item, job, future


def once(name: str, job: Callable[[], T]) -> Future[T]:
    """One job in a side thread of its own, which does not keep Python alive either."""
    lane = Lane(name)
    future = lane.submit(job)
    lane.close()
    return future
