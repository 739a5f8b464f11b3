"""What rank 0 knows of the channel that it publishes to: its epoch, the last version, and the next one."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from os import PathLike

import msgspec

from . import logs
from .attempt import Attempt, Stopwatch
from .channel import Channel
from .committing import in_the_way
from .config import PublisherConfig
from .epochs import check_fence
from .errors import (
    BadManifest,
    CkptSyncError,
    Fenced,
    InvalidInput,
    StoreError,
    StoreUnavailable,
    Unchanged,
    VersionExists,
)
from .keeper import Keeper
from .layout import SELF_COPY
from .manifest import Manifest
from .pressure import BackPressure
from .schema_change import schema_change
from .store.base import Store
from .sweep import sweep_debris
from .version import VersionId

log = logs.get(__name__)


class Ledger:
    """The writing end of a channel. Lives on rank 0 only."""

    def __init__(self, root: str | PathLike[str] | Store, config: PublisherConfig) -> None:
        self.channel = Channel.create(root, require_signature=config.require_signature, sign_key=config.sign_key)
        trust = self.channel.trust
        if config.resumed_from is not None and config.require_signature is None:
            self.channel.trust = None  # the caller vouches for that version, whoever signed it
        self.epoch = self.channel.claim_epoch(config.run_id or uuid.uuid4().hex, config.resumed_from)
        self._next = self.epoch.next_number
        self._reserved = self._next - 1
        self._last = self.channel.manifest(self.epoch.resumed_from) if self.epoch.resumed_from else None
        self._unsure, self._answers = False, True
        self._keeper = None
        if config.retention is not None:
            self._keeper = Keeper(self.channel.store, config.retention, self.epoch, trust)
        self._pressure = None
        if config.max_lag is not None:
            self._pressure = BackPressure(self.channel.store, config.max_lag, config.max_lag_seconds)
        if config.sweep_after is not None and self.epoch.number > 1:
            with logs.scope(channel=self.channel.store.url, epoch=self.epoch.number):
                self._sweep(config.sweep_after)

    def reserve(self) -> VersionId:
        """The next version's identity, not given again but by its number, or after `give_back`: its weights may go to
        engines by another way than files, and come here later or not at all. Fenced if a newer epoch exists, as far as
        the store answers: weights that need no store do not wait for it."""
        # A commit may be under way in the background, or its answer was lost: its number is not given to another.
        version = VersionId(self.epoch.number, max(self._free(), self._next + self._unsure))
        self._answers = self._asked(version, lambda: check_fence(self.channel.store, self.epoch))
        self._reserved = version.number
        return version

    def announce(self, version: VersionId) -> None:
        """Say in the channel that it goes to engines now. Not of a store that did not answer just now."""
        if self._answers:
            self._asked(version, lambda: self.channel.note_sent(version))

    def give_back(self, version: VersionId) -> None:
        """What was reserved last was sent nowhere: the next one may have its number."""
        self._reserved = version.number - 1

    @property
    def last(self) -> Manifest | None:
        """The version that the next one follows; certain once an attempt has begun."""
        return self._last

    def attempt(self, number: int | None, algorithm: str, watch: Stopwatch, progress: Callable[[int], None]) -> Attempt:
        """Start the next version, or version `number`, once readers have kept up if that was asked for. Fenced before
        anything is written."""
        if self._pressure is not None:
            self._pressure.wait(lambda: progress(0))
        check_fence(self.channel.store, self.epoch)
        if self._unsure:
            self._look()
        version = VersionId(self.epoch.number, self._free() if number is None else number)
        base = version.number == 0 and self._last is None and not self.channel.committed()
        if version.number < self._next and not base and version not in self.channel.committed():
            raise InvalidInput(f"number={number}: numbers only grow, and the next one is {self._next}")
        return Attempt(self.channel.store, version, algorithm=algorithm, watch=watch, progress=progress)

    def commit(self, attempt: Attempt, manifest: Manifest, *, require_change: bool = False) -> tuple[Manifest, bool]:
        """The version's manifest, and whether its content differs from the version's before.

        Unchanged, before anything is committed, if `require_change` and it does not, though the step moved.
        """
        if require_change:
            self._check_changed(manifest)
        if self._last is not None and self._last.id < manifest.id:
            _warn_of_another_model(self._last, manifest)
            manifest = msgspec.structs.replace(manifest, previous=self._last.id)
        sealed, data = self.channel.seal(manifest)
        attempt.put_unlisted(SELF_COPY, data)
        attempt.may_exist = self._unsure = True
        try:
            found = self.channel.commit(self.epoch, sealed)
        except CkptSyncError as error:
            attempt.may_exist = self._may_exist(sealed.id, error)
            raise
        self._unsure = False
        if found.nonce != attempt.nonce:
            attempt.discard()
        if self._keeper is not None:
            self._keeper.wake()
        return found, self._advance(found)

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _asked(self, version: VersionId, question: Callable[[], None]) -> bool:
        """Whether the store answered."""
        try:
            question()
        except StoreUnavailable as error:
            more = logs.about(version, event="unchecked")
            log.warning("%s goes out without a look at the channel: %s", version, error, extra=more)
            return False
        return True

    def _free(self) -> int:
        return max(self._next, self._reserved + 1)

    def _check_changed(self, new: Manifest) -> None:
        last = self._last
        if last is None or new.number < self._next or new.content_digest != last.content_digest:
            return
        if new.step is None or new.step != last.step:
            raise Unchanged(
                f"step {new.step} has exactly the weights of {last.id} (step {last.step}): nothing was published. "
                "Are the published tensors the ones that the optimizer updates?"
            )

    def _sweep(self, grace: float) -> None:
        try:
            swept = sweep_debris(self.channel, self.epoch, grace=grace)
        except StoreError as error:
            log.warning("what dead attempts left was not swept: %s", error, extra={"event": "not-swept"})
        else:
            if any(swept):
                log.info(
                    "swept %d files of dead attempts, %d bytes, and %d unfinished ones",
                    *swept,
                    extra={"event": "swept"},
                )

    def _advance(self, found: Manifest) -> bool:
        if found.number < self._next:
            return False
        changed = self._last is None or self._last.content_digest != found.content_digest
        if not changed and self._last is not None:
            log.warning(
                "%s has exactly the weights of %s: did the trainer change them?",
                found.id,
                self._last.id,
                extra=logs.about(found.id, event="unchanged"),
            )
        self._next, self._last = found.number + 1, found
        return changed

    def _may_exist(self, version: VersionId, error: CkptSyncError) -> bool:
        """Whether the version may exist in spite of the error, so that its files must stay.

        A put that timed out may still land. A plain no is believed only if the listing agrees, since it may
        have been the read back that failed.
        """
        if isinstance(error, Fenced | VersionExists):
            return False
        if not isinstance(error, StoreError) or isinstance(error, StoreUnavailable):
            return True
        try:
            return version in self.channel.committed()
        except CkptSyncError:
            return True

    def _look(self) -> None:
        """Find out whether the commit whose answer was lost has landed."""
        mine = [version for version in self.channel.committed() if version.epoch == self.epoch.number]
        if mine and mine[-1].number >= self._next:
            try:
                self._last = self.channel.manifest(mine[-1])
            except BadManifest as error:
                raise in_the_way(self.channel.store, mine[-1], error) from error
            self._next = mine[-1].number + 1
        self._unsure = False


def _warn_of_another_model(last: Manifest, new: Manifest) -> None:
    """A trainer may mean it; readers that hold the version before cannot take this one."""
    if "adapter" in (last.kind, new.kind) or last.tracks.keys() != new.tracks.keys():
        return
    for name, track in new.tracks.items():
        specs = [{t.name: t.spec for t in each.tensors if not t.alias_of} for each in (last.tracks[name], track)]
        if differs := list(schema_change(*specs).lines()):
            more = logs.about(new.id, event="other-model")
            text = "%s is another model than %s, engines will refuse it: %s"
            log.warning(text, new.id, last.id, "; ".join(differs), extra=more)
