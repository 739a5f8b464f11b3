"""The board: a named actor that knows which version is newest and who serves which. A hint, never the truth.

A trainer pushes after its commit; watchers wait for that instead of for their next poll of the store. Engines say
what they serve, rollouts what they used. All of it is in the actor's memory: restarted, it reads the newest version
from the store again, and hears within seconds from every watcher what its engines serve. What is lost is the count of
rollouts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from ckptsync import logs
from ckptsync.errors import CkptSyncError, InvalidInput, InvalidName
from ckptsync.store import open_store
from ckptsync.version import VersionId, parse_label

from .calls import get
from .version_board import News, Standing, VersionBoard

log = logs.get(__name__)

GRACE_SECONDS = 5.0
"""For the board's own answer, beyond what it was asked to wait."""


class BoardUnavailable(CkptSyncError):
    """There is no board of that name, or it did not answer. Versions are found by polling the store."""


@dataclass(frozen=True, slots=True)
class Board:
    """A board by its name, from any process of the cluster. Small, and may be sent to other actors.

    What reports (`push`, `serving`, `forget`, `used`) neither waits for an answer nor raises if there is no board; what
    is asked right after may be answered first. What asks raises BoardUnavailable. A version is a VersionId or its
    label, `e1-v42`; InvalidName for other text.
    """

    name: str
    namespace: str
    """Ray's: a job has one of its own unless it chose one."""

    _started: ActorHandle[Any] | None = field(default=None, repr=False, compare=False)
    """Keeps the actor alive: Ray ends a named one with the last handle that is not from looking up its name."""

    def push(self, version: VersionId | str, *, step: int | None = None) -> None:
        """Say that `version` is complete, in the store or by a fast path: watchers look now.

        To be called on one rank of the trainer, after the commit. Idempotent; an older version changes nothing.
        """
        self._tell("push", _version(version), step)

    def newest(self, *, timeout: float = 10.0) -> News | None:
        """The newest version that the board knows; None before the first."""
        return self._ask("newest", seconds=timeout)  # type: ignore[no-any-return]

    def wait(self, after: VersionId | str | None = None, *, timeout: float = 10.0) -> News | None:
        """The newest version as soon as it is newer than `after`; None after `timeout` seconds without one."""
        known = None if after is None else _version(after)
        return self._ask("wait", known, timeout, seconds=timeout + GRACE_SECONDS)  # type: ignore[no-any-return]

    def serving(self, engine: str, version: VersionId | str | None) -> None:
        """Say that `engine` serves this version from now on; None or "" if nothing that was proven. Watchers of
        `watch` say so of their engines; only for engines that are brought forward in some other way."""
        self._tell("serving", engine, _version(version) if version else None, time.time_ns())

    def forget(self, engine: str) -> None:
        """It is gone for good: `wait_for` does not wait for it any more."""
        self._tell("forget", engine, time.time_ns())

    def standings(self, *, timeout: float = 10.0) -> Mapping[str, Standing]:
        """What every known engine serves."""
        return self._ask("standings", seconds=timeout)  # type: ignore[no-any-return]

    def wait_for(
        self, min_version: VersionId | str, timeout: float, engines: Sequence[str] = ()
    ) -> Mapping[str, Standing]:
        """The freshness gate: return once all of `engines` serve `min_version` or a later one; of every engine that the
        board knows, at least one, if none is named. NotFresh after `timeout` seconds, naming who is behind."""
        asked = (_version(min_version), timeout, tuple(engines))
        return self._ask("wait_for", *asked, seconds=timeout + GRACE_SECONDS)  # type: ignore[no-any-return]

    def used(self, version: VersionId | str, *, rollouts: int = 1) -> None:
        """Count so many rollouts that were computed with `version`, against the newest version at this moment."""
        self._tell("used", _version(version), rollouts)

    def staleness(self, *, timeout: float = 10.0) -> Mapping[int, int]:
        """Versions behind the newest -> how many rollouts were, since the board started; ascending.

        Also in Ray's metrics, as the histogram `ckptsync_staleness_versions`.
        """
        return self._ask("staleness", seconds=timeout)  # type: ignore[no-any-return]

    # -- inside ------------------------------------------------------------------------------------------

    def _actor(self) -> ActorHandle[Any]:
        """Looked up each time: one that was killed for good may have been started anew."""
        try:
            return ray.get_actor(self.name, namespace=self.namespace)
        except (ValueError, RayError) as error:
            raise BoardUnavailable(f"there is no board {self.name!r} in namespace {self.namespace!r}") from error

    def _tell(self, method: str, *args: Any) -> None:
        try:
            actor = self._actor()  # held by a name: before Ray 2.50 a method does not hold its handle
            getattr(actor, method).remote(*args)
        except BoardUnavailable as error:
            log.info("%s is not reported: %s", method, error, extra={"event": "board-away"})

    def _ask(self, method: str, *args: Any, seconds: float) -> Any:
        actor = self._actor()
        ref = getattr(actor, method).remote(*args)
        try:
            return get(ref, seconds)
        except GetTimeoutError as error:
            ray.cancel(ref)
            raise BoardUnavailable(f"board {self.name!r}: no answer to {method} within {seconds:g} s") from error
        except RayError as error:
            raise BoardUnavailable(f"board {self.name!r}: {error}") from error


def open_board(
    name: str, root: str | None = None, *, namespace: str | None = None, detached: bool = False, timeout: float = 60.0
) -> Board:
    """The board `name`, started if it is not there.

    With the channel's `root` it knows the versions of before, also after a restart. It lives as long as the Board that
    started it, or a copy of that in another process, or, `detached`, until it is killed. `namespace` is for boards that
    several jobs share. BoardUnavailable if it does not start within `timeout` seconds; InvalidInput if a board of this
    name is there and was started for another root.
    """
    space = namespace or ray.get_runtime_context().namespace
    actor: Any = ray.remote(VersionBoard).options(
        name=name, namespace=space, get_if_exists=True, lifetime="detached" if detached else None,
        num_cpus=0, max_restarts=-1,
    ).remote(root)  # fmt: skip
    try:
        url = get(actor.url.remote(), timeout)
    except RayError as error:
        raise BoardUnavailable(f"board {name!r} did not start: {error}") from error
    if root is not None and url and url != open_store(root).url:
        raise InvalidInput(f"board {name!r} is that of {url}, not of {root}: give it a name of its own")
    return Board(name, space, actor)


def _version(version: VersionId | str) -> VersionId:
    found = parse_label(version) if isinstance(version, str) else version
    if not isinstance(found, VersionId):
        raise InvalidName(f"{version!r} is not the label of a version, such as e1-v42")
    return found
