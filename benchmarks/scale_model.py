"""What cannot be run here: a trainer of 1,024 ranks, a model of 1T parameters, 10,000 engines in 10 clusters.

    python -m benchmarks.scale_model [answers] [validate] [--json]

Its parameters are what `python -m benchmarks` measured on this machine (results/latest.json, results/gpu-pause.json),
S3's published request limits and a NIC of 100 Gb/s. `validate` compares its prediction with real watchers, 1 to 20 of
them, on one store behind a link of limited rate. docs/scale.md says what follows, and what the model leaves out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import load
from benchmarks.scale_sim import GB, Machine, Outcome, Setup, cost, share, simulate
from ckptsync.channel import Channel
from ckptsync.manifest import TensorSpec
from ckptsync.store.base import Reader
from ckptsync.testing import MemoryStore
from ckptsync.testing.engines import FakeEngine
from ckptsync.version import VersionId
from tests.watcher.publish import TestPublisher
from watchers.health import Health
from watchers.watcher import Watcher

HERE = os.path.dirname(os.path.abspath(__file__))
RESULTS = os.path.join(HERE, "results")


def measured() -> Machine:
    """The machine of the last `python -m benchmarks`, and the H200 of the last run of `gpu_pause`."""
    found, gpu = _result("latest.json"), _result("gpu-pause.json")
    put, get = found["s3"]["put 252 MB to S3"], found["s3"]["get 252 MB from S3 into memory"]
    delta = next(
        row for row in found["delta"]["rows"]
        if (row["update"], row["encoding"]) == ("synthetic, 1.0%", "ckptsync-1, fast")
    )  # fmt: skip
    return Machine(
        put_cpu=min(row["cpu-s/GB"] for name, row in put.items() if name.startswith("ckptsync")),
        get_cpu=get["ckptsync"]["cpu-s/GB"] + 1 / found["delta"]["yardsticks"]["xxh3-128"],
        delta_ratio=delta["ratio"],
        encode=delta["encode_gb_s"] * GB,
        apply=delta["apply_gb_s"] * GB,
        load=gpu["bytes"] / statistics.median(gpu["pause_all"]),
    )


def _result(name: str) -> Any:
    with open(os.path.join(RESULTS, name), encoding="utf-8") as file:
        return json.load(file)


# -- answers ---------------------------------------------------------------------------------------------------

FLEETS: dict[str, tuple[int, ...]] = {
    "no mirror": (), "a mirror per cluster": (10,), "10 per cluster": (10, 10), "50 per cluster": (10, 50),
}  # fmt: skip


def scenarios() -> Iterator[tuple[str, Setup]]:
    for kind in ("full", "delta"):
        for name, mirrors in FLEETS.items():
            yield f"{kind}, {name}", Setup(kind=kind, mirrors=mirrors)  # type: ignore[arg-type]


def sweeps() -> dict[str, list[tuple[float, float, float]]]:
    """Setting -> (its value, p50, p99) around what is recommended: deltas, ten mirrors per cluster, a poll of 2 s."""
    base = Setup(kind="delta", mirrors=(10, 10), poll=2.0)
    changes = {
        "poll, s": [(x, replace(base, poll=x)) for x in (0.1, 0.3, 1, 3, 10, 30)],
        "poll, s, all engines on one store": [(x, replace(base, mirrors=(), poll=x)) for x in (0.1, 0.3, 1, 3, 10, 30)],
        "mirrors per cluster": [(x, replace(base, mirrors=(10, x))) for x in (1, 2, 5, 10, 20, 50, 100)],
        "writers": [(x, replace(base, writers=x)) for x in (1, 8, 32, 128, 1024)],
        "writers, full versions": [(x, replace(base, kind="full", writers=x)) for x in (1, 8, 32, 128, 1024)],
        "MiB of a get": [(x, replace(base, mirrors=(10,), part=x * 2**20)) for x in (1, 4, 16, 64)],
        "GiB of a shard": [(x, replace(base, kind="full", shard=x * 2**30)) for x in (0.25, 1, 4, 16)],
        "engines": [(x, replace(base, engines=x)) for x in (100, 1_000, 10_000, 100_000)],
    }
    machine = measured()
    return {
        name: [(x, (out := simulate(setup, machine)).at(0.5), out.at(0.99)) for x, setup in points]
        for name, points in changes.items()
    }


def answer(setup: Setup, out: Outcome) -> dict[str, Any]:
    slowest, seconds = max(out.busiest.items(), key=lambda item: item[1])
    return {
        "publish": out.publish, "p50": out.at(0.5), "p99": out.at(0.99), "read": out.read, "remote": out.remote,
        "puts": out.puts, "gets": out.gets, **{f"usd {what}": usd for what, usd in cost(out).items()},
        "limit": slowest, "shortest step": seconds, "keeps up": seconds <= setup.step,
    }  # fmt: skip


# -- against real watchers -------------------------------------------------------------------------------------

SPECS = [TensorSpec(f"layers.{at}.weight", "F32", (256, 256)) for at in range(4)]
"""1 MiB in four files."""


class Link(MemoryStore):
    """A store behind one link of `rate` bytes a second for all data together; records are free."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate, self._free, self._lock = rate, 0.0, threading.Lock()

    def open(self, path: str) -> Reader:
        reader = super().open(path)
        return _Limited(reader, self) if path.startswith("data/") else reader

    def take(self, nbytes: int, since: float) -> float:
        """Return when so many bytes that were asked for at `since` are over, and say when that is by the link: a thread
        that woke up late, on a busy machine, asks for the next ones as if it had not."""
        with self._lock:
            self._free = over = max(since, self._free) + nbytes / self.rate
        time.sleep(max(0.0, over - time.monotonic()))
        return over


