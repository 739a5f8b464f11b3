"""Which versions were tried and did not work, and whether they may be tried again.

Remembered by manifest digest, so that nothing is retried in a hot loop, and a version published anew is
tried at once. What the failure was decides:

- bytes absent or wrong on the store: again when the version's files there have changed (a copy from another
  site was still under way), looked at with back-off;
- storage or engine not available: again with back-off;
- the engine refused or failed: not again, until the engine was restarted;
- the engine died while loading it, twice: never again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ckptsync.channel import Channel
from ckptsync.errors import CkptSyncError, Corrupt, EngineError, EngineUnavailable, StoreError
from ckptsync.manifest import Manifest

from .discover import Backoff, Verdict

log = logging.getLogger(__name__)

MAX_DEATHS = 2

Listing = frozenset[tuple[str, int]]


@dataclass(slots=True, kw_only=True)
class _Refusal:
    error: CkptSyncError
    first: float
    again: float = 0.0
    backoff: Backoff = field(default_factory=Backoff)
    listing: Listing | None = None
    deaths: int = 0
    given_up: bool = False


class Refusals:
    """One watcher's memory. `patience`: seconds for which bytes that are absent may still be on their way."""

    def __init__(self, *, patience: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.patience, self._clock = patience, clock
        self._by_digest: dict[str, _Refusal] = {}

    def add(self, channel: Channel, manifest: Manifest, error: CkptSyncError, *, died: bool = False) -> None:
        """This version did not work. `died`: the engine was lost from the load on."""
        now = self._clock()
        refusal = self._by_digest.setdefault(manifest.manifest_digest, _Refusal(error=error, first=now))
        refusal.error = error
        refusal.deaths += died
        refusal.again = now + refusal.backoff.failed() if _is_transient(error) or died else float("inf")
        if refusal.deaths >= MAX_DEATHS:
            log.error("%s is given up: the engine died %d times while loading it", manifest.id, refusal.deaths)
            refusal.given_up = True
        if isinstance(error, Corrupt):
            refusal.listing = _listing(channel, manifest)

    def verdict(self, channel: Channel, manifest: Manifest) -> Verdict:
        """May this version be tried now? Lists its files if that is due; raises StoreError if that fails."""
        refusal = self._by_digest.get(manifest.manifest_digest)
        if refusal is None:
            return "try"
        if refusal.given_up:
            return "never"
        if isinstance(refusal.error, Corrupt):
            return self._look_again(channel, manifest, refusal)
        if self._clock() >= refusal.again:
            return "try"
        return "never" if refusal.again == float("inf") else "wait"

    def worked(self, manifest: Manifest) -> None:
        self._by_digest.pop(manifest.manifest_digest, None)

    def engine_restarted(self) -> None:
        """It may have been started on another model, or with more memory: only what the store did wrong is
        kept."""
        for digest, refusal in list(self._by_digest.items()):
            if isinstance(refusal.error, EngineError):
                if refusal.deaths == 0:
                    del self._by_digest[digest]
                else:
                    refusal.again = 0.0

    def why(self, manifest: Manifest) -> CkptSyncError | None:
        refusal = self._by_digest.get(manifest.manifest_digest)
        return refusal.error if refusal else None

    def _look_again(self, channel: Channel, manifest: Manifest, refusal: _Refusal) -> Verdict:
        if self._clock() >= refusal.again:
            refusal.again = self._clock() + refusal.backoff.failed()
            now = _listing(channel, manifest)
            if refusal.listing is None or (now is not None and now != refusal.listing):
                return "try"
        return "wait" if self._clock() - refusal.first < self.patience else "never"


def _is_transient(error: CkptSyncError) -> bool:
    return isinstance(error, StoreError | EngineUnavailable | Corrupt)


def _listing(channel: Channel, manifest: Manifest) -> Listing | None:
    try:
        return frozenset((entry.path, entry.size) for entry in channel.store.list(manifest.folder))
    except StoreError:
        return None
