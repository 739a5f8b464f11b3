"""How the cost of publish, poll, list, resume, gc and status grows with versions, tensors, shards, readers and tracks.

    python -m benchmarks growth [--most 100000] [--json]
    python -m benchmarks.growth [versions] [tensors] [shards] [readers] [tracks]

In requests of an object store (pages of a listing, gets, puts, deletes) and bytes, which are exact, and in CPU seconds
of this process, the least of a few runs. Everything is in memory: what a store takes for a request is its own affair.

The exponent of a curve is its slope between the two largest sizes on logarithmic axes: 0 is constant, 1 linear,
2 quadratic. Of CPU time it is reported only where there is some (5 ms), and one above 1.5 is a failure.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import load
from benchmarks.growth_channels import Shelves, channel_with
from ckptsync import Publisher, resume
from ckptsync.channel import Channel
from ckptsync.collect import Collector
from ckptsync.retention import Retention
from ckptsync.status import Observer
from ckptsync.testing import CountingStore
from watchers.stage import Stage

HERE = os.path.dirname(os.path.abspath(__file__))

TITLES = {"requests": "requests", "nbytes": "bytes", "cpu": "CPU seconds"}
QUADRATIC = 1.5
"""An exponent above this is no longer linear. Of CPU, n log n and caches that are too small come to 1.1 to 1.3."""

ENOUGH_CPU = 0.005

SIZES: Mapping[str, tuple[int, ...]] = {
    "versions": (10, 100, 1_000, 10_000, 100_000),
    "tensors": (10, 100, 1_000, 20_000, 200_000),
    "shards": (1, 10, 100, 1_000),
    "readers": (1, 10, 100, 1_000),
    "tracks": (1, 10, 100, 1_000),
}

Action = tuple[str, Callable[[], object]]
Case = tuple[CountingStore, Iterable[Action]]
Tracks = Mapping[str, Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one action at one size."""

    axis: str
    size: int
    action: str
    requests: int
    nbytes: int
    cpu: float


@dataclass(frozen=True, slots=True)
class Growth:
    """Exponents of one action along one axis; None where there is too little to tell."""

    axis: str
    action: str
    requests: float | None
    nbytes: float | None
    cpu: float | None

    @property
    def worst(self) -> float:
        return max(each or 0.0 for each in (self.requests, self.nbytes, self.cpu))


def measured(store: CountingStore, act: Callable[[], object], seconds: float = 0.3) -> tuple[int, int, float]:
    """Requests and bytes of one call, and the least CPU of up to five, as long as they are short."""
    before, begin, least = replace(store.counts), time.process_time(), math.inf
    for number in range(5):
        started = time.process_time()
        act()
        least = min(least, time.process_time() - started)
        if number == 0:
            counts = store.counts - before
        if time.process_time() - begin > seconds:
            break
    return counts.requests, counts.read + counts.written, least


# -- what is done ----------------------------------------------------------------------------------------------


def reading(store: CountingStore) -> Iterator[Action]:
    """What watchers and people do again and again."""
    channel = Channel.open(store)
    channel.poll()
    yield "ten polls, no news", lambda: [channel.poll() for _ in range(10)]
    yield "poll, news", lambda: Channel.open(store).poll()
    yield "list", channel.versions
    yield "health", lambda: channel.lag(channel.newest)
    observer = Observer(channel)
    observer.look()
    yield "status, again", observer.look


def collecting(store: CountingStore) -> Iterator[Action]:
    policy = Retention(keep_last=2, keep_every=1)
    yield "gc, first", lambda: Collector(Channel.open(store), policy).collect()
    keeper = Collector(Channel.open(store), policy)
    keeper.collect()
    yield "gc, again", keeper.collect


def training(store: CountingStore, tracks: Tracks, **how: Any) -> Iterator[Action]:
    """With a fresh epoch, which may look at everything once."""
    with closing(Publisher(store, **how)) as publisher:
        publisher.publish(tracks=tracks)
        yield "publish", lambda: publisher.publish(tracks=tracks)
    if list(tracks) == ["model"]:
        model = {name: torch.empty_like(tensor) for name, tensor in tracks["model"].items()}
        yield "resume", lambda: resume(store, model)
    yield "stage", lambda: staged(store)


def staged(store: CountingStore) -> None:
    channel = Channel.open(store)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, closing(Stage(folder)) as stage:
        version = stage.stage(channel, channel.latest())
        stage.find(version.manifest)


# -- along which axis ------------------------------------------------------------------------------------------


def state(tensors: int) -> dict[str, torch.Tensor]:
    return {f"layers.{at}.weight": torch.zeros(16, dtype=torch.uint8) for at in range(tensors)}


def versions(size: int) -> Iterator[Case]:
    store = CountingStore(channel_with(size))
    yield store, [*reading(store), *collecting(store)]
    yield store, training(store, {"model": state(1)})


def tensors(size: int) -> Iterator[Case]:
    store = CountingStore(Shelves())
    yield store, training(store, {"model": state(size)})
    yield store, [*reading(store), *collecting(store)]


def shards(size: int) -> Iterator[Case]:
    """So many tensors, each in a file of its own; and a file takes a few requests whatever is in it."""
    store = CountingStore(Shelves())
    yield store, training(store, {"model": state(size)}, shard_bytes=1)
    yield store, [*reading(store), *collecting(store)]


def tracks(size: int) -> Iterator[Case]:
    store = CountingStore(Shelves())
    yield store, training(store, {"model" if size == 1 else f"model{at}": state(1) for at in range(size)})
    yield store, [*reading(store), *collecting(store)]


def readers(size: int) -> Iterator[Case]:
    """Each says what it serves, and is one poll of one more."""
    store = CountingStore(channel_with(100))
    channels = [Channel.open(store) for _ in range(size)]
    for at, channel in enumerate(channels):
        channel.poll()
        channel.write_receipt(f"reader-{at}", {"label": "e1-v98", "follow": "latest", "seen": time.time()})
    yield store, [("poll of them all", lambda: [channel.poll() for channel in channels])]
    yield store, [*reading(store), *collecting(store)]
    yield store, training(store, {"model": state(1)}, max_lag=1_000)


AXES: Mapping[str, Callable[[int], Iterator[Case]]] = {
    "versions": versions, "tensors": tensors, "shards": shards, "readers": readers, "tracks": tracks,
}  # fmt: skip


def costs(axis: str, most: int) -> Iterator[Cost]:
    for size in SIZES[axis]:
        if size <= most:
            for store, actions in AXES[axis](size):
                for action, act in actions:
                    requests, nbytes, cpu = measured(store, act)
                    yield Cost(axis, size, action, requests, nbytes, round(cpu, 6))


# -- what that says --------------------------------------------------------------------------------------------


def growths(found: Sequence[Cost]) -> list[Growth]:
    curves: dict[tuple[str, str], list[Cost]] = {}
    for cost in found:
        curves.setdefault((cost.axis, cost.action), []).append(cost)
    return [
        Growth(
            axis, action,
            exponent([(cost.size, cost.requests) for cost in curve], 0),
            exponent([(cost.size, cost.nbytes) for cost in curve], 0),
            exponent([(cost.size, cost.cpu) for cost in curve], ENOUGH_CPU),
        )
        for (axis, action), curve in curves.items()
    ]  # fmt: skip


def exponent(curve: Sequence[tuple[int, float]], least: float) -> float | None:
    """Slope between the two largest sizes, on logarithmic axes; None if the cost is not above `least`."""
    if len(curve) < 2 or curve[-1][1] <= least or curve[-2][1] <= 0:
        return None
    (size, cost), (larger, more) = curve[-2:]
    return round(math.log(more / cost) / math.log(larger / size), 2)


def draw(found: Sequence[Cost], path: str) -> None:
    """One row for each axis: requests, bytes and CPU seconds. An action has one colour everywhere; the broken line is
    linear."""
    from matplotlib import colormaps, pyplot

    axes, actions = (list(dict.fromkeys(values)) for values in zip(*((c.axis, c.action) for c in found), strict=True))
    colours = dict(zip(actions, colormaps["tab20"].colors, strict=False))  # type: ignore[attr-defined]
    figure, grid = pyplot.subplots(len(axes), 3, figsize=(11, 2.6 * len(axes)), squeeze=False)
    for axis, row in zip(axes, grid, strict=True):
        costs = [cost for cost in found if cost.axis == axis]
        for plot, (what, title) in zip(row, TITLES.items(), strict=True):
            for action in dict.fromkeys(cost.action for cost in costs):
                curve = [(c.size, getattr(c, what)) for c in costs if c.action == action]
                plot.plot(*zip(*curve, strict=True), marker=".", label=action, color=colours[action])
            sizes = [min(c.size for c in costs), max(c.size for c in costs)]
            least = min((getattr(c, what) for c in costs if c.size == sizes[0] and getattr(c, what)), default=1)
            plot.plot(sizes, [least, least * sizes[1] / sizes[0]], "--", color="grey", linewidth=0.8, label="linear")
            plot.set(xscale="log", yscale="log", xlabel=axis)  # what costs nothing has no point
            plot.set_title(title, fontsize=9)
            plot.grid(alpha=0.3)
        row[2].legend(fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=70)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("axes", nargs="*", choices=[[], *SIZES], default=[])
    parser.add_argument("--most", type=int, default=200_000, help="the largest size")
    parser.add_argument("--plot", default=os.path.join(HERE, "..", "docs", "growth.png"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    axes = options.axes or list(SIZES)
    logging.getLogger("ckptsync").setLevel(logging.ERROR)  # each version has the weights of the one before
    found = [cost for axis in axes for cost in costs(axis, options.most)]
    grown = growths(found)
    report = {"costs": [asdict(cost) for cost in found], "growth": [asdict(each) for each in grown], "load": load()}
    if axes == list(SIZES):
        draw(found, options.plot)
    if options.json:
        json.dump(report, sys.stdout)
    else:
        show(found, grown)
    if worst := [f"{each.action} by {each.axis}" for each in grown if each.worst > QUADRATIC]:
        sys.exit(f"not linear: {', '.join(worst)}")


def show(found: Sequence[Cost], grown: Sequence[Growth]) -> None:
    table = Table("by", "action", "at most", "requests", "^", "bytes", "^", "CPU ms", "^")
    last = {(cost.axis, cost.action): cost for cost in found}
    for each in grown:
        cost = last[each.axis, each.action]
        exponents = ["" if e is None else f"{e:.2f}" for e in (each.requests, each.nbytes, each.cpu)]
        values = [f"{cost.requests:,}", f"{cost.nbytes:,}", f"{cost.cpu * 1e3:,.1f}"]
        row = [cell for pair in zip(values, exponents, strict=True) for cell in pair]
        table.add_row(each.axis, each.action, f"{cost.size:,}", *row)
    Console().print(table)


if __name__ == "__main__":
    main()
