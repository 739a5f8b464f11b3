"""A trainer of several ranks under a launcher: if one rank dies, all are killed and started anew, as a new epoch."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

from tests.engines.conftest import free_port
from tests.waiting import within

from .nets import Host
from .rank import FENCED, LOST
from .victims import Victim

PAUSE = 0.5
"""Seconds from the death of a rank to the next start."""

START_SECONDS = 300.0
"""In which a trainer has started, also on a busy machine and with links that are cut for a while."""


class Trainer:
    """One rank on each host. `arguments` are those of `rank`."""

    def __init__(self, hosts: Sequence[Host], arguments: Sequence[str], env: Mapping[str, str], logs: str) -> None:
        self._hosts, self._arguments, self._env, self._logs = hosts, arguments, env, logs
        self._stop_file, self._told = (arguments[arguments.index(name) + 1] for name in ("--stop", "--log"))
        self._frozen: deque[tuple[list[Victim], int]] = deque()
        self._lock, self._done = threading.Lock(), threading.Event()
        self._ranks: list[Victim] = []
        self._replaced: list[list[Victim]] = []
        self._launched = itertools.count()
        self._thread = threading.Thread(target=self._watch)

    def start(self) -> None:
        self._launch()
        self._thread.start()

    def rank(self, number: int) -> Victim:
        return self._ranks[number]

    def replace(self) -> None:
        """A new one starts while this one is frozen, taken for dead."""
        with self._lock:
            for rank in self._ranks:
                rank.freeze()
            self._replaced.append(self._ranks)
            self._frozen.append((self._ranks, self._starts()))
            self._launch()

    def thaw_replaced(self) -> None:
        """The first that was frozen, once a newer one has claimed its epoch: before, none has taken its place."""
        ranks, starts = self._frozen.popleft()
        within(START_SECONDS, lambda: self._starts() > starts)
        for rank in ranks:
            rank.thaw()

    def finish(self, seconds: float) -> list[str]:
        """Let it end in good order, after its last publish. How those ended that were replaced, and this one if it did
        not end."""
        within(seconds, lambda: all(rank.ended() is not None for ranks in self._replaced for rank in ranks))
        with open(self._stop_file, "w"):
            pass
        over = within(seconds, self._is_over)
        return [*map(_how, self._replaced), *([] if over else ["the last one does not end"])]

    def close(self) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        for rank in itertools.chain(self._ranks, *self._replaced):
            rank.kill()

    def _watch(self) -> None:
        while not self._done.wait(0.1):
            with self._lock:
                if self._is_over():
                    return
                if any(rank.killed or rank.ended() not in (None, 0) for rank in self._ranks):
                    for rank in self._ranks:
                        rank.kill()
                    time.sleep(PAUSE)
                    self._launch()

    def _is_over(self) -> bool:
        return os.path.exists(self._stop_file) and all(rank.ended() == 0 for rank in self._ranks)

    def _starts(self) -> int:
        """How many epochs were claimed so far."""
        with open(self._told, "rb") as file:
            return file.read().count(b'"started"')

    def _launch(self) -> None:
        launch, port = next(self._launched), free_port()
        self._ranks = [self._victim(number, host, launch, port) for number, host in enumerate(self._hosts)]
        for rank in self._ranks:
            rank.start()

    def _victim(self, number: int, host: Host, launch: int, port: int) -> Victim:
        place = {"RANK": str(number), "WORLD_SIZE": str(len(self._hosts))}
        meeting = {"MASTER_ADDR": self._hosts[0].address, "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": host.device}
        env = {**self._env, **place, **meeting, "OMP_NUM_THREADS": "1"}
        argv = [*host.prefix, sys.executable, "-m", "tests.chaos.rank", *self._arguments]
        return Victim(f"trainer rank {number}", argv, f"{self._logs}/rank{number}.log", env)


def _how(ranks: Sequence[Victim]) -> str:
    """What the first rank that knew said: to the others it is lost."""
    codes = [rank.ended() for rank in ranks]
    if None in codes:
        return "goes on"
    return "fenced" if FENCED in codes else "lost a rank" if LOST in codes else f"ended with {codes}"
