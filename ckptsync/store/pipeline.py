"""A stream cut into parts of one size, written by worker threads while the next part is being filled.

The storage is never idle while the producer digests or converts, and memory is bounded: one part more than
there are workers.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait

from ..digest import Bytes
from ..logs import Pool
from .views import flat

_SMALL = 64 << 10
"""Bytes of the first buffer, since most files are small and a part's memory may come in huge pages."""


class Pipeline:
    """Calls `sink(index, part)` once for each full part, on `workers` threads, in no order.

    The last part, full or not, is left to the caller of `finish`. A sink's error comes out of a later `write`
    or of `finish`; after it only `cancel` makes sense.
    """

    def __init__(
        self,
        sink: Callable[[int, memoryview], None],
        *,
        part_size: int,
        workers: int,
        allocate: Callable[[int], memoryview],
    ) -> None:
        self._sink = sink
        self._part_size = part_size
        self._workers = workers
        self._allocate = allocate
        self._threads: Pool | None = None
        self._running: dict[Future[None], memoryview] = {}
        self._buffer = memoryview(b"")
        self._filled = 0
        self._index = 0

    def write(self, data: Bytes) -> None:
        """Take all of `data`. Blocks while every worker is busy and the next part is full."""
        view = flat(data)
        while view:
            if self._filled == len(self._buffer):
                self._next_part()
            count = min(len(view), len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + count] = view[:count]
            self._filled += count
            view = view[count:]

    def finish(self) -> tuple[int, memoryview]:
        """Wait for all parts; the index and bytes of the last one, which the sink has not seen."""
        while self._running:
            self._collect()
        tail = self._buffer[: self._filled]
        self._shutdown()
        return self._index, tail

    def cancel(self) -> None:
        """Drop what waits, wait for what runs, and forget its errors."""
        for future in self._running:
            future.cancel()
        wait(self._running)
        self._running.clear()
        self._shutdown()

    def _next_part(self) -> None:
        if 0 < self._filled < self._part_size:
            small, self._buffer = self._buffer, self._allocate(self._part_size)
            self._buffer[: self._filled] = small
            return
        free: memoryview | None = None
        if self._filled:
            while len(self._running) >= self._workers:
                free = self._collect()
            self._submit()
        size = self._part_size if self._index else min(_SMALL, self._part_size)
        self._buffer = free if free is not None else self._allocate(size)
        self._filled = 0

    def _submit(self) -> None:
        if self._threads is None:
            self._threads = Pool(self._workers, thread_name_prefix="ckptsync-write")
        self._running[self._threads.submit(self._sink, self._index, self._buffer)] = self._buffer
        self._index += 1

    def _collect(self) -> memoryview:
        """Wait for some part; its buffer may be filled again."""
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        future = done.pop()
        buffer = self._running.pop(future)
        future.result()
        return buffer

    def _shutdown(self) -> None:
        # A writer and its pipeline hold each other: only the cyclic collection frees them, and a part is 16 MiB.
        self._buffer = memoryview(b"")
        self._filled = 0
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
