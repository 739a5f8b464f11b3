"""The run: everybody on, samples and kills, all back, and the verdict."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from typing import Any

from ckptsync.channel import Channel
from ckptsync.version import parse_label

from . import verdict
from .cast import PINNED, Stage, cast
from .parts import set_margin
from .plot import plot
from .samples import Pins, Sampler
from .troupe import PRELOADED, Actor, Reaper, revive
from .verdict import Check

START_SECONDS, END_SECONDS, TO_END = 120.0, 180.0, 60.0
TICK = 0.2


class Run:
    def __init__(self, stage: Stage, seed: int, stop: threading.Event) -> None:
        for name in ("stages", "promises", "logs"):
            os.makedirs(stage.path(name))
        self.stage, self.stop, self.luck = stage, stop, random.Random(seed)
        self.actors = [Actor(part, stage) for part in cast(stage)]
        self.pins = [Pins(root, self.luck) for root in (stage.source, stage.target)]
        self.sampler = Sampler(stage, self.actors, self.pins)
        self.began, self.checks = time.monotonic(), list[Check]()
        self.failed: list[str] = []
        self.state = "running"
        self.seed = seed

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def go(self) -> bool:
        try:
            self.begin()
            self.middle()
            self.state = "interrupted" if self.stop.is_set() else "done"
            self.report()
            self.end()
        finally:
            self.send_home(self.actors)
            self.report()
        return all(check.ok for check in self.judge())

    def begin(self) -> None:
        for actor in self.actors:
            actor.start()
        channel, pinned = Channel.open(self.stage.source), parse_label(PINNED)
        assert pinned is not None
        self.wait(lambda: pinned in channel.committed(), START_SECONDS, "the trainer has published its third version")
        self.pins[0].keep(pinned)
        self.began = time.monotonic()

    def middle(self) -> None:
        seconds = self.stage.seconds
        scale = min(1.0, seconds / 600)
        one = {actor.part.kind: [actor] for actor in self.actors if actor.part.kind in ("publisher", "mirror")}
        others = [a for a in self.actors if not a.part.spared and a.part.kind in ("watcher", "holder")]
        often = Reaper(others, 10 * scale, 20 * scale, self.luck)
        seldom = [Reaper(one[kind], 120 * scale, 300 * scale, self.luck) for kind in ("publisher", "mirror")]
        every = max(0.5, min(5.0, seconds / 100))
        next_sample = next_report = next_pin = 0.0
        while (self.elapsed < seconds or len(self.sampler.all) < verdict.ENOUGH) and not self.stop.wait(TICK):
            revive(self.actors, self.luck, now=time.monotonic())
            often.reap()
            if self.elapsed < seconds * 0.7:  # so that both are seen to be flat at the end
                for reaper in seldom:
                    reaper.reap()
            self.look_for_ends()
            if self.elapsed > next_pin:
                next_pin = self.elapsed + self.luck.uniform(20, 40) * scale
                self.luck.choice(self.pins).change()
            if self.elapsed > next_sample:
                next_sample = self.elapsed + every
                self.sampler.take()
            if self.elapsed > next_report:
                next_report = self.elapsed + 60.0
                self.report()

    def end(self) -> None:
        """All are back, the trainer ends, and readers and mirror have the time to arrive."""
        revive(self.actors, self.luck)
        publisher, *others = self.actors
        self.send_home([publisher])
        parts = [actor.part for actor in others]
        self.wait(self.has_arrived, END_SECONDS, "every reader on the newest, the mirror too")
        late = verdict.behind(parts, self.sampler.looks)
        self.checks.append(Check("every reader is on the newest", not late, "; ".join(late) or "they are"))
        self.checks.append(verdict.mirror_is_equal(self.stage))
        for name, root in (("source", self.stage.source), ("target", self.stage.target)):
            self.checks += verdict.channel_is_sound(name, root)

    def send_home(self, actors: list[Actor]) -> None:
        for actor in actors:
            actor.terminate()
        for actor in actors:
            if not actor.ended_in(TO_END):
                self.failed.append(f"{actor.part.name} did not end within {TO_END:.0f} s of SIGTERM")

    def has_arrived(self) -> bool:
        self.sampler.take()
        looks = self.sampler.looks
        source, target = looks[self.stage.source], looks[self.stage.target]
        return source.newest == target.newest and not verdict.behind([a.part for a in self.actors], looks)

    def wait(self, check: Any, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not check():
            self.look_for_ends()
            if time.monotonic() > deadline:
                self.failed.append(f"not within {seconds:.0f} s: {what}")
                return
            time.sleep(0.5)

    def look_for_ends(self) -> None:
        for actor in self.actors:
            if actor.ended and actor.process is not None:
                self.failed.append(f"{actor.part.name} ended by itself, with {actor.process.exitcode}: see its log")
                actor.process = None

    # -- the verdict -----------------------------------------------------------------------------------------

    def judge(self) -> list[Check]:
        stage, samples = self.stage, self.sampler.all
        sound = Check("every process lives until told to end", not self.failed, "; ".join(self.failed) or "it did")
        if len(samples) < 2:
            return [sound]
        violations = self.violations()
        starts = self.actors[0].starts
        claims = {name: samples[-1]["channels"][name]["files"].get("epochs", 0) for name in ("source", "target")}
        return [
            sound,
            Check("what a reader or a trainer holds is what its label says", not violations, "; ".join(violations[:5])),
            Check("nothing leased or pinned is deleted", not self.sampler.lost, "; ".join(self.sampler.lost[:5])),
            verdict.memory_is_flat(samples),
            verdict.files_stay_closed(samples),
            *verdict.objects_are_bounded(samples, stage),
            verdict.retention_was_on(samples),
            Check("one claim for each start of the trainer", claims["source"] <= starts, f"{claims}, {starts} starts"),
            *self.checks,
        ]

    def violations(self) -> list[str]:
        try:
            with open(self.stage.path("violations")) as file:
                return file.read().splitlines()
        except FileNotFoundError:
            return []

    def report(self) -> None:
        checks = self.judge()
        report = {
            "state": self.state,
            "ok": self.state == "done" and bool(self.checks) and all(check.ok for check in checks),
            "seconds": round(self.elapsed, 1),
            "asked": self.stage.seconds,
            "seed": self.seed,
            "checks": [check._asdict() for check in checks],
            "kills": {actor.part.name: actor.kills for actor in self.actors},
            "starts": {actor.part.name: actor.starts for actor in self.actors},
            "newest": {name: c["newest"] for name, c in self.sampler.all[-1]["channels"].items()}
            if self.sampler.all
            else {},
            "cores": round(self.cpu() / max(self.elapsed, 1.0), 3),
        }
        path = self.stage.path("report.json")
        with open(path + ".new", "w") as file:
            json.dump(report, file, indent=1)
        os.rename(path + ".new", path)
        if self.state != "running" and self.sampler.all:
            plot(self.sampler.all, self.stage.path("soak.png"))

    def cpu(self) -> float:
        """Seconds of everybody, as sampled last."""
        found: dict[tuple[str, int], float] = {}
        for sample in self.sampler.all:
            for name, weight in sample["processes"].items():
                if "cpu" in weight:
                    found[name, weight["life"]] = weight["cpu"]
        return sum(found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="a folder that is empty or does not exist")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    stop = threading.Event()
    for sig in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sig, lambda *_: stop.set())
    multiprocessing.set_forkserver_preload(PRELOADED)
    margin = 60.0 if given.seconds >= 600 else 1.0
    set_margin(margin)
    run = Run(Stage(os.path.abspath(given.folder), given.seconds, margin), given.seed, stop)
    passed = run.go()
    with open(run.stage.path("report.json")) as file:
        print(file.read())
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
