"""What a run costs in bytes: versions published under a DeltaPolicy, full ones and skip deltas included.

    python -m benchmarks.delta_chain [--elements 4000000] [--versions 400] [--anchor-every 256] [--max-chain 1]
        [--skip 32] [--lr 1e-6] [--json]

One tensor of bf16 from fp32 masters, stepped by Adam (0.9, 0.999) over gradients that are noise around a fixed
direction of a tenth of its size, past the warm-up. Real gradients agree more or less over time than these; what a skip
delta saves depends on that. At 1e-6 about 1 % of the elements change in a step. Through Publisher and a local folder;
every version is published as a trainer would. All figures but counts are in percent of a full version.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence

import torch

from benchmarks.common import load
from ckptsync import Channel, DeltaPolicy, Publisher
from ckptsync.delta.plan import Chain, cheapest
from ckptsync.manifest import Manifest
from ckptsync.version import VersionId

WARM_UP = 30
BEHIND = 32
WINDOW = 128


class Adam:
    def __init__(self, elements: int, rate: float) -> None:
        torch.manual_seed(0)
        self.master = torch.randn(elements) * 0.02
        self.direction = torch.randn(elements) * 0.1
        self.state = {"layers.0.weight": self.master}
        self._optimizer = torch.optim.AdamW([self.master], lr=rate, weight_decay=0.0)

    def step(self) -> None:
        self.master.grad = self.direction + torch.randn(len(self.master))
        self._optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = DeltaPolicy()
    parser.add_argument("--elements", type=int, default=4_000_000)
    parser.add_argument("--versions", type=int, default=400)
    parser.add_argument("--anchor-every", type=int, default=default.anchor_every)
    parser.add_argument("--max-chain", type=float, default=default.max_chain)
    parser.add_argument("--skip", type=int, nargs="*", default=default.skip)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    policy = DeltaPolicy(anchor_every=given.anchor_every, max_chain=given.max_chain, skip=tuple(given.skip))
    trainer = Adam(given.elements, given.lr)
    for _ in range(WARM_UP):
        trainer.step()
    with tempfile.TemporaryDirectory() as root:
        seconds = []
        with Publisher(root, dtype=torch.bfloat16, delta=policy) as publisher:
            for _ in range(given.versions + 1):
                started = time.process_time()
                publisher.publish(trainer.state)
                seconds.append(time.process_time() - started)
                trainer.step()
        channel = Channel.open(root)
        manifests = [channel.manifest(VersionId(1, number)) for number in range(1, given.versions + 2)]
        figures = {
            **stored(manifests),
            **behind(channel, manifests),
            **fresh(channel, manifests),
            **cpu(manifests[1:], seconds[1:]),
        }
    print(json.dumps(figures) if given.json else "\n".join(f"{what:62} {value}" for what, value in figures.items()))
    if not given.json:
        print(load())


def stored(manifests: Sequence[Manifest]) -> dict[str, object]:
    """What goes to storage. The first version, full by necessity, does not count. The mean is over whole cycles, each
    with its full version, as long as there is one; a window may have more of them than its share."""
    full = manifests[0].nbytes
    sizes = [manifest.stored_bytes for manifest in manifests[1:]]
    anchors = [at for at, manifest in enumerate(manifests[1:], start=1) if manifest.kind == "full"]
    cycles = sizes[: anchors[-1]] if anchors else sizes
    windows = [sum(sizes[at : at + WINDOW]) for at in range(max(1, len(sizes) - WINDOW + 1))]
    steps = [manifest.deltas[0].nbytes for manifest in manifests[1:] if manifest.deltas]
    ends = [*(at - 1 for at in anchors), len(sizes)]
    chains = [sum(sizes[start:stop]) for start, stop in zip([0, *anchors], ends, strict=True)]
    return {
        "stored for each step, full versions included": percent(sum(cycles), len(cycles) * full),
        f"the same in the worst {WINDOW} steps": percent(max(windows), min(WINDOW, len(sizes)) * full),
        "one step's changes": percent(sum(steps), len(steps) * full),
        "full versions at": anchors,
        "the longest chain and its full version, as retention keeps it": percent(max(chains) + full, full),
    }


def behind(channel: Channel, manifests: Sequence[Manifest]) -> dict[str, object]:
    """What a reader fetches that holds the version so many before."""
    full = manifests[0].nbytes
    pairs = list(zip(manifests, manifests[BEHIND:], strict=False))
    ways = [to(channel, target, held) for held, target in pairs[:: max(1, len(pairs) // 100)] + pairs[-1:]]
    first = to(channel, manifests[BEHIND], manifests[0])
    replayed = sum(manifest.deltas[0].nbytes for manifest in manifests[1 : BEHIND + 1])
    return {
        f"a reader {BEHIND} behind, at a version with a skip, fetches": percent(first.nbytes, full),
        "in files": len(first.links),
        f"a reader {BEHIND} behind at any version, mean": percent(sum(way.nbytes for way in ways), len(ways) * full),
        f"the {BEHIND} steps replayed would be": percent(replayed, full),
    }


def fresh(channel: Channel, manifests: Sequence[Manifest]) -> dict[str, object]:
    """What a reader fetches that holds nothing."""
    ways = [cheapest(channel, target) for target in manifests]
    costly = max(ways, key=lambda way: way.nbytes)
    mean = sum(way.nbytes for way in ways) / len(ways)
    return {
        "a reader with nothing fetches, mean": percent(mean, manifests[0].nbytes),
        "at most": percent(costly.nbytes, manifests[0].nbytes),
        "in a full version and so many deltas": len(costly.links),
    }


def cpu(manifests: Sequence[Manifest], seconds: Sequence[float]) -> dict[str, object]:
    """CPU seconds of a publish, per GB of a full version; the median of those that write the same."""
    kinds: dict[str, list[float]] = {}
    for manifest, spent in zip(manifests, seconds, strict=True):
        deltas = f"{len(manifest.deltas)} deltas" if manifest.kind == "delta" else "a full version and its deltas"
        kinds.setdefault(deltas, []).append(spent * 1e9 / manifest.nbytes)
    return {f"CPU s/GB of a publish with {what}": round(statistics.median(all), 2) for what, all in kinds.items()}


def to(channel: Channel, target: Manifest, held: Manifest) -> Chain:
    return cheapest(channel, target, held=lambda each: each.id == held.id, oldest=held.id)


def percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 2)


if __name__ == "__main__":
    main()
