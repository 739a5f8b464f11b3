"""What each process does until it is killed, or told to end with SIGTERM."""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator

import torch

from ckptsync import DeltaPolicy, collector_claim, logs, resume
from ckptsync.channel import Channel
from ckptsync.collect import Collector
from ckptsync.delta import whole
from ckptsync.errors import BadShard, CkptSyncError, Conflict, NotFound
from ckptsync.holds import check_not_collected
from ckptsync.mirror import Mirror
from ckptsync.publish import Publisher
from ckptsync.store import clock
from ckptsync.verify import verified_chunks
from ckptsync.version import VersionId, parse_label
from watchers import stage as stages
from watchers.engines.module import ModuleEngine
from watchers.health import Receipt
from watchers.watcher import Watcher

from .cast import Part, Stage
from .weights import Net

LEASE_SECONDS = 20.0

log = logging.getLogger("ckptsync.soak")


def play(part: Part, stage: Stage, rewind: int) -> None:
    """The process's whole life. What it raises ends it, which the run takes for a failure."""
    threading.Thread(target=die_with_the_run, daemon=True).start()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    set_margin(stage.margin)
    say_to(stage.path("logs", f"{part.name}.log"))
    if part.kind == "publisher":
        publish(stage, stop, rewind)
    elif part.kind == "watcher":
        watch(part, stage, stop)
    elif part.kind == "mirror":
        mirror = Mirror(stage.source, stage.target, retention=stage.mirror_retention)
        mirror.follow(stop, poll=1.0)
    elif part.kind == "collector":
        collect(stage, stop)
    else:
        hold(part, stage, stop)


def die_with_the_run() -> None:
    """Else what a killed run leaves would publish for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


def set_margin(seconds: float) -> None:
    """All of this runs on one machine, so a short run need not allow for two clocks."""
    clock.MARGIN = seconds
    collector_claim.SECONDS = max(2.0 * seconds, 5.0)
    for name in ("ckptsync.keeper", "ckptsync.sweep"):
        sys.modules[name].MARGIN = seconds  # type: ignore[attr-defined]


def say_to(path: str) -> None:
    handler = logging.FileHandler(path)
    handler.setFormatter(logs.JsonFormatter())
    logging.getLogger("ckptsync").addHandler(handler)
    logging.getLogger("watchers").addHandler(handler)


def publish(stage: Stage, stop: threading.Event, rewind: int) -> None:
    """Resume from the newest version, or from one `rewind` before it, and go on at one version a second."""
    net, channel = Net(), Channel.open(stage.source)
    versions = channel.versions() if rewind else []
    came_from = versions[-1 - rewind].label if len(versions) > rewind else "latest"
    try:
        point = resume(stage.source, net, came_from, allow_empty=True)
    except NotFound:  # collected, since it was that old
        point = resume(stage.source, net, allow_empty=True)
    if point is not None and not (net.is_whole() and net.step == point.step):
        complain(stage, f"the trainer resumed from {point.version} and got a mix, or step {net.step}")
    publisher = Publisher(
        stage.source,
        resumed_from=point.version if point is not None else None,
        retention=stage.retention,
        delta=DeltaPolicy(anchor_every=5, skip=(3,)),
        sweep_after=30.0,
    )
    with publisher:
        step, due = net.step, time.monotonic()
        while not stop.wait(max(0.0, due - time.monotonic())):
            step, due = step + 1, due + 1.0
            net.train_to(step)
            publisher.publish(net, step=step)
            due = max(due, time.monotonic())


def watch(part: Part, stage: Stage, stop: threading.Event) -> None:
    net, channel = Net(), Channel.open(part.root)
    options = part.options

    def look(receipt: Receipt) -> None:
        """Does the engine hold what its label says, all of it?"""
        version = parse_label(receipt.label)
        if receipt.state != "serving" or version is None:
            return
        with contextlib.suppress(NotFound):  # collected since: then its step is not to be had
            if not net.is_whole() or net.step != channel.manifest(version).step:
                complain(stage, f"{part.name} serves {receipt.label}, and holds step {net.step} or a mix")

    watcher = Watcher(
        part.root, ModuleEngine(net), follow=str(options["follow"]), reader=part.name, proof=3, on_receipt=look,
        stage=stages.Stage(stage.path("stages", str(options["host"]))), poll=float(str(options["poll"])),
        events=bool(options["events"]),
    )  # fmt: skip
    with contextlib.closing(watcher):
        watcher.run(stop)


def collect(stage: Stage, stop: threading.Event) -> None:
    """Somebody's cron job, beside the publisher's own retention."""
    collector = Collector(Channel.open(stage.source), stage.retention)
    while not stop.wait(7.0):
        with contextlib.suppress(Conflict):
            collector.collect()


def hold(part: Part, stage: Stage, stop: threading.Event) -> None:
    """Lease a version, say so, and find it whole just before it is given back."""
    channel, luck = Channel.open(part.root), random.Random()
    with contextlib.suppress(FileNotFoundError):  # of the one before, whose lease ours is about to replace
        os.unlink(stage.path("promises", f"{part.name}.json"))
    while not stop.wait(luck.uniform(1.0, 3.0)):
        versions = channel.committed()
        if not versions:
            continue
        version = luck.choice(versions)
        began = time.time()
        channel.lease(part.name, version, LEASE_SECONDS)
        try:
            check_not_collected(channel, version)
        except NotFound:
            channel.release(part.name)
            continue
        with promise(part, stage, version, began + LEASE_SECONDS):
            stop.wait(luck.uniform(0.0, LEASE_SECONDS / 2))
            if problems := damage(Channel.open(part.root), version):
                complain(stage, f"{part.name} holds a lease on {version}, which is not whole: {problems[0]}")
        channel.release(part.name)


def damage(channel: Channel, version: VersionId) -> list[str]:
    """As `verify_version`, without a second lease: a collector that had begun before ours was there may have noted the
    version by now. It takes the note back, yet until then who comes new is turned away."""
    found = []
    with whole(channel, channel.manifest(version)) as (store, full):
        for name, file in full.files():
            reader = store.open(f"{full.folder}/{name}")
            try:
                for _ in verified_chunks(reader, file, full.digest, name):
                    pass
            except BadShard as error:
                found.append(str(error))
            finally:
                reader.close()
    return found


@contextlib.contextmanager
def promise(part: Part, stage: Stage, version: VersionId, until: float) -> Iterator[None]:
    """The lease was in time, so until then (time.time) nobody may collect the version, dead or alive."""
    path = stage.path("promises", f"{part.name}.json")
    with open(path + ".new", "w") as file:
        json.dump({"root": part.root, "version": version.label, "until": until}, file)
    os.rename(path + ".new", path)
    try:
        yield
    except CkptSyncError as error:
        complain(stage, f"{part.name} holds a lease on {version}: {error}")
    os.unlink(path)


def complain(stage: Stage, what: str) -> None:
    log.error(what)
    with open(stage.path("violations"), "a") as file:
        file.write(what + "\n")
