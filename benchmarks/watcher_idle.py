"""What a watcher costs while nothing happens, and how soon it finds a version.

    python -m benchmarks.watcher_idle [--versions 1000] [--seconds 20] [--publishes 20]

Idle: CPU time of the whole process over the wall time of a loop with a 1 s poll, over `--versions` kept
versions on a local folder. Latency: from the begin of the commit in another process to the watcher's
`staging` state, with inotify and without (there in polls of 1 s).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Connection

from benchmarks.common import load
from ckptsync.testing.engines import FakeEngine
from tests.watcher.publish import SCHEMA, TestPublisher
from watchers.health import Health
from watchers.watcher import Watcher

POLL = 1.0


def publish(root: str, versions: int, pipe: Connection) -> None:
    """Publish `versions` at once, then one for each message, answering with the clock after its commit."""
    publisher = TestPublisher(root)
    for _ in range(versions):
        publisher.publish()
    pipe.send(0.0)
    while pipe.recv():
        manifest = publisher.write()
        started = time.monotonic()
        publisher.channel.commit(publisher.epoch, manifest)
        pipe.send(started)


def latencies(root: str, stage: str, pipe: Connection, *, events: bool, count: int) -> list[float]:
    """Seconds from the begin of the commit to `staging`."""
    found, stop, seen = threading.Event(), threading.Event(), []

    def changed(health: Health) -> None:
        if health.state == "staging":
            seen.append(time.monotonic())
        if health.state == "serving":
            found.set()

    watcher = Watcher(root, FakeEngine(SCHEMA), stage=stage, poll=POLL, events=events, on_change=changed)
    thread = threading.Thread(target=watcher.run, args=(stop,))
    thread.start()
    found.wait()
    results = []
    for number in range(count):
        time.sleep(0.1 + 0.07 * (number % 10))  # at any moment of the poll
        found.clear()
        seen.clear()
        pipe.send(True)
        started = pipe.recv()
        found.wait()
        results.append(seen[0] - started)
    stop.set()
    thread.join()
    watcher.close()
    return results


def idle(root: str, stage: str, seconds: float) -> float:
    """Share of one core."""
    watcher, stop = Watcher(root, FakeEngine(SCHEMA), stage=stage, poll=POLL), threading.Event()
    watcher.step()
    threading.Timer(seconds, stop.set).start()
    wall, cpu = time.monotonic(), time.process_time()
    watcher.run(stop)
    share = (time.process_time() - cpu) / (time.monotonic() - wall)
    watcher.close()
    return share


def run(versions: int, seconds: float, publishes: int) -> dict[str, float]:
    """Share of a core while idle, and for `inotify` and `polling` the median and the longest seconds to find one."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        root, ours, theirs = f"{folder}/root", *multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=publish, args=(root, versions, theirs))
        process.start()
        ours.recv()
        found["idle"] = idle(root, f"{folder}/idle", seconds)
        for name, events in (("inotify", True), ("polling", False)):
            times = latencies(root, f"{folder}/{name}", ours, events=events, count=publishes)
            found[name], found[f"{name}_worst"] = statistics.median(times), max(times)
        ours.send(False)
        process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--publishes", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = run(options.versions, options.seconds, options.publishes)
    if options.json:
        json.dump({**found, "load": load()}, sys.stdout)
        return
    print(f"idle, poll of {POLL:.0f} s over {options.versions} versions: {found['idle']:.2%} of a core")
    for name in ("inotify", "polling"):
        worst = found[f"{name}_worst"]
        print(f"{name}: found {found[name] * 1e3:.0f} ms after the commit began, {worst * 1e3:.0f} ms at worst")


if __name__ == "__main__":
    main()
