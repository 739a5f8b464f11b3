"""One-way copying of a channel: claims, then data, then the manifest, version after version, oldest first.

Oldest first, so that who takes every version at the destination misses none, and a delta's bases are there before
it. What the destination's retention would not keep is not copied; what is older than its newest version is copied
only if something newer is made from it, so nothing that was collected there comes back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import NamedTuple

from .. import host, logs
from ..channel import Channel
from ..channel_record import check_there
from ..collect import Collected, Collector
from ..errors import (
    BadManifest,
    BadShard,
    ChannelEmpty,
    CkptSyncError,
    Conflict,
    Corrupt,
    InvalidInput,
    NotAMirror,
    NotFound,
    StoreError,
    StoreFull,
    VersionExists,
    VersionGone,
    VersionNotFound,
)
from ..layout import SELF_COPY, manifest_path
from ..manifest import Kind, Manifest
from ..reading import leased
from ..retention import Retention, needs_of
from ..signing import Trust
from ..store.base import Store
from ..store.clock import StoreClock
from ..sweep import sweep_unmirrored
from ..version import VersionId
from .damage import damaged, lost, torn
from .destination import commit, copy_claims, take
from .files import Piece, copy, copy_record, missing
from .holds import Holds
from .throttle import Throttle

log = logs.get(__name__)

RETRY_SECONDS = 60.0
"""After so long a version that could not be copied is tried again."""

COLLECT_SECONDS = 30.0
"""A pass that goes on for longer collects so often: where versions come as fast as they are copied it never ends."""

LOOK_AFTER_SECONDS = 3600.0
"""What a killed mirror left is swept, and what the destination has lost is copied again, so often and at the start."""

LOOK_SECONDS = 30.0
"""`follow` goes through everything at least so often, whatever the source's head says."""

KINDS: tuple[Kind, ...] = ("full", "delta", "adapter")

Progress = Callable[[Manifest, int, int], None]
"""Told of the version that is being copied, its bytes that are there, and all that are to be copied."""


class _Stopped(Exception):
    """`follow` is to end, in the middle of a file."""


class Mirrored(NamedTuple):
    """What one pass did. `repaired`: versions of which files were copied again. `skipped`: version -> why it is not at
    the destination, or not whole there."""

    copied: tuple[VersionId, ...]
    repaired: tuple[VersionId, ...]
    skipped: dict[VersionId, str]
    nbytes: int
    collected: Collected | None


