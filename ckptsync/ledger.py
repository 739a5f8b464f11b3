"""What rank 0 knows of the channel that it publishes to: its epoch, the last version, and the next one."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable

from .attempt import Attempt, Stopwatch
from .channel import Channel
from .config import PublisherConfig
from .epochs import check_fence
from .errors import CkptSyncError, Fenced, InvalidInput, StoreError, StoreUnavailable, Unchanged, VersionExists
from .layout import SELF_COPY
from .manifest import Manifest, seal
from .store.base import Store
from .sweep import sweep_debris
from .version import VersionId

log = logging.getLogger(__name__)


class Ledger:
    """The writing end of a channel. Lives on rank 0 only."""

    def __init__(self, root: str | Store, config: PublisherConfig) -> None:
        self.channel = Channel.create(root)
        self.epoch = self.channel.claim_epoch(config.run_id or uuid.uuid4().hex, config.resumed_from)
        self._next = self.epoch.next_number
        self._last = self.channel.manifest(self.epoch.resumed_from) if self.epoch.resumed_from else None
        self._unsure = False
        if config.sweep_after is not None and self.epoch.number > 1:
            self._sweep(config.sweep_after)

    def attempt(self, number: int | None, algorithm: str, watch: Stopwatch, progress: Callable[[int], None]) -> Attempt:
        """Start the next version, or version `number`. Fenced before anything is written."""
        check_fence(self.channel.store, self.epoch)
        if self._unsure:
            self._look()
        version = VersionId(self.epoch.number, self._next if number is None else number)
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
        sealed, data = seal(manifest)
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
        return found, self._advance(found)

    # -- inside ----------------------------------------------------------------------------------------------

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
            log.warning("what dead attempts left was not swept: %s", error)
        else:
            log.info("swept %d files of dead attempts, %d bytes, and %d unfinished ones", *swept)

    def _advance(self, found: Manifest) -> bool:
        if found.number < self._next:
            return False
        changed = self._last is None or self._last.content_digest != found.content_digest
        if not changed and self._last is not None:
            log.warning("%s has exactly the weights of %s: did the trainer change them?", found.id, self._last.id)
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
            self._last = self.channel.manifest(mine[-1])
            self._next = mine[-1].number + 1
        self._unsure = False
