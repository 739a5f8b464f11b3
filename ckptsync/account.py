"""What a publisher says of itself while it works: log lines that name channel, epoch and version, and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from . import logs
from .metrics import Metrics
from .published import Published

log = logs.get(__name__)


class Account:
    """One rank's. Only rank 0's (`first`) is counted: all ranks fail alike."""

    def __init__(self, metrics: Metrics, channel: str, epoch: int, *, first: bool) -> None:
        self._metrics, self._channel, self._epoch, self._first = metrics, channel, epoch, first
        if first:
            metrics.begin(channel)

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Inside, lines say where they belong. A failure counts; it is logged by whoever catches it."""
        with logs.scope(channel=self._channel, epoch=self._epoch), self._counted():
            yield

    @contextmanager
    def behind(self) -> Iterator[None]:
        """The same in a background thread, which has its scope from the one that started it."""
        with self._metrics.pending(self._channel), self._counted():
            yield

    def skipped(self) -> None:
        """A background publish was not begun."""
        self._metrics.skipped(self._channel)

    def published(self, done: Published) -> None:
        """A version is committed."""
        if not self._first:
            return
        self._metrics.published(self._channel, done)
        stored, kind = done.stored_bytes, done.kind
        seconds = {f"{phase}_seconds": spent for phase, spent in done.seconds.items()}
        more = logs.about(done.version, event="published", kind=kind, bytes=stored, **seconds)
        log.info("%s is published: %s, %d bytes", done.version, kind, stored, extra=more)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self._first:
                self._metrics.failed(self._channel, error)
            raise
