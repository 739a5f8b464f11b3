"""What a publisher has done, for Prometheus. One label throughout: the channel, by its URL.

    publisher = ckptsync.Publisher("s3://bucket/run1")
    with ckptsync.metrics.serve(publisher.metrics, ":9100"):      # on rank 0
        ...

Durations are those that `Published.seconds` reports, taken where a phase begins and ends; nothing is timed for this.
Nothing goes into prometheus_client's global registry, unless it is the one given: a trainer has that for itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, get_args

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .http_server import Answer, Request, Server, bind, checked_token, error_answer, has_token
from .manifest import Kind
from .version import VersionId

if TYPE_CHECKING:
    from .published import Published

__all__ = ["CONTENT_TYPE", "Metrics", "serve"]

_PHASE = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """One process's publishers, from any thread. Only rank 0's counts: it commits, and times what it waits for."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self._registry = registry or CollectorRegistry()
        self._last: dict[str, VersionId] = {}
        text = "Rank 0's time for a version: snapshot (training waits), gather, encode (what changed), write, commit"
        self._phases = Histogram(
            "ckptsync_publish_phase_seconds", text, ["channel", "phase"], buckets=_PHASE, registry=self._registry
        )
        self._versions = self._counter("ckptsync_publish_versions", "Versions committed", "kind")
        self._failures = self._counter("ckptsync_publish_failures", "Publishes that failed, by the error", "kind")
        self._skipped = self._counter("ckptsync_publish_skipped", "Background publishes that were not begun")
        self._bytes = self._counter("ckptsync_publish_written_bytes", "Bytes of weights on storage, deltas as such")
        self._size = self._gauge("ckptsync_publish_version_bytes", "The newest version, as an engine loads it")
        self._pending = self._gauge("ckptsync_publish_pending", "1 while a background publish is under way")
        self._epoch = self._gauge("ckptsync_publish_version_epoch", "Trainer attempt of the newest version")
        self._number = self._gauge("ckptsync_publish_version_number", "Number of the newest version")
        self._at = self._gauge("ckptsync_publish_last_seconds", "When the newest version was published, since 1970")

    def begin(self, channel: str) -> None:
        """A publisher is there: what it counts is 0 from now on, and not absent, so that a first failure is a rise."""
        for kind in get_args(Kind):
            self._versions.labels(channel, kind)
        for metric in (self._skipped, self._bytes, self._pending):
            metric.labels(channel)

    def published(self, channel: str, done: Published) -> None:
        """A version was committed. One that was there already, on a retry, counts no second time."""
        if done.version <= self._last.get(channel, VersionId(0, -1)):
            return
        self._last[channel] = done.version
        for phase, seconds in done.seconds.items():
            self._phases.labels(channel, phase).observe(seconds)
        self._versions.labels(channel, done.kind).inc()
        self._bytes.labels(channel).inc(done.stored_bytes)
        self._size.labels(channel).set(done.nbytes)
        self._epoch.labels(channel).set(done.version.epoch)
        self._number.labels(channel).set(done.version.number)
        self._at.labels(channel).set(done.manifest.created)

    def skipped(self, channel: str) -> None:
        """A background publish was not begun, since the one before was pending."""
        self._skipped.labels(channel).inc()

    def failed(self, channel: str, error: BaseException) -> None:
        """A publish raised."""
        self._failures.labels(channel, getattr(error, "kind", type(error).__name__)).inc()

    @contextmanager
    def pending(self, channel: str) -> Iterator[None]:
        """A background publish is under way inside."""
        self._pending.labels(channel).set(1)
        try:
            yield
        finally:
            self._pending.labels(channel).set(0)

    def render(self) -> bytes:
        """The text format, for CONTENT_TYPE."""
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, ["channel", *labels], registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, ["channel"], registry=self._registry)


@contextmanager
def serve(metrics: Metrics, address: str, *, token: str = "") -> Iterator[Server]:
    """`GET /metrics` on `[HOST]:PORT`, from threads of its own, inside `with`; `server.url` says where.

    Without a host on loopback. InvalidInput for an address that cannot be had, and for one that others can reach
    without a `token`, which requests then carry as a Bearer.
    """
    checked_token(token)

    def answer(request: Request) -> Answer:
        if token and not has_token(request, token):
            message = "send the token: Authorization: Bearer …"
            return error_answer(401, "unauthorized", message, headers={"WWW-Authenticate": "Bearer"})
        if request.target.partition("?")[0] != "/metrics" or request.method not in {"GET", "HEAD"}:
            return error_answer(404, "no-such-endpoint", "only GET /metrics is here")
        return Answer(status=200, body=metrics.render(), content_type=CONTENT_TYPE)

    server = bind(address, answer, open_to_all=not token, variable="serve's token=")
    server.start()
    try:
        yield server
    finally:
        server.close()
