"""What a mirror holds while it copies, so that neither side's collector ends a version in between."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from .. import logs
from ..channel import Channel
from ..collector_claim import claimed
from ..errors import StoreDenied, StoreError
from ..holds import check_not_collected
from ..layout import COLLECTOR, collected_path
from ..store.clock import StoreClock
from ..version import VersionId

log = logs.get(__name__)

LEASE_SECONDS = 600.0


class Holds:
    """The leases of one mirror."""

    def __init__(self, source: Channel, target: Channel) -> None:
        self.source, self.target = source, target
        # One name for one destination: a mirror that was killed takes its own lease over.
        self._reader = f"mirror-{hashlib.sha256(target.store.url.encode()).hexdigest()[:12]}"
        self._unleased = False

    @contextmanager
    def leased_at_source(self, version: VersionId) -> Iterator[Callable[[], None]]:
        """VersionGone if it is being collected. A source that may only be read takes no lease."""
        renewed = float("-inf")

        def renew() -> None:
            nonlocal renewed
            if time.monotonic() - renewed > LEASE_SECONDS / 3:
                renewed = time.monotonic()
                self._lease(lambda: self.source.lease(self._reader, version, LEASE_SECONDS))

        renew()
        check_not_collected(self.source, version)
        try:
            yield renew
        finally:
            with suppress(StoreError):  # it expires
                self._lease(lambda: self.source.release(self._reader))

    def _lease(self, write: Callable[[], None]) -> None:
        if self._unleased:
            return
        try:
            write()
        except StoreDenied as error:
            self._unleased = True
            log.warning(
                "no lease can be written (%s): the source's retention does not know of this mirror", error,
                extra={"event": "no-lease"},
            )  # fmt: skip

    @contextmanager
    def held_at_target(self, version: VersionId) -> Iterator[None]:
        """Nothing newer is there yet that needs the version: without a lease a collector might end it in between."""
        reader = f"{self._reader}-{version.stem}"
        self.target.lease(reader, version, LEASE_SECONDS)
        try:
            self._withdraw_note(version)
            yield
        finally:
            with suppress(StoreError):  # it expires
                self.target.release(reader)

    def _withdraw_note(self, version: VersionId) -> None:
        """Of one that was just collected at the target. As its collector, since another might be deleting its data."""
        store = self.target.store
        if all(entry.path != collected_path(version) for entry in store.list("collected")):
            return
        with claimed(store, StoreClock.ask(store, COLLECTOR)):
            store.delete(collected_path(version))
