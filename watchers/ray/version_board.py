"""The actor behind a `Board`: what is newest, who serves what, how stale rollouts were. In one event loop."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ray.util.metrics import Histogram

from ckptsync import logs
from ckptsync.channel import Channel
from ckptsync.errors import Corrupt, EngineUnavailable, NotFound, StoreError
from ckptsync.version import VersionId

log = logs.get(__name__)

BUCKETS = [0.5, 1.5, 2.5, 4.5, 8.5, 16.5, 32.5]
"""In versions: none behind, one, two, 3 to 4, ..."""


class News(NamedTuple):
    """A version that somebody pushed, or that the store had when the board started."""

    version: VersionId
    step: int | None = None


class Standing(NamedTuple):
    """What an engine was last said to serve."""

    version: VersionId | None
    """None: it serves nothing that was proven."""

    heard: float
    """Seconds since it was said last; a watcher says it again every few seconds."""


class NotFresh(EngineUnavailable):
    """Engines did not come to a version in time. The message says what each serves; `behind` has it as data."""

    def __init__(self, message: str, behind: Mapping[str, Standing] | None = None) -> None:
        super().__init__(message)
        self.behind = behind or {}


class VersionBoard:
    """See `Board` for its methods. Kept short: none waits but for a condition, and none asks anybody."""

    def __init__(self, root: str | None = None) -> None:
        self._known: list[VersionId] = []
        self._newest: News | None = None
        self._serving: dict[str, tuple[VersionId | None, float]] = {}
        self._said: dict[str, int] = {}
        self._behind: Counter[int] = Counter()
        self._histogram = Histogram(
            "ckptsync_staleness_versions", "How many versions rollouts were behind the newest one", BUCKETS
        )
        self._changed = asyncio.Condition()
        self._url = ""
        if root is not None:
            channel = Channel.open(root)
            self._url = channel.store.url
            self._read(channel)

    async def url(self) -> str:
        """Of the root that it was started with; empty without one."""
        return self._url

    async def push(self, version: VersionId, step: int | None) -> None:
        async with self._changed:
            self._learn(News(version, step))
            self._changed.notify_all()

    async def newest(self) -> News | None:
        return self._newest

    async def wait(self, after: VersionId | None, timeout: float) -> News | None:
        def is_newer() -> bool:
            return self._newest is not None and (after is None or self._newest.version > after)

        async with self._changed:
            return self._newest if await self._within(timeout, is_newer) else None

    async def serving(self, engine: str, version: VersionId | None, said: int) -> None:
        async with self._changed:
            if self._is_news_of(engine, said):
                self._serving[engine] = (version, time.monotonic())
                self._changed.notify_all()

    async def forget(self, engine: str, said: int) -> None:
        async with self._changed:
            if self._is_news_of(engine, said):
                self._serving.pop(engine, None)
                self._changed.notify_all()

    async def standings(self) -> Mapping[str, Standing]:
        now = time.monotonic()
        return {engine: Standing(version, now - then) for engine, (version, then) in self._serving.items()}

    async def wait_for(self, least: VersionId, timeout: float, engines: Sequence[str]) -> Mapping[str, Standing]:
        def behind() -> list[str]:
            return [engine for engine in engines or self._serving if not self._reaches(engine, least)]

        async with self._changed:
            fresh = await self._within(timeout, lambda: bool(engines or self._serving) and not behind())
        standings = await self.standings()
        if fresh:
            return standings
        late = {engine: standings.get(engine, Standing(None, float("inf"))) for engine in behind()}
        said = "; ".join(f"{engine} {_says(standing)}" for engine, standing in late.items()) or "no engine is known"
        raise NotFresh(f"not at {least} within {timeout:g} s: {said}", late)

    async def used(self, version: VersionId, rollouts: int) -> None:
        behind = len(self._known) - bisect_right(self._known, version)
        self._behind[behind] += rollouts
        for _ in range(rollouts):
            self._histogram.observe(behind)

    async def staleness(self) -> Mapping[int, int]:
        return dict(sorted(self._behind.items()))

    # -- inside ------------------------------------------------------------------------------------------

    def _read(self, channel: Channel) -> None:
        """What was there before. A store that is away now costs the board its memory, not its start."""
        try:
            self._known = channel.versions()
            newest = channel.poll()
            self._newest = None if newest is None else News(newest, channel.manifest(newest).step)
        except (Corrupt, NotFound, StoreError) as error:
            more = {"event": "board-began-empty"}
            log.warning("the board begins without the versions of before: %s", error, extra=more)

    def _learn(self, news: News) -> None:
        at = bisect_right(self._known, news.version)
        if at == 0 or self._known[at - 1] != news.version:
            insort(self._known, news.version)
        if self._newest is None or news.version >= self._newest.version:
            self._newest = news

    def _is_news_of(self, engine: str, said: int) -> bool:
        """Ray runs an actor's coroutines in any order: what was said before does not undo what was said after."""
        is_news = said > self._said.get(engine, 0)
        if is_news:
            self._said[engine] = said
        return is_news

    def _reaches(self, engine: str, least: VersionId) -> bool:
        version = self._serving[engine][0] if engine in self._serving else None
        return version is not None and version >= least

    async def _within(self, seconds: float, met: Callable[[], bool]) -> bool:
        """With the condition held."""
        try:
            async with asyncio.timeout(seconds):
                return await self._changed.wait_for(met)
        except TimeoutError:
            return met()


def _says(standing: Standing) -> str:
    serves = f"serves {standing.version}" if standing.version else "serves nothing that was proven"
    return f"{serves}, said {standing.heard:.0f} s ago"
