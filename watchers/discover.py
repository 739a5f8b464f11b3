"""Finding the next version. Polling always; file system events only shorten the wait.

State comes from the channel's head and listing, never from the shape of an event: NFS and FUSE clients get
none for what others write, and a rename arrives as delete and create.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, Protocol

from ckptsync import host, logs
from ckptsync.channel import Channel
from ckptsync.errors import ChannelEmpty, Corrupt, InvalidName, VersionGone, VersionNotFound
from ckptsync.layout import MANIFESTS
from ckptsync.manifest import Manifest
from ckptsync.version import VersionId, VersionQuery, parse_query

if TYPE_CHECKING:
    from watchdog.observers.api import BaseObserver

log = logs.get(__name__)

Verdict = Literal["try", "wait", "never"]
"""May this version be tried now, later, or not again (see `refusals`)?"""


class Subscription(Protocol):
    """Which versions a watcher wants."""

    def next(
        self, channel: Channel, current: VersionId | None, verdict: Callable[[Manifest], Verdict]
    ) -> Manifest | None:
        """The version to load now, given the one that is served; None if there is nothing to do."""
        ...


class VersionsMissed(VersionGone):
    """Versions that a subscription to every one was still to take were collected. `last` is the newest of them."""

    def __init__(self, message: str, last: VersionId | None = None) -> None:
        super().__init__(message)
        self.last = last


_EVERY = re.compile(r"every(?::([1-9]\d{0,9}))?", re.ASCII)
_STEP = re.compile(r"step>=(\d{1,18})", re.ASCII)


def subscribe(follow: str | Subscription) -> Subscription:
    """What text means; InvalidName if nothing.

    `latest`              the newest
    `42`, `e2-v42`        that version, and nothing after it
    `every`, `every:10`   each in order, or each whose number is a multiple of 10
    `step>=500`           the newest, from the first one whose step is at least 500
    """
    if not isinstance(follow, str):
        return follow
    if found := _EVERY.fullmatch(follow):
        return Every(int(found[1] or 1))
    if found := _STEP.fullmatch(follow):
        return FromStep(int(found[1]))
    try:
        query = parse_query(follow)
    except InvalidName:
        raise InvalidName(
            f"{follow!r} cannot be followed: use latest, every, every:10, 'step>=500', or a version such as e2-v42"
        ) from None
    return Latest() if query.number is None else Exactly(follow, query)


class Latest:
    """The newest live version; a burst is skipped to its end.

    If the newest may not be tried, the newest that may is taken instead, so that one broken version does
    not leave a fresh engine without any. It goes back only when a resumed trainer has left the served
    version behind.
    """

    def next(
        self, channel: Channel, current: VersionId | None, verdict: Callable[[Manifest], Verdict]
    ) -> Manifest | None:
        newest = channel.poll()
        if newest is None or newest == current:
            return None
        if current is not None and newest < current and not left_behind(channel, current):
            return None
        for manifest in self._newest_first(channel, newest):
            if manifest.id == current or (current and manifest.id < current < newest):
                return None
            if verdict(manifest) == "try":
                return manifest
        return None

    def _newest_first(self, channel: Channel, newest: VersionId) -> Iterator[Manifest]:
        yield from _readable(channel, [newest])
        yield from _readable(channel, [v for v in reversed(channel.versions()) if v < newest])


class FromStep:
    """As `Latest`, as soon as the newest version's step is far enough."""

    def __init__(self, step: int) -> None:
        self.step, self._latest = step, Latest()

    def next(
        self, channel: Channel, current: VersionId | None, verdict: Callable[[Manifest], Verdict]
    ) -> Manifest | None:
        newest = channel.poll()
        # The newest alone decides whether to look at all: before its time is come, nobody reads what lies before it.
        if newest is None or not all(self._is_due(manifest) for manifest in _readable(channel, [newest])):
            return None
        return self._latest.next(channel, current, lambda m: verdict(m) if self._is_due(m) else "never")

    def _is_due(self, manifest: Manifest) -> bool:
        return manifest.step is not None and manifest.step >= self.step


