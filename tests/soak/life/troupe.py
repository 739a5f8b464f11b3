"""The processes, forked from one that has torch imported already, so that they share its memory."""

from __future__ import annotations

import multiprocessing
import random
import time
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from typing import Any

from .cast import Part, Stage
from .parts import play

PRELOADED = ["tests.soak.life.parts", "ckptsync.delta.compiled", "ckptsync.mirror"]


@dataclass
class Actor:
    """A part and the process that plays it now, if one does."""

    part: Part
    stage: Stage
    process: ForkServerProcess | None = None
    started: float = 0.0
    starts: int = 0
    kills: int = 0
    back_at: float | None = None

    def start(self, rewind: int = 0) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        process = context.Process(target=play, args=(self.part, self.stage, rewind), name=self.part.name)
        process.start()
        self.process, self.started, self.back_at = process, time.monotonic(), None
        self.starts += 1

    def kill(self, rest: float) -> None:
        """SIGKILL; to come back after so many seconds."""
        assert self.process is not None
        self.process.kill()
        self.process.join()
        self.process, self.back_at = None, time.monotonic() + rest
        self.kills += 1

    def terminate(self) -> None:
        """SIGTERM; see `ended_in`."""
        if self.process is not None:
            self.process.terminate()

    def ended_in(self, seconds: float) -> bool:
        """False if it has to be killed after so long."""
        if self.process is None:
            return True
        self.process.join(seconds)
        in_time = self.process.exitcode is not None
        self.process.kill()
        self.process.join()
        self.process = None
        return in_time

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    @property
    def ended(self) -> bool:
        """By itself."""
        return self.process is not None and self.process.exitcode is not None


@dataclass
class Reaper:
    """Kills one of `victims` now and then, at times that are drawn from `luck`, until told otherwise."""

    victims: list[Actor]
    low: float
    high: float
    luck: random.Random
    next: float = field(init=False)

    def __post_init__(self) -> None:
        self.next = time.monotonic() + self.luck.uniform(self.low, self.high)

    def reap(self) -> None:
        now = time.monotonic()
        if now < self.next:
            return
        self.next = now + self.luck.uniform(self.low, self.high)
        alive = [actor for actor in self.victims if actor.process is not None]
        if alive:
            self.luck.choice(alive).kill(self.luck.uniform(0.0, 4.0))


def revive(actors: list[Actor], luck: random.Random, *, now: float = float("inf")) -> None:
    """Those whose rest is over; a trainer resumes from an older version one time in four."""
    for actor in actors:
        if actor.back_at is not None and actor.back_at <= now:
            actor.start(rewind=2 if actor.part.kind == "publisher" and luck.random() < 0.25 else 0)