class _Limited:
    """Reads in pieces, so that readers take turns."""

    PIECE = 16 << 10

    def __init__(self, inner: Reader, link: Link) -> None:
        self._inner, self._link, self.close = inner, link, inner.close

    @property
    def size(self) -> int:
        return self._inner.size

    def readinto(self, offset: int, buffer: memoryview) -> None:
        over = time.monotonic()
        for at in range(0, len(buffer), self.PIECE):
            part = buffer[at : at + self.PIECE]
            over = self._link.take(len(part), over)
            self._inner.readinto(offset + at, part)


def live_times(looks: Sequence[float], rate: float, poll: float) -> list[float]:
    """Seconds from a commit until each of as many real watchers serves the version. `looks`: when each polls."""
    watchers = len(looks)
    channel = Channel.create(Link(rate))
    publisher, stop = TestPublisher("", channel=channel), threading.Event()
    serving: list[list[float]] = [[] for _ in range(watchers)]
    everybody = threading.Barrier(watchers + 1)

    def run(number: int, folder: str) -> None:
        second = threading.Event()

        def changed(health: Health) -> None:
            if health.state == "serving" and health.version == VersionId(1, 2).label and not serving[number]:
                serving[number].append(time.monotonic())
                second.set()

        engine = FakeEngine({spec.name: spec for spec in SPECS})
        watcher = Watcher(channel.store, engine, stage=folder, reader=f"r{number}", poll=poll, on_change=changed)
        everybody.wait()
        stop.wait(looks[number])
        while not second.is_set():
            watcher.step()
            stop.wait(0 if second.is_set() else poll)
        watcher.close()

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        threads = [threading.Thread(target=run, args=(at, f"{folder}/{at}")) for at in range(watchers)]
        for thread in threads:
            thread.start()
        publisher.number = 2
        manifest = publisher.write(specs=SPECS, max_bytes=1 << 18)
        everybody.wait()
        time.sleep(poll)
        begun = time.monotonic()
        channel.commit(publisher.epoch, manifest)
        for thread in threads:
            thread.join()
    return sorted(times[0] - begun for times in serving)


