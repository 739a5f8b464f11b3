"""Who is of the fleet now: each replica is a Watcher in a thread of its own, with a claim on its engine."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace

from ckptsync import host, logs
from ckptsync.errors import EngineRefused, InvalidInput, StoreError

from .claims import claimed
from .health import Health
from .roster import Roster
from .watcher import Watcher

log = logs.get(__name__)

ANEW_SECONDS = 10.0
"""After which a member whose watcher was ended by a bug gets another one: what brought it to light may pass, and the
rest of the fleet is watched on in any case."""

LOOKS_TO_LEAVE = 3
"""A member leaves when so many looks in a row do not list it: a file may be read half-written, and a DNS server may
leave records out."""


class Member:
    """One replica. `health` may be asked for from any thread."""

    def __init__(self, url: str, watcher: Watcher, claim: ExitStack) -> None:
        self.url, self.name, self.watcher, self.missed = url, watcher.engine.name, watcher, 0
        self._stop, self._ended = threading.Event(), ""
        self._held = ExitStack()
        for each in (claim, closing(watcher.engine), closing(watcher)):
            self._held.enter_context(each)
        self.ended_at = float("inf")
        self._thread = threading.Thread(target=self._run, name=f"ckptsync {url}", daemon=True)

    def start(self) -> None:
        try:
            self._thread.start()
        except RuntimeError:  # no thread left on this host
            self._held.close()
            raise

    @property
    def health(self) -> Health:
        health = self.watcher.health
        return replace(health, ready=False, reason=self._ended) if self._ended else health

    @property
    def gone(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> None:
        """After what it is at now; its stage is released then, since the engine may still be reading there."""
        self._stop.set()

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        with self._held:
            try:
                self.watcher.run(self._stop)
            except BaseException as error:
                self._ended = f"its watcher ended, and begins anew: {type(error).__name__}: {error}"
                log.exception("%s: its watcher ended", self.name, extra={"event": "watch-ended"})
            self.ended_at = time.monotonic()


class Members:
    """Those of a roster. One thread calls `look`; the others may be called from any.

    `watch` makes the watcher for a URL, and raises InvalidInput for one that is none. `stage`: the folder where
    engines are claimed, under the name `who`.
    """

    def __init__(self, roster: Roster, watch: Callable[[str], Watcher], *, stage: str, who: str) -> None:
        self._roster, self._watch, self._stage, self._who = roster, watch, stage, who
        self._present: dict[str, Member] = {}
        self._leaving: dict[str, Member] = {}
        self._unusable: dict[str, str] = {}

    def present(self) -> list[Member]:
        return list(self._present.values())

    @property
    def problems(self) -> list[str]:
        """With the sources of engines, and with what they list."""
        return [*self._roster.problems.values(), *self._unusable.values()]

    def look(self) -> list[str]:
        """Take in who is new. The URLs of those who left."""
        listed = self._roster.urls()
        self._leaving = {url: member for url, member in self._leaving.items() if not member.gone}
        left = [member.url for member in self.present() if self._has_ended(member) or self._leaves(member, listed)]
        for url in listed:
            # One that comes back while its thread is still busy with it must not be loaded by two at once.
            if url not in self._present and url not in self._leaving:
                self._enlist(url)
        self._unusable = {url: why for url, why in self._unusable.items() if url in listed}
        return left

    def wake(self, *, but: str = "") -> None:
        """All save the one at that URL, such as one that backs off."""
        for member in self.present():
            if member.url != but:
                member.watcher.wake()

    def close(self, seconds: float) -> None:
        """End every member after what it is at, and wait for so long at most."""
        members = [*self._present.values(), *self._leaving.values()]
        for member in members:
            member.stop()
        until = time.monotonic() + seconds
        for member in members:
            member.join(max(0.0, until - time.monotonic()))

    def _leaves(self, member: Member, listed: list[str]) -> bool:
        member.missed = 0 if member.url in listed else member.missed + 1
        if member.missed < LOOKS_TO_LEAVE:
            return False
        log.warning("%s is not listed any more, and is left alone", member.url, extra={"event": "engine-left"})
        member.stop()
        self._leaving[member.url] = self._present.pop(member.url)
        return True

    def _has_ended(self, member: Member) -> bool:
        """By itself. It is out of the roster's sight then, and enlisted anew if it is listed."""
        if member.gone and time.monotonic() - member.ended_at >= ANEW_SECONDS:
            del self._present[member.url]
            return True
        return False

    def _enlist(self, url: str) -> None:
        with ExitStack() as claim:
            try:
                with host.refusals(f"{url} cannot be watched"):
                    claim.enter_context(claimed(self._stage, url, self._who))
                    # There before it begins: what it says at once is asked of who is present.
                    self._present[url] = Member(url, self._watch(url), claim.pop_all())
                    self._present[url].start()
            except (InvalidInput, EngineRefused, StoreError) as error:
                self._present.pop(url, None)
                if self._unusable.get(url) != str(error):
                    log.error("%s", error, extra={"event": "engine-unusable"})
                self._unusable[url] = str(error)
                return
            self._unusable.pop(url, None)


def about(member: Member, reason: str) -> str:
    """Most that goes wrong with an engine names it already."""
    return reason if re.search(rf"\b{re.escape(member.url)}\b", reason) else f"{member.name}: {reason}"