class Every:
    """Every live version in order, from the oldest that is kept, or of these each whose number is a multiple of
    `interval`. One that is still to be tried again holds the line.

    VersionsMissed, once for each gap, if retention was faster: the next call goes on after it. A version that is to
    be taken whatever happens is pinned, or kept by `keep_every` with the same interval.
    """

    def __init__(self, interval: int = 1) -> None:
        self.interval = interval
        self._missed: VersionId | None = None
        self._there: frozenset[VersionId] | None = None
        self._previous: dict[VersionId, VersionId | None] = {}
        self._seen: tuple[VersionId | None, VersionId] | None = None

    def next(
        self, channel: Channel, current: VersionId | None, verdict: Callable[[Manifest], Verdict]
    ) -> Manifest | None:
        newest = channel.poll()
        if newest is None or newest == current or self._seen == (current, newest):
            return None
        before, asked, live = current, False, channel.versions()
        self._previous = {version: self._previous[version] for version in live if version in self._previous}
        if self._there is None:
            self._there = frozenset(live) if current is None else frozenset()
        for version in [v for v in live if current is None or v > current]:
            self._check_gap(channel, before, version)
            before = version
            for manifest in _readable(channel, [version] if version.number % self.interval == 0 else []):
                answer, asked = verdict(manifest), True
                if answer != "never":
                    return manifest if answer == "try" else None
        if not asked:
            self._seen = current, newest
        return None

    def _check_gap(self, channel: Channel, before: VersionId | None, version: VersionId) -> None:
        """Does `version` follow on `before`? A manifest says which one came before it."""
        previous = self._previous_of(channel, version)
        if before is None or previous is None or previous <= before or self._is_old_news(previous):
            return
        first = before.number + 1 if before.epoch == previous.epoch else previous.number
        wanted = previous.number // self.interval * self.interval
        if wanted < first or previous in channel.committed():
            return
        self._missed = previous
        raise VersionsMissed(
            f"versions after {before}, up to {previous}, were collected before they were taken: keep more of them, pin "
            "them, or be faster",
            previous,
        )

    def _is_old_news(self, previous: VersionId) -> bool:
        """Said already, or collected before this reader came and began with the oldest that was left."""
        if self._missed is not None and previous <= self._missed:
            return True
        there = self._there or frozenset()
        return previous not in there and previous < max(there, default=previous)

    def _previous_of(self, channel: Channel, version: VersionId) -> VersionId | None:
        if version not in self._previous:
            for manifest in _readable(channel, [version]):
                self._previous[version] = manifest.previous or None
        return self._previous.get(version)


class Exactly:
    """One version, as soon as it is there; nothing after it."""

    def __init__(self, text: str, query: VersionQuery) -> None:
        self.text, self.query = text, query

    def next(
        self, channel: Channel, current: VersionId | None, verdict: Callable[[Manifest], Verdict]
    ) -> Manifest | None:
        channel.poll()  # for how far behind it is
        if current is not None and self._is(current):
            return None
        try:
            manifest = channel.resolve(self.text)
        except (VersionNotFound, ChannelEmpty, Corrupt):
            return None
        return manifest if verdict(manifest) == "try" else None

    def _is(self, version: VersionId) -> bool:
        return version.number == self.query.number and self.query.epoch in {None, version.epoch}


class Following:
    """What was asked for at the start, and what is followed since a version was loaded by hand. `name` says which."""

    def __init__(self, follow: str | Subscription) -> None:
        self._now = subscribe(follow)
        self.name = str(follow)
        self._started: str | Subscription = "latest" if isinstance(self._now, Exactly) else follow

    def next(
        self, channel: Channel, current: VersionId | None, verdict: Callable[[Manifest], Verdict]
    ) -> Manifest | None:
        return self._now.next(channel, current, verdict)

    def loaded(self, text: str | int, version: VersionId) -> None:
        """`text` was asked for and `version` loaded: stay on it; after `latest` go on as at the start."""
        follow = self._started if text == "latest" else version.label
        self._now, self.name = subscribe(follow), str(follow)