def validate(rate: float = 2e6, poll: float = 1.0) -> list[dict[str, float]]:
    """Median and last engine, predicted and measured, for 1 to 20 watchers."""
    rows = []
    for count in (1, 2, 5, 10, 20):
        looks = [(at + 0.5) / count * poll for at in range(count)]
        found, nbytes = live_times(looks, rate, poll), float(sum(spec.nbytes for spec in SPECS))
        predicted = share(looks, nbytes, cap=rate, capacity=rate).finished
        rows.append({
            "watchers": count, "median": statistics.median(found), "predicted median": statistics.median(predicted),
            "last": found[-1], "predicted last": predicted[-1],
            "error": statistics.median(found) / statistics.median(predicted) - 1,
        })  # fmt: skip
    return rows


# -- reports ---------------------------------------------------------------------------------------------------


def draw(report: dict[str, Any], path: str) -> None:
    from matplotlib import pyplot

    curves = report["sweeps"]
    figure, grid = pyplot.subplots(3, 3, figsize=(11, 8))
    for plot, (name, points) in zip(grid.flat, curves.items(), strict=False):
        xs, p50, p99 = zip(*points, strict=True)
        plot.plot(xs, p50, marker=".", label="p50")
        plot.plot(xs, p99, marker=".", label="p99")
        plot.set(xscale="log", ylim=(0, 1.1 * max(p99)), xlabel=name, ylabel="publish to live, s")
        plot.grid(alpha=0.3)
    plot, rows = grid.flat[len(curves)], report.get("validation") or []
    xs = [row["watchers"] for row in rows]
    plot.plot(xs, [row["median"] for row in rows], "o", label="measured median")
    plot.plot(xs, [row["predicted median"] for row in rows], label="predicted")
    plot.plot(xs, [row["last"] for row in rows], "s", label="measured last")
    plot.plot(xs, [row["predicted last"] for row in rows], label="predicted")
    plot.set(xlabel="real watchers on one link", ylabel="publish to live, s")
    plot.legend(fontsize=7)
    grid.flat[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=70)


def show(report: dict[str, Any]) -> None:
    table = Table("fleet", "publish", "p50", "p99", "read", "requests", "USD requests", "USD transfer", "limit")
    for name, row in report["answers"].items():
        limit = f"{row['limit']}, {row['shortest step']:,.0f} s" + ("" if row["keeps up"] else " (behind)")
        table.add_row(
            name, f"{row['publish']:,.1f} s", f"{row['p50']:,.0f} s", f"{row['p99']:,.0f} s",
            f"{row['read'] / 1e12:,.0f} TB", f"{row['puts'] + row['gets']:,.0f}", f"{row['usd requests']:,.2f}",
            f"{row['usd transfer']:,.2f}", limit,
        )  # fmt: skip
    Console(width=150).print(table)
    for row in report["validation"]:
        print(
            f"{row['watchers']} watchers: median {row['median']:.2f} s, predicted {row['predicted median']:.2f} s "
            f"({row['error']:+.0%}); last {row['last']:.2f} s, predicted {row['predicted last']:.2f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[[], "answers", "validate"], default=[])
    parser.add_argument("--plot", default=os.path.join(HERE, "..", "docs", "scale.png"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    what = options.what or ["answers", "validate"]
    machine, answers = measured(), {}
    if "answers" in what:
        answers = {name: answer(setup, simulate(setup, machine)) for name, setup in scenarios()}
    report = {
        "answers": answers,
        "sweeps": sweeps() if answers else {},
        "validation": validate() if "validate" in what else [],
        "load": load(),
    }
    if answers and report["validation"]:
        draw(report, options.plot)
    if options.json:
        json.dump(report, sys.stdout)
    else:
        show(report)


if __name__ == "__main__":
    main()
