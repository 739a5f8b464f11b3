"""The thread that runs a watcher, as other threads know it: is it alive, and would it do this next?"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from ckptsync.errors import CkptSyncError, EngineUnavailable

T = TypeVar("T")


class _Call(NamedTuple):
    work: Callable[[], Any]
    future: Future[Any]

    def make(self) -> None:
        try:
            self.future.set_result(self.work())
        except BaseException as error:
            self.future.set_exception(error)
            if not isinstance(error, CkptSyncError):
                raise


class Loop:
    """`wake` ends the present wait of the thread that is inside `running`."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._here = threading.RLock()
        """Held by who works without a loop, which does not begin meanwhile."""
        self._thread: int | None = None
        self._calls: deque[_Call] = deque()
        self._expected = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """This thread is the loop. Who still waits for a call at its end gets EngineUnavailable."""
        with self._here, self._lock:
            self._thread = threading.get_ident()
            self.beat()
        try:
            yield
        finally:
            with self._lock:
                self._thread, left = None, list(self._calls)
                self._calls.clear()
            for call in left:
                call.future.set_exception(EngineUnavailable("the watch loop ended first; nothing was touched"))

    def beat(self, rest: float = 0.0) -> None:
        """A sign of life from the loop's thread; the next may take `rest` seconds longer."""
        self._expected = time.monotonic() + rest

    @property
    def silence(self) -> float | None:
        """Seconds since a sign of life was due; None while no thread runs the loop. From any thread."""
        return max(0.0, time.monotonic() - self._expected) if self._thread is not None else None

    def call(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises, from any thread: done by the loop's thread between two steps, or right
        here while there is none."""
        call = _Call(work, Future())
        with self._here:
            with self._lock:
                elsewhere = self._thread not in {None, threading.get_ident()}
                if elsewhere:
                    self._calls.append(call)
            if not elsewhere:
                return work()
        self._wake()
        result: T = call.future.result()
        return result

    def answer(self) -> None:
        """Make the calls that have come; for the loop's thread. A bug in one is raised here too."""
        self.beat()
        while self._calls:
            self._calls.popleft().make()
