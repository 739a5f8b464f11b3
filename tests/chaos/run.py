"""One run, from an empty folder to a report: faults, what is left when they are over, and what it sounds like."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

from ckptsync.channel import Channel
from ckptsync.export.source import CheckpointSource
from ckptsync.publish import Publisher
from ckptsync.store import open_store
from tests.waiting import until, within

from . import collect
from .faults import actors, check, play
from .record import Fault, Report
from .schedule import draw
from .targets import targets_of
from .witness import Witness
from .world import BASE, World

START_SECONDS, END_SECONDS, VOICE_SECONDS = 900, 600, 300
EVERY = {"module": 0.3, "sglang": 1.0}
"""Seconds between two questions to an engine. A real one has two cores with everybody else here."""


class Stopwatch:
    """`took`: phase -> seconds."""

    def __init__(self) -> None:
        self.took: dict[str, float] = {}
        self._since = time.monotonic()

    def lap(self, phase: str) -> None:
        """It is over."""
        now = time.monotonic()
        self.took[phase], self._since = round(now - self._since, 1), now


def run(folder: str, seed: int, seconds: float, engine: str, schedule: Sequence[Fault] | None = None) -> Report:
    """In `folder`, which is empty. The schedule is drawn from the seed if none is given. A real engine takes so long to
    start that the faults do not wait for it; what it says is understood afterwards, like what the others say."""
    watch = Stopwatch()
    with ExitStack() as stack:
        world = World(folder, seed, engine, stack)
        targets = targets_of(world)
        report = Report(
            seed=seed, seconds=seconds, engine=engine, links=(world.net.slowness or ("none",))[0],
            replicas=[replica.name for replica in world.replicas], base=BASE, took=watch.took,
            schedule=list(draw(seed, seconds, actors(targets)) if schedule is None else schedule),
        )  # fmt: skip
        check(report.schedule, targets)
        world.start()
        watch.lap("hosts")
        until(lambda: is_under_way(world), START_SECONDS, "the trainer publishes, and embedded engines load")
        watch.lap("first versions")
        began = time.time()
        with ExitStack() as witnesses, collect.Listing(world) as listing:
            looking = [witnesses.enter_context(Witness(r, began, EVERY[r.engine])) for r in world.replicas]
            report.happened = play(report.schedule, targets, began)
            time.sleep(max(0.0, began + seconds - time.time()))
            watch.lap("faults")
            report.replaced = world.trainer.finish(END_SECONDS)
            watch.lap("last publish")
            settle(world)
            watch.lap("settling")
        report.answers = sorted((a for witness in looking for a in witness.answers), key=lambda answer: answer.at)
        collect.into(report, world, began, listing.seen)
        watch.lap("looking")
        learn_voices(world)
        collect.understand(report, world.replicas)
        watch.lap("voices")
        return report


def is_under_way(world: World) -> bool:
    """Every embedded engine serves a version."""
    return all((said := replica.answer()) and said.label for replica in world.replicas if replica.engine == "module")


def learn_voices(world: World) -> None:
    """In peace, when all is over: what each model sounds like on each engine that still goes with its channel."""
    there = list(world.replicas)
    with Publisher(open_store(world.root, options=world.server.options)) as publisher:
        for name, folder in world.models.items():
            label = publisher.publish(CheckpointSource(folder), metadata={"model": name}, assets=folder).version.label
            there = [replica for replica in there if replica.learn(name, label, VOICE_SECONDS)]


def settle(world: World) -> None:
    """Until every engine serves the newest version, or for as long as that may take: then everybody's last words."""
    newest = Channel.open(open_store(world.root, options=world.server.options)).latest().id.label
    deadline = time.monotonic() + END_SECONDS
    for replica in world.replicas:
        within(max(1.0, deadline - time.monotonic()), lambda replica=replica: replica.serves(newest))  # type: ignore[misc]
    if time.monotonic() > deadline:
        print(*(process.last_words() for process in world.processes), sep="\n", file=sys.stderr)
