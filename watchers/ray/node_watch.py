"""What a WatcherActor runs: a fleet of the node's engines, and an ear at the board."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ckptsync import logs
from ckptsync.engine import Engine
from watchers.fleet import Fleet
from watchers.health import Health
from watchers.roster import Given, Roster
from watchers.watcher import Watcher

from .board import Board, BoardUnavailable

log = logs.get(__name__)

LISTEN_SECONDS = 10.0
"""How long one question to the board waits for news."""

ALONE_SECONDS = 1.0
"""Seconds between looks at the store while no board answers: as a watcher without one."""

_EACH = ("proof", "trusted", "allow_cast", "yields")
"""Options of a fleet's members."""


class NodeWatch:
    """Begins when made. `health` and `stop` may be called from any thread.

    Three threads: the fleet's, which waits for nobody here; one that listens to the board, one that tells it. Ray's own
    calls can take long when the cluster is in trouble, and no version waits for that.
    """

    def __init__(
        self,
        root: str,
        engines: Mapping[str, Callable[[], Engine]],
        *,
        stage: str,
        reader: str,
        board: Board | None = None,
        **options: Any,
    ) -> None:
        member = partial(Watcher, **{name: options.pop(name) for name in _EACH if name in options})
        self._engines, self._names = engines, dict[str, str]()
        self._stop, self._changed = threading.Event(), threading.Event()
        self.fleet = Fleet(
            root, Roster([Given(list(engines))]), self._connect, stage=stage, reader=reader, member=member,
            on_receipt=self._note, on_change=self._note, **options,
        )  # fmt: skip
        self._watching = _thread("ckptsync-watch", self._watch)
        self._telling = _thread("ckptsync-tell", partial(self._tell, board)) if board is not None else None
        if board is not None:
            _thread("ckptsync-listen", partial(self._listen, board))

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def health(self) -> Mapping[str, Health]:
        """Of each engine by the name that it was given; not ready, with the fleet's reason, before it has a watcher."""
        found = {self._names[name]: health for name, health in self.fleet.members().items()}
        return {name: found.get(name) or Health(reason=self.fleet.health.reason) for name in self._engines}

    def stop(self) -> None:
        """Returns when the fleet has ended what it was at, and the board was told."""
        self._stop.set()
        self._watching.join()
        self.fleet.close()
        if self._telling is not None:
            self._changed.set()
            self._telling.join()

    def _connect(self, name: str) -> Engine:
        engine = self._engines[name]()
        self._names[engine.name] = name
        return engine

    def _note(self, _: object) -> None:
        self._changed.set()

    # -- the threads -------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self.fleet.run(self._stop)
        except BaseException:
            text = "the watch loop ended; this process ends too, for Ray to start it again"
            log.critical(text, exc_info=True, extra={"event": "watch-ended"})
            os._exit(1)

    def _listen(self, board: Board) -> None:
        """News wake the fleet; so does every second without a board."""
        last, alone = None, False
        while not self._stop.is_set():
            try:
                news = board.wait(last, timeout=LISTEN_SECONDS)
                alone = False
            except BoardUnavailable as error:
                if not alone:
                    log.warning("%s; polling the store meanwhile", error, extra={"event": "board-away"})
                alone = True
                self.fleet.wake()
                self._stop.wait(ALONE_SECONDS)
                continue
            if news is not None:
                last = news.version
                self.fleet.wake()

    def _tell(self, board: Board) -> None:
        """What is served here: at every change, and again every few seconds, for a board that was restarted."""
        while not self._stop.is_set():
            for name, health in self.health().items():
                board.serving(name, health.version if health.ready else None)
            self._changed.wait(LISTEN_SECONDS / 2)
            self._changed.clear()
        for name in self._engines:
            board.forget(name)


def _thread(name: str, work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread
