"""What `scale_model` computes with: one shared link, and one version's way from the trainer to every engine.

Plain arithmetic and one event loop; no clock, no threads. Rates are bytes per second, times seconds, sizes bytes.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

GB = 1e9


class Shared(NamedTuple):
    """What came of transfers over one link."""

    finished: list[float]
    """When each was done, in the order of the arrivals."""

    moved: float
    """Bytes that went over the link, added up while they went."""


def share(arrivals: Sequence[float], nbytes: float, *, cap: float, capacity: float) -> Shared:
    """Transfers of `nbytes` each begin at `arrivals` (ascending) over a link of `capacity`; none is faster than `cap`.

    The link is shared evenly (processor sharing), as fair queues and TCP about do. Equal transfers end in the order in
    which they began, so one number says all of their progress: the bytes that a transfer has had that is active
    throughout (virtual time).
    """
    finished: list[float] = []
    targets: deque[float] = deque()
    now = progress = moved = 0.0
    at = 0
    while at < len(arrivals) or targets:
        rate = min(cap, capacity / len(targets)) if targets else 0.0
        ends = now + (targets[0] - progress) / rate if targets else math.inf
        begins = arrivals[at] if at < len(arrivals) else math.inf
        if begins <= ends:
            progress += rate * (begins - now) if targets else 0.0
            moved += len(targets) * rate * (begins - now) if targets else 0.0
            now, at = begins, at + 1
            targets.append(progress + nbytes)
        else:
            moved += len(targets) * (targets[0] - progress)
            now, progress = ends, targets.popleft()
            finished.append(now)
    return Shared(finished, moved)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was measured here, and what a data sheet says; see `scale_model.measured` for where each is from."""

    put_cpu: float = 1.32
    """CPU seconds per GB that is written to S3."""

    get_cpu: float = 0.65
    """The same read and verified."""

    cores: int = 4
    """Cores that one process's transfers keep busy: as many threads as the stage and the uploads have."""

    delta_ratio: float = 157.0
    encode: float = 2.1 * GB
    """Of one core, in bytes of the full version; so is `apply`."""

    apply: float = 8.3 * GB
    load: float = 51 * GB
    """Host memory to one GPU, with the engine paused."""

    latency: float = 0.03
    """Of one small request: an assumption, S3 is known for 10 to 100 ms."""

    nic: float = 12.5 * GB
    get_limit: float = 5_500
    put_limit: float = 3_500
    """Requests per second and prefix: https://docs.aws.amazon.com/AmazonS3/latest/dev/request-rate-perf-considerations.html"""

    @property
    def writes(self) -> float:
        """Of one process."""
        return min(self.nic, self.cores * GB / self.put_cpu)

    @property
    def reads(self) -> float:
        return min(self.nic, self.cores * GB / self.get_cpu)

    @property
    def mirrors(self) -> float:
        """One process reads, verifies and writes, a file for each core at a time."""
        return min(self.nic, self.cores * GB / (self.put_cpu + self.get_cpu))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One fleet and its settings. Engines are hosts of 8 GPUs that hold a whole model between them."""

    nbytes: float = 2e12
    kind: Literal["full", "delta"] = "full"
    ranks: int = 1024
    writers: int = 1024
    engines: int = 10_000
    clusters: int = 10
    mirrors: tuple[int, ...] = ()
    """How many stores each store is copied to, level by level; () if all engines read the trainer's bucket."""

    poll: float = 1.0
    part: float = 16 << 20
    """Bytes of one put or get."""

    shard: float = 4 << 30
    step: float = 600.0
    """Seconds between two publishes."""

    gpus: int = 8


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Of one version. `live`: publish to live for each engine, ascending."""

    live: list[float]
    publish: float
    arrived: float
    """When the last store had it."""

    puts: float = 0.0
    gets: float = 0.0
    read: float = 0.0
    """Bytes that readers took, mirrors and engines together."""

    remote: float = 0.0
    """Of these, between regions."""

    busiest: dict[str, float] = field(default_factory=dict)
    """Resource -> seconds that it is busy with one version: the step may not be shorter."""

    def at(self, share_of_all: float) -> float:
        return self.live[min(len(self.live) - 1, int(share_of_all * len(self.live)))]


def simulate(setup: Setup, machine: Machine, seed: int = 0) -> Outcome:
    """One version, from the begin of `publish` until each engine computes with it."""
    rng = random.Random(seed)
    size = setup.nbytes / (machine.delta_ratio if setup.kind == "delta" else 1.0)
    publish = publishing(setup, machine, size)
    out = Outcome(live=[], publish=publish, arrived=0.0, puts=requests(size, setup, size / setup.shard * 2 + 10))
    out.busiest["publish"] = publish
    stores, gets_at_once = [publish], machine.get_limit * setup.part
    for level, fan in enumerate(setup.mirrors):
        below: list[float] = []
        for ready in stores:
            begins = sorted(ready + poll_of(setup, machine, fan, rng) for _ in range(fan))
            copied = share(begins, size, cap=machine.mirrors, capacity=gets_at_once)
            below += copied.finished
            out.read += copied.moved
            out.remote += copied.moved * (1 - 1 / setup.clusters) if level == 0 else 0.0
        out.puts += requests(size, setup, size / setup.shard * 2 + 10) * len(below)
        out.gets += requests(size, setup, 10) * len(below)
        stores = below
    out.busiest |= {"a mirror": size / machine.mirrors} if setup.mirrors else {}
    out.arrived = max(stores)
    each = math.ceil(setup.engines / len(stores))
    applied = setup.nbytes / (machine.apply * machine.cores) if setup.kind == "delta" else 0.0
    loaded = setup.nbytes / (machine.load * setup.gpus)
    for number, ready in enumerate(stores):
        count = min(each, setup.engines - number * each)
        begins = sorted(ready + poll_of(setup, machine, count, rng) for _ in range(max(0, count)))
        staged = share(begins, size, cap=machine.reads, capacity=gets_at_once)
        out.live += [at + applied + loaded for at in staged.finished]
        out.read += staged.moved
    out.live.sort()
    out.remote += 0.0 if setup.mirrors else out.read * (1 - 1 / setup.clusters)
    out.gets += requests(size, setup, 10) * setup.engines + setup.engines * setup.step / polls_every(
        setup, machine, each
    )
    out.busiest |= {
        "gets of one store": each * size / gets_at_once,
        "an engine": size / machine.reads + applied + loaded,
    }
    return out


def publishing(setup: Setup, machine: Machine, size: float) -> float:
    """Seconds: comparing with the version before; then the slowest of writers, NICs (eight
    ranks share one) and puts; then the ten small requests of a commit, one after the other."""
    nodes = math.ceil(setup.writers / 8)
    writing = size / min(setup.writers * machine.writes, nodes * machine.nic, machine.put_limit * setup.part)
    encoding = setup.nbytes / (setup.writers * machine.encode) if setup.kind == "delta" else 0.0
    return encoding + writing + 10 * machine.latency


def polls_every(setup: Setup, machine: Machine, readers: float) -> float:
    """Seconds between a reader's polls: all of a store's readers get the one head.json, which one prefix answers."""
    return max(setup.poll, readers / machine.get_limit)


def poll_of(setup: Setup, machine: Machine, readers: float, rng: random.Random) -> float:
    """Seconds until one reader looks: at any moment of its poll, and then the head, the listings and the manifest."""
    return rng.uniform(0.0, polls_every(setup, machine, readers)) + 5 * machine.latency


def requests(size: float, setup: Setup, more: float) -> float:
    return math.ceil(size / setup.part) + more


class Prices(NamedTuple):
    """USD, S3 Standard in us-east-1 as listed in 2025 (https://aws.amazon.com/s3/pricing/): per request, and per byte
    from one region to another. Storage and NAT gateways are not in it."""

    put: float = 0.005 / 1_000
    get: float = 0.0004 / 1_000
    remote: float = 0.02 / GB


def cost(out: Outcome, prices: Prices = Prices()) -> dict[str, float]:  # noqa: B008 - it is a constant
    """USD of one version."""
    return {
        "requests": out.puts * prices.put + out.gets * prices.get,
        "transfer": out.remote * prices.remote,
    }