class Mirror:
    """Copies the channel at `source` to `target`, each a root or a Store. For one thread; any number of processes may
    copy to one target, since all would write the same bytes.

    `kinds`      of the versions to copy; what they are made from comes along
    `retention`  which of them to keep at the target, and so to copy; None: all
    `rate`       bytes a second at most, on average
    `require_signature`
                 public keys, as a PEM file or its text: what none of them signed is not copied
    `progress`   see Progress
    `on_version` called after each version that is committed at the target
    """

    def __init__(
        self,
        source: str | Store,
        target: str | Store,
        *,
        kinds: tuple[Kind, ...] = KINDS,
        retention: Retention | None = None,
        rate: float | None = None,
        require_signature: str | Trust | None = None,
        progress: Progress = lambda *_: None,
        on_version: Callable[[Manifest], None] = lambda _: None,
    ) -> None:
        if not kinds or not set(kinds) <= set(KINDS):
            raise InvalidInput(f"kinds={kinds!r}: use some of {', '.join(KINDS)}")
        if rate is not None and not rate > 0:
            raise InvalidInput(f"rate={rate!r}: must be more than 0 bytes a second, or None")
        self.source, self.target = (
            Channel.open(root, require_signature=require_signature) for root in (source, target)
        )
        self._kinds, self._throttle = frozenset(kinds), Throttle(rate)
        self._progress, self._on_version = progress, on_version
        self._wanted = Collector(self.source, retention) if retention else None
        self._keeper = Collector(self.target, retention) if retention else None
        self._holds = Holds(self.source, self.target)
        self._claims: set[int] = set()
        self._of_kind: dict[VersionId, bool] = {}
        self._failed: dict[VersionId, tuple[float, str]] = {}
        self._damaged: dict[VersionId, str] = {}
        self._looked_after = float("-inf")
        self._contended, self._taken = "", False
        self._stop = threading.Event()
        self._moved = 0

    def run(self, *, repair: bool = False) -> Mirrored:
        """Copy what is missing, then collect. A version that is collected or damaged at the source is passed over with
        a warning; all else raises, and a later run goes on where this one ended. A target that is full is collected
        before StoreFull is raised: the later run has the room.

        What the target has lost is copied again: files that are not there or have another size, manifests. With
        `repair` also files whose bytes are wrong, for which every byte at the target is read, and every version that
        would be copied to an empty target, though it may be the target's own collector that ended it.

        Raises NotAMirror if the target has versions that did not come from this channel, ChannelEmpty if the source has
        none, StoreError if either storage fails. Whoever reads the target meanwhile sees whole versions only.
        """
        with self._scope(), self._there():
            return self._pass(repair)

    @contextmanager
    def _there(self) -> Iterator[None]:
        """StoreUnavailable for a root that held the channel before, and is empty now: whose it is, and what it lacks,
        cannot be told from the folder under a mount that is away."""
        self._check_there()
        try:
            yield
        except NotAMirror:
            self._check_there()
            raise

    def _check_there(self) -> None:
        for channel in (self.source, self.target) if self._taken else ():
            check_there(channel.store)

    def _pass(self, repair: bool) -> Mirrored:
        take(self.source, self.target)
        self._taken = True
        copied: list[VersionId] = []
        repaired: list[VersionId] = []
        self._moved = 0
        try:
            if repair or time.monotonic() - self._looked_after > LOOK_AFTER_SECONDS:
                self._look_after(copied, repaired, repair)
            self._bring_new(copied)
        except StoreFull:
            self._collect()
            raise
        if copy_claims(self.source, self.target, self._claims):
            self.target.refresh_head()  # a resume to an earlier version is news without a new version
        return Mirrored(tuple(copied), tuple(repaired), self._skipped(), self._moved, self._collect())

    def _bring_new(self, copied: list[VersionId]) -> None:
        began = time.monotonic()
        while (version := self._next()) is not None:
            try:
                self._bring(version, copied)
                self._failed.pop(version, None)
            except (Corrupt, NotFound) as error:
                self._pass_over(version, str(error))
            if time.monotonic() - began > COLLECT_SECONDS:
                self._collect()
                began = time.monotonic()

    def follow(
        self, stop: threading.Event, *, poll: float = 1.0, on_pass: Callable[[Mirrored], None] | None = None
    ) -> None:
        """Run whenever there is news at the source, until `stop` is set, which breaks off a file that is being copied.
        Either storage may come and go. Raises what can only be mended by hand: NotAMirror and VersionExists."""
        self._stop = stop
        with self._scope():
            self._follow(poll, on_pass)

    def _follow(self, poll: float, on_pass: Callable[[Mirrored], None] | None) -> None:
        stop = self._stop
        seen: VersionId | None = None
        looked, failures = float("-inf"), 0
        while not stop.is_set():
            try:
                with host.refusals("nothing can be copied now"):
                    newest = self.source.poll()
                    if newest != seen or time.monotonic() - looked > LOOK_SECONDS:
                        done = self.run()
                        seen, looked = newest, time.monotonic()
                        if on_pass is not None:
                            on_pass(done)
                failures = 0
            except _Stopped:
                return
            except (NotAMirror, VersionExists, InvalidInput):
                raise
            except ChannelEmpty:
                pass  # its trainer has yet to start
            except CkptSyncError as error:
                failures += 1
                if failures == 1:
                    log.warning("mirroring waits: %s", error, extra={"event": "mirror-waits"})
            stop.wait(min(60.0, poll * 2.0 ** min(failures, 10)))

    def _scope(self) -> AbstractContextManager[None]:
        return logs.scope(channel=self.source.store.url, target=self.target.store.url)

    # -- which -----------------------------------------------------------------------------------------------

    def _next(self) -> VersionId | None:
        """The oldest that is to be copied now. Asked anew for each: while one was copied, others may have come and
        gone."""
        there = self.target.committed()
        since = there[-1] if there else None
        for version in self._candidates():
            if since is not None and version <= since:
                continue
            if not self._rests(version) and self._is_of_kind(version):
                return version
        return None

    def _candidates(self) -> list[VersionId]:
        if self._wanted is None:
            return self.source.committed()
        return list(self._wanted.by_policy(StoreClock.guess()).keep)

    def _pass_over(self, version: VersionId, why: str) -> None:
        if self._failed.get(version, (0.0, ""))[1] != why:
            log.warning("%s is not mirrored: %s", version, why, extra=logs.about(version, event="not-mirrored"))
        self._failed[version] = time.monotonic(), why

    def _skipped(self) -> dict[VersionId, str]:
        """Those that are at the source still, and not here."""
        matter = set(self.source.committed()) - set(self.target.committed()) if self._failed else set()
        self._failed = {version: failed for version, failed in self._failed.items() if version in matter}
        return {**{version: why for version, (_, why) in self._failed.items()}, **self._damaged}

    def _rests(self, version: VersionId) -> bool:
        failed = self._failed.get(version)
        return failed is not None and time.monotonic() - failed[0] < RETRY_SECONDS

    def _is_of_kind(self, version: VersionId) -> bool:
        if len(self._kinds) == len(KINDS):
            return True
        if version not in self._of_kind:
            try:
                self._of_kind[version] = self._manifest(version).kind in self._kinds
            except (Corrupt, VersionNotFound):
                return False  # `_failed` would name a version that may not be of our kinds at all
        return self._of_kind[version]

    # -- one version -----------------------------------------------------------------------------------------

    def _bring(self, version: VersionId, copied: list[VersionId]) -> None:
        """Copy the version, what it is made from first; all of it stays at the target until it is in."""
        with self._holds.leased_at_source(version) as renew, ExitStack() as holds:
            for manifest in self._missing_chain(version, holds):
                self._copy(manifest, missing(self.target.store, manifest), renew)
                copy_claims(self.source, self.target, self._claims)
                check_there(self.target.store)
                commit(self.target, manifest)
                copied.append(manifest.id)
                log.info("%s is mirrored", manifest.id, extra=logs.about(manifest.id, event="mirrored"))
                self._on_version(manifest)

    def _missing_chain(self, version: VersionId, holds: ExitStack) -> list[Manifest]:
        """The version and those of its ancestors that the target lacks, oldest first."""
        chain = [self._manifest(version)]
        for manifest in chain:
            for need in needs_of(manifest):
                holds.enter_context(self._holds.held_at_target(need))
                if need not in self.target.committed():
                    chain.append(self._manifest(need))
        return sorted(chain, key=lambda manifest: manifest.id)

    def _manifest(self, version: VersionId) -> Manifest:
        manifest = self.source.manifest(version)
        if manifest.channel_id != self.source.channel_id:
            raise BadManifest(f"{version} is of channel {manifest.channel_id}, not of this one")
        return manifest

    def _copy(self, manifest: Manifest, pieces: list[Piece], renew: Callable[[], None]) -> None:
        total, done = sum(piece.entry.size for piece in pieces), 0

        def moved(count: int) -> None:
            nonlocal done
            done += count
            self._moved += count
            if self._stop.is_set():
                raise _Stopped
            renew()
            self._progress(manifest, done, total)

        try:
            copy(self.source.store, self.target.store, pieces, manifest.digest, self._throttle, moved)
            copy_record(self.target.store, manifest)
        except NotFound as error:
            self._take_back_if_gone(manifest, [piece.path for piece in pieces])
            raise BadShard(f"a file of {manifest.id} is in its manifest and not on the store: {error}") from error

    def _take_back_if_gone(self, manifest: Manifest, paths: list[str]) -> None:
        """VersionGone, after the paths were deleted, if the version was collected at the source while it was copied."""
        try:
            self.source.check_still_there(manifest.id)
        except VersionGone:
            with suppress(StoreError):  # what stays is swept by a later run
                for path in paths:
                    self.target.store.delete(path)
            raise

    # -- what the destination lost ---------------------------------------------------------------------------

    def _look_after(self, copied: list[VersionId], repaired: list[VersionId], repair: bool) -> None:
        sweep_unmirrored(self.target, set(self.source.committed()))
        self._damaged = {}
        for version in list(torn(self.target)):
            with self._or_damaged(version):
                self._manifest(version)
                self.target.store.delete(manifest_path(version))  # no reader took it; it is in the way
        for version in lost(self.target, self._candidates(), self._is_of_kind, every=repair):
            with self._or_damaged(version):
                self._bring(version, copied)
        for manifest, pieces in damaged(self.target, read=repair):
            with suppress(VersionGone), leased(self.target, manifest.id, "mirror", needed=True):
                self.target.check_still_there(manifest.id)  # else its files are gone because it was collected
                with self._or_damaged(manifest.id):
                    self._mend(manifest, pieces)
                    repaired.append(manifest.id)
        self._looked_after = time.monotonic()

    @contextmanager
    def _or_damaged(self, version: VersionId) -> Iterator[None]:
        try:
            yield
        except (Corrupt, NotFound) as error:
            self._damaged[version] = f"damaged here, and not to be had from {self.source.store.url}: {error}"
            log.warning("%s is %s", version, self._damaged[version], extra=logs.about(version, event="not-repaired"))

    def _mend(self, manifest: Manifest, pieces: list[Piece]) -> None:
        """Put right files into the place of wrong ones. Each store replaces a file at once and whole, with the bytes
        that the manifest has always named; a file that is right is not touched, so no reader loses any."""
        self.source.check_still_there(manifest.id)
        with self._holds.leased_at_source(manifest.id) as renew:
            self._copy(manifest, pieces, renew)
        names = ", ".join(piece.path.rpartition("/")[2] for piece in pieces) or SELF_COPY
        log.warning(
            "%s was damaged at %s and is whole again: %s", manifest.id, self.target.store.url, names,
            extra=logs.about(manifest.id, event="repaired"),
        )  # fmt: skip

    # -- after ----------------------------------------------------------------------------------------------

    def _collect(self) -> Collected | None:
        if self._keeper is None:
            return None
        try:
            return self._keeper.collect()
        except Conflict as error:
            if str(error) != self._contended:
                log.warning("nothing was collected from the mirror: %s", error, extra={"event": "not-collected"})
            self._contended = str(error)
            return None
