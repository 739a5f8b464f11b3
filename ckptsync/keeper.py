"""Retention beside a publisher: a thread on rank 0 that collects after commits, and never holds one up."""

from __future__ import annotations

import threading
import time

from . import host, logs
from .channel import Channel
from .collect import Collector
from .epochs import Epoch, check_fence
from .errors import CkptSyncError, Fenced, StoreUnavailable
from .retention import Retention
from .signing import Trust
from .store.base import Store
from .store.clock import MARGIN

log = logs.get(__name__)

PAUSE = 5.0
"""Seconds between two runs at least: a trainer that publishes every second need not list as often."""


class Keeper:
    """Starts with the first `wake`, so that nothing is deleted before this publisher has a version of its own, and ends
    when a newer epoch is claimed: from then on the policy is another's."""

    def __init__(self, store: Store, policy: Retention, epoch: Epoch, trust: Trust | None = None) -> None:
        # A channel of its own: the publisher's is another thread's. With its trust: a forged version must not count as
        # the newest, in place of a true one.
        self._collector = Collector(Channel.open(store, require_signature=trust), policy)
        self._store, self._grace, self._epoch = store, policy.grace, epoch
        self._due, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._failed = ""

    def wake(self) -> None:
        """There is a new version."""
        self._due.set()
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="ckptsync-retention", daemon=True)
            try:
                with host.threads():
                    thread.start()
            except StoreUnavailable as error:  # the version is committed: the next one is another chance
                log.warning("retention: nothing was collected: %s", error, extra={"event": "not-collected"})
            else:
                self._thread = thread

    def close(self, seconds: float = 30.0) -> None:
        """One last run, for so many seconds at most. What waits for its grace time is left for the next collector."""
        self._stop.set()
        self._due.set()
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        waiting = last = False
        with logs.scope(channel=self._store.url, epoch=self._epoch.number):
            while not last:
                self._due.wait(self._grace + MARGIN if waiting else None)
                last = self._stop.is_set()
                self._due.clear()
                waiting = self._collect()
                self._stop.wait(PAUSE)

    def _collect(self) -> bool:
        """Whether something waits for its grace time. A failure is said once; the next version is another chance."""
        started = time.monotonic()
        try:
            with host.refusals("this host said no"):
                check_fence(self._store, self._epoch)
                done = self._collector.collect()
        except Fenced:
            self._stop.set()
            return False
        except CkptSyncError as error:
            if str(error) != self._failed:
                log.warning("retention: nothing was collected: %s", error, extra={"event": "not-collected"})
            self._failed = str(error)
            return True
        self._failed = ""
        if done.versions or done.files:
            log.info(
                "retention: %d versions ended, %d files of %d bytes deleted, %d versions wait, %.1f s",
                len(done.versions), done.files, done.nbytes, done.waiting, time.monotonic() - started,
                extra={"event": "collected"},
            )  # fmt: skip
        return done.waiting > 0
