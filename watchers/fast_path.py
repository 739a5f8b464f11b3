"""What a trainer brings to the engine past its watcher (`ckptsync.WeightSync`), by IPC, NCCL or gloo.

The two never talk: the watcher sees an engine that somebody else has paused, and later a label that it did not set.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ckptsync.engine import EngineStatus
from ckptsync.version import VersionId

YIELD_SECONDS = 300.0
"""For so long an engine that somebody else has paused is left to them: a send of the largest models, and some more."""


class FastPath:
    """`believes`: whether a label may be a version of this channel that came without files. `may_be_sending`: whether a
    trainer of this channel has begun to send a version of which there are no files. `seconds`: how long an engine that
    is paused by somebody else is left alone; after that whoever did it counts as dead."""

    def __init__(
        self,
        believes: Callable[[VersionId], bool],
        may_be_sending: Callable[[], bool],
        seconds: float = YIELD_SECONDS,
    ) -> None:
        self._believes, self.may_be_sending, self._seconds = believes, may_be_sending, seconds
        self.ahead: VersionId | None = None
        """What the engine holds, if it came this way."""
        self._missed: VersionId | None = None
        self._since: float | None = None
        self._label = ""
        self._refused = ""

    def see_pause(self, by_others: bool, label: str) -> None:
        """At each look: is the engine, which reports `label`, paused by somebody else?

        A watcher that was busy in between, or looks seldom, may find two sends paused and miss that the engine computed
        between them; the label tells, since only a send that came to its end changes it.
        """
        if not by_others:
            self._since = None
        elif self._since is None or label != self._label:
            self._since, self._label = time.monotonic(), label

    @property
    def at_work(self) -> bool:
        """It is paused by somebody else, who is given time still."""
        return self._since is not None and time.monotonic() - self._since < self._seconds

    @property
    def gave_up(self) -> bool:
        """It is paused by somebody else, for too long."""
        return self._since is not None and not self.at_work

    def brought(self, status: EngineStatus) -> bool:
        """Whether the label that the engine reports is a version that came this way; it is `ahead` then."""
        version = status.version
        if version is None or status.label == self._refused or not self._believes(version):
            self._refused = status.label
            return False
        self.ahead, self._missed = version, None
        return True

    def lost(self) -> None:
        """The engine was restarted, or loaded in another way: what came this way is gone from it."""
        self._missed, self.ahead = self.ahead or self._missed, None

    def behind(self, current: VersionId | None) -> str:
        """Why an engine that serves `current`, from files, is not up to date; empty if it is."""
        if self._missed is None or (current is not None and current >= self._missed):
            return ""
        return (
            f"behind: {self._missed} came to the engine without files, and was lost with it; the next sync brings it on"
        )
