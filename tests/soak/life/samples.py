"""One look at everything, as a line of `samples.jsonl`; and what must be there whatever else goes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections import Counter
from typing import Any

import psutil

from ckptsync import holds
from ckptsync.channel import Channel
from ckptsync.errors import NotFound
from ckptsync.status import ChannelStatus, Observer
from ckptsync.version import VersionId, parse_label

from .cast import Stage
from .troupe import Actor


class Pins:
    """Pins of one channel, put and taken away at random; never one that the run needs."""

    def __init__(self, root: str, luck: random.Random) -> None:
        self.root, self.channel, self._luck = root, Channel.open(root), luck
        self.held: list[VersionId] = []
        self.kept: list[VersionId] = []
        """Never taken away."""

    def change(self) -> None:
        if len(self.held) > 2:
            holds.unpin(self.channel, self.held.pop(self._luck.randrange(len(self.held))))
        versions = [v for v in self.channel.committed() if v not in self.held + self.kept]
        if not versions:
            return
        version = self._luck.choice(versions)
        with contextlib.suppress(NotFound):  # collected at this moment
            holds.pin(self.channel, version, "the soak wants it")
            self.held.append(version)

    def keep(self, version: VersionId) -> None:
        holds.pin(self.channel, version, "a reader follows it")
        self.kept.append(version)


class Sampler:
    def __init__(self, stage: Stage, actors: list[Actor], pins: list[Pins]) -> None:
        self._stage, self._actors, self._pins = stage, actors, pins
        self._observers = {root: Observer(Channel.open(root)) for root in (stage.source, stage.target)}
        self._began = time.monotonic()
        self._file = open(stage.path("samples.jsonl"), "w")  # noqa: SIM115 - as long as the run
        self.lost: list[str] = []
        """What was leased or pinned, and gone."""

        self.all: list[dict[str, Any]] = []
        self.looks: dict[str, ChannelStatus] = {}

    def take(self) -> dict[str, Any]:
        self._check_holds()
        self.looks = {root: observer.look() for root, observer in self._observers.items()}
        sample = {
            "at": round(time.monotonic() - self._began, 2),
            "processes": {name: weigh(pid) | {"life": life} for name, pid, life in self._alive()},
            "channels": {os.path.basename(root): self._channel(root, look) for root, look in self.looks.items()},
            "stages": files(self._stage.path("stages")),
        }
        self._file.write(json.dumps(sample) + "\n")
        self._file.flush()
        self.all.append(sample)
        return sample

    def _alive(self) -> list[tuple[str, int, int]]:
        return [
            ("director", os.getpid(), 1),
            *((actor.part.name, actor.pid, actor.starts) for actor in self._actors if actor.pid and not actor.ended),
        ]

    def _channel(self, root: str, look: ChannelStatus) -> dict[str, Any]:
        return {
            "files": files(root),
            "bytes": look.disk,
            "versions": len(look.versions),
            "waiting": len(look.waiting),
            "debris": len(look.debris),
            "newest": look.newest,
            "lag": {each.reader: [each.lag, round(each.behind, 2), each.serves] for each in look.readers},
        }

    def _check_holds(self) -> None:
        """A lease that was in time, before and after the listing; a pin, which only this process takes away."""
        before = self._promises()
        there = {pins.root: set(pins.channel.committed()) for pins in self._pins}
        now = time.time()
        for promise in [each for each in self._promises() if each in before and now < each["until"]]:
            if parse_label(promise["version"]) not in there[promise["root"]]:
                self.lost.append(f"{promise['version']} is leased, and gone from {promise['root']}")
        for pins in self._pins:
            for version in {*pins.held, *pins.kept} - there[pins.root]:
                self.lost.append(f"{version} is pinned, and gone from {pins.root}")

    def _promises(self) -> list[dict[str, Any]]:
        found = []
        for name in os.listdir(self._stage.path("promises")):
            with contextlib.suppress(FileNotFoundError):
                if name.endswith(".json"):
                    with open(self._stage.path("promises", name)) as file:
                        found.append(json.load(file))
        return found


def weigh(pid: int) -> dict[str, float]:
    """Anonymous memory in KiB, which a fork shares and a mapped library does not add to; open files; CPU seconds."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            (line,) = (line for line in file if line.startswith("Anonymous:"))
        times = psutil.Process(pid).cpu_times()
        return {
            "kib": int(line.split()[1]),
            "fds": len(os.listdir(f"/proc/{pid}/fd")),
            "cpu": round(times.user + times.system, 2),
        }
    except (OSError, ValueError, psutil.Error):
        return {}  # it died meanwhile


def files(root: str) -> dict[str, int]:
    """How many there are in each folder at the top, those in the making too."""
    found = Counter[str]()
    for folder, _, names in os.walk(root):
        top = os.path.relpath(folder, root).split(os.sep)[0]
        found[top] += len(names)
    return dict(found)