def left_behind(channel: Channel, version: VersionId) -> bool:
    """Is it committed, and yet no longer live, since a trainer resumed from before it?

    One that is only gone, or not visible at this moment, is not left behind.
    """
    return version in channel.committed() and version not in channel.versions()


def _readable(channel: Channel, versions: list[VersionId]) -> Iterator[Manifest]:
    for version in versions:
        try:
            yield channel.manifest(version)
        except (VersionNotFound, Corrupt):
            continue  # `Channel.poll` has warned of it once, by name


AWAY = 10.0
"""Longest rest, in seconds, of a watcher whose engine or store is away: a restarted engine answers with the weights
that it started on until it is looked at."""


AGAIN = 1.0
"""Seconds after which what failed once is tried again, however seldom anybody looks for news."""


def next_look(poll: float, *due: float) -> float:
    """Seconds until the next look: `poll`, or until the first that is due; no sooner than AGAIN, since who is waited
    for may be somebody else."""
    return max(min(poll, AGAIN), min(poll, *due))


class Backoff:
    """Seconds to wait after the n-th failure in a row: doubled each time, jittered so that a fleet spreads
    out."""

    def __init__(self, base: float = 0.5, cap: float = 60.0) -> None:
        self.base, self.cap, self.failures = base, cap, 0

    def failed(self) -> float:
        delay = min(self.cap, self.base * 2.0 ** min(self.failures, 30))
        self.failures += 1
        return delay * random.uniform(0.75, 1.0)  # noqa: S311 - spreading load, not a secret

    def reset(self) -> None:
        self.failures = 0


class Wake:
    """Waits for the next poll; on a local store an inotify event ends the wait early."""

    def __init__(self, folder: str | None) -> None:
        self._event = threading.Event()
        self._folder = folder
        self._observer: BaseObserver | None = None
        self._watched: set[str] = set()

    def set(self) -> None:
        """End the present wait; for other sources of news, such as an HTTP route."""
        self._event.set()

    def wait(self, stop: threading.Event, seconds: float) -> None:
        """Return after `seconds`, at an event, or soon after `stop` is set."""
        if self._observe():
            return  # what came before we watched has no event: look again first
        deadline = time.monotonic() + seconds
        while not stop.is_set() and (left := deadline - time.monotonic()) > 0:
            if self._event.wait(min(left, 0.2)):
                break
        self._event.clear()

    def close(self) -> None:
        if self._observer is not None and self._observer.is_alive():
            self._observer.stop()
            self._observer.join()
        self._observer, self._folder = None, None

    def _observe(self) -> bool:
        """Watch the root and its `manifests/` once they are there; True if that is news.

        A failure is logged once; polling goes on.
        """
        folders = [self._folder, os.path.join(self._folder, MANIFESTS)] if self._folder is not None else []
        fresh = [folder for folder in folders if folder not in self._watched and os.path.isdir(folder)]
        for folder in fresh:
            try:
                with host.threads():
                    self._schedule(folder)
            except OSError as error:  # e.g. the user's limit of inotify watches
                log.warning(
                    "no file system events for %s (%s): polling alone", folder, error, extra={"event": "no-inotify"}
                )
                self.close()
                return False
            self._watched.add(folder)
        return bool(fresh)

    def _schedule(self, path: str) -> None:
        from watchdog.events import (
            FileClosedEvent,
            FileCreatedEvent,
            FileMovedEvent,
            FileSystemEvent,
            FileSystemEventHandler,
        )
        from watchdog.observers import Observer

        event = self._event

        class Handler(FileSystemEventHandler):
            def on_any_event(self, _: FileSystemEvent) -> None:
                event.set()

        if self._observer is None:
            self._observer = Observer()
            self._observer.start()
        # Not the opened and closed-without-writing events: our own poll of head.json would wake us for ever.
        news = [FileCreatedEvent, FileMovedEvent, FileClosedEvent]
        self._observer.schedule(Handler(), path, event_filter=news)


def local_folder(url: str) -> str | None:
    """The folder behind a local store's URL, or None if events cannot be had for it."""
    path = url.removeprefix("file://")
    return path if "://" not in path else None
