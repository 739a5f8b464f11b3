"""Which versions were tried and did not work, and whether they may be tried again.

Remembered by manifest digest, so that nothing is retried in a hot loop, and a version published anew is
tried at once. What the failure was decides:

- bytes absent or wrong on the store, or a symbolic link in their place: again when the version's files there
  have changed (a copy from another site was still under way), looked at with back-off;
- one file denied while the rest of the store is not: again with back-off, whatever the listing says, since it
  does not show permissions;
- storage or engine not available, or a version gone that is listed again: again with back-off;
- the engine refused or failed: not again, until the engine was restarted;
- the engine died while loading it, twice: never again.

What the store did to this version alone is waited for as long as `patience`; after that, one warning, and it no
longer holds up the versions after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ckptsync import logs
from ckptsync.channel import Channel
from ckptsync.errors import CkptSyncError, Corrupt, EngineError, EngineUnavailable, NotFound, StoreError
from ckptsync.manifest import Manifest
from ckptsync.version import VersionId

from .discover import Backoff, Verdict
from .fetch import DeniedFile

log = logs.get(__name__)

MAX_DEATHS = 2

Listing = frozenset[tuple[str, int]]


@dataclass(slots=True, kw_only=True)
class _Refusal:
    version: VersionId
    error: CkptSyncError
    first: float
    again: float = 0.0
    backoff: Backoff = field(default_factory=Backoff)
    listing: Listing | None = None
    deaths: int = 0
    given_up: bool = False
    passed_over: bool = False


class Refusals:
    """One watcher's memory. `patience`: seconds for which bytes that are absent may still be on their way."""

    def __init__(self, *, patience: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.patience, self._clock = patience, clock
        self._by_digest: dict[str, _Refusal] = {}

    def add(self, channel: Channel, manifest: Manifest, error: CkptSyncError, *, died: bool = False) -> bool:
        """This version did not work. `died`: the engine was lost from the load on. False if that is no news."""
        now, before = self._clock(), self._by_digest.get(manifest.manifest_digest)
        news = before is None or str(before.error) != str(error)
        refusal = before or _Refusal(version=manifest.id, error=error, first=now)
        self._by_digest[manifest.manifest_digest] = refusal
        refusal.error = error
        refusal.deaths += died
        refusal.again = now + refusal.backoff.failed() if _is_transient(error) or died else float("inf")
        if refusal.deaths >= MAX_DEATHS:
            log.error(
                "%s is given up: the engine died %d times while loading it",
                manifest.id,
                refusal.deaths,
                extra=logs.about(manifest.id, event="given-up"),
            )
            refusal.given_up = True
        if isinstance(error, Corrupt):
            refusal.listing = _listing(channel, manifest)
        return news

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
        if isinstance(refusal.error, DeniedFile):
            return self._patiently(refusal)
        return "never" if refusal.again == float("inf") else "wait"

    def soonest(self) -> float:
        """Seconds until something is to be tried again; infinity if nothing is."""
        now = self._clock()
        waiting = [refusal.again - now for refusal in self._by_digest.values() if not refusal.given_up]
        return min((seconds for seconds in waiting if seconds > 0), default=float("inf"))

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

    def why_not_newer(self, version: VersionId) -> str:
        """What is wrong with the newest version after this one that did not work; empty if there is none."""
        newer = [refusal for refusal in self._by_digest.values() if refusal.version > version]
        return str(max(newer, key=lambda refusal: refusal.version).error) if newer else ""

    def _look_again(self, channel: Channel, manifest: Manifest, refusal: _Refusal) -> Verdict:
        if self._clock() >= refusal.again:
            refusal.again = self._clock() + refusal.backoff.failed()
            now = _listing(channel, manifest)
            if refusal.listing is None or (now is not None and now != refusal.listing):
                return "try"
        return self._patiently(refusal)

    def _patiently(self, refusal: _Refusal) -> Verdict:
        if self._clock() - refusal.first < self.patience:
            return "wait"
        if not refusal.passed_over:
            refusal.passed_over = True
            log.warning(
                "%s is not waited for any longer, after %.0f s: %s",
                refusal.version,
                self.patience,
                refusal.error,
                extra=logs.about(refusal.version, event="given-up"),
            )
        return "never"


def _is_transient(error: CkptSyncError) -> bool:
    return isinstance(error, StoreError | EngineUnavailable | Corrupt | NotFound)


def _listing(channel: Channel, manifest: Manifest) -> Listing | None:
    try:
        return frozenset((entry.path, entry.size) for entry in channel.store.list(manifest.folder))
    except StoreError:
        return None
