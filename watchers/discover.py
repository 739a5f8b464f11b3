"""Finding the next version. Polling always; file system events only shorten the wait.

State comes from the channel's head and listing, never from the shape of an event: NFS and FUSE clients get
none for what others write, and a rename arrives as delete and create.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, Protocol

from ckptsync.channel import Channel
from ckptsync.errors import ChannelEmpty, Corrupt, VersionNotFound
from ckptsync.layout import MANIFESTS
from ckptsync.manifest import Manifest
from ckptsync.version import VersionId, VersionQuery, parse_query

if TYPE_CHECKING:
    from watchdog.observers.api import BaseObserver

log = logging.getLogger(__name__)

Verdict = Literal["try", "wait", "never"]
"""May this version be tried now, later, or not again (see `refusals`)?"""


class Subscription(Protocol):
    """Which versions a watcher wants."""

    def next(
        self, channel: Channel, current: VersionId | None, verdict: Callable[[Manifest], Verdict]
    ) -> Manifest | None:
        """The version to load now, given the one that is served; None if there is nothing to do."""
        ...


def subscribe(follow: str) -> Subscription:
    """`latest`, `every`, or a version such as `42` or `e2-v42`. Raises InvalidName for anything else."""
    if follow == "every":
        return Every()
    query = parse_query(follow)
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


class Every:
    """Every live version in order, from the oldest that is kept. One that is still to be tried again holds
    the line."""

    def next(
        self, channel: Channel, current: VersionId | None, verdict: Callable[[Manifest], Verdict]
    ) -> Manifest | None:
        newest = channel.poll()
        if newest is None or newest == current:
            return None
        for manifest in _readable(channel, [v for v in channel.versions() if current is None or v > current]):
            answer = verdict(manifest)
            if answer != "never":
                return manifest if answer == "try" else None
        return None


class Exactly:
    """One version, as soon as it is there; nothing after it."""

    def __init__(self, text: str, query: VersionQuery) -> None:
        self.text, self.query = text, query

    def next(
        self, channel: Channel, current: VersionId | None, verdict: Callable[[Manifest], Verdict]
    ) -> Manifest | None:
        if current is not None and self._is(current):
            return None
        try:
            manifest = channel.resolve(self.text)
        except (VersionNotFound, ChannelEmpty, Corrupt):
            return None
        return manifest if verdict(manifest) == "try" else None

    def _is(self, version: VersionId) -> bool:
        return version.number == self.query.number and self.query.epoch in {None, version.epoch}


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
                self._schedule(folder)
            except OSError as error:  # e.g. the user's limit of inotify watches
                log.warning("no file system events for %s (%s): polling alone", folder, error)
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
