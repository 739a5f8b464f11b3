"""Deltas from ranks with a GPU each: compared on the host, and where the shards are.

    python -m benchmarks.gpu_delta_ranks [--ranks 2] [--shape 4b|tiny] [--root DIR] [--rounds 3] [--json FILE]
    python -m benchmarks.gpu_delta_ranks --dry --shape tiny        # without a GPU, to see that it runs

A random bf16 model, every tensor cut along its first dimension as FSDP2 cuts it, of which 1 % of the elements change
before each publish. Side by side: `DeltaPolicy(on_gpu=False)` and `True`. Of each the seconds of a publish, how much of
a rank's weights crossed the bus, and how long a rank took to compare them; at the end the version is proven against a
full publish of the same weights, by its content digest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.gpu_common import DEVICE
from benchmarks.shapes import SHAPES, layers_of
from ckptsync import DeltaPolicy, Publisher
from ckptsync.delta import messages
from ckptsync.export import collect
from tests.trainer.ranks_harness import returned, run_ranks


def weights(rank: int, ranks: int, shape: str) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh(DEVICE, (ranks,))
    torch.manual_seed(rank)
    found: dict[str, torch.Tensor] = {}
    for name, size in layers_of(SHAPES[shape]):
        local = torch.randn(size, device=DEVICE, dtype=torch.bfloat16).mul_(0.02).chunk(ranks)[rank].clone()
        found[name] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return found


def step(state: dict[str, torch.Tensor], number: int) -> None:
    for tensor in state.values():
        flat = tensor.to_local().view(torch.int16).view(-1)  # type: ignore[attr-defined]
        flat[number::100] += 1


class Watched:
    """What one publish fetched, and how long it compared."""

    def __init__(self) -> None:
        self.fetched, self.comparing = 0, 0.0
        plain, compare, encode = torch.Tensor.cpu, messages.Messages.compare, messages.encode

        def cpu(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if sys._getframe(1).f_globals["__name__"] in {messages.__name__, collect.__name__}:
                self.fetched += tensor.nbytes
            return plain(tensor, *args, **kwargs)

        torch.Tensor.cpu = cpu  # type: ignore[method-assign]
        messages.Messages.compare = self._timed(compare)  # type: ignore[method-assign]
        messages.encode = self._timed(encode)

    def _timed(self, work: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return work(*args, **kwargs)
            finally:
                self.comparing += time.perf_counter() - started

        return run


def publishes(rank: int, ranks: int, shape: str, root: str, rounds: int, dry: bool) -> dict[str, Any]:
    if dry:
        messages.is_far = lambda _: True
    state, found = weights(rank, ranks, shape), dict[str, Any]()
    found["bytes of this rank"] = sum(tensor.to_local().nbytes for tensor in state.values())  # type: ignore[attr-defined]
    watched = Watched()
    for on_gpu in (False, True):
        took, fetched, comparing = [], [], []
        where = f"{root}/{'gpu' if on_gpu else 'host'}"
        with Publisher(where, writers="all", delta=DeltaPolicy(effort="fast", on_gpu=on_gpu)) as publisher:
            for number in range(rounds + 1):
                step(state, number)
                watched.fetched, watched.comparing, started = 0, 0.0, time.perf_counter()
                done = publisher.publish(state)
                took.append(time.perf_counter() - started)
                fetched.append(watched.fetched)
                comparing.append(watched.comparing)
        tag = "compared on the GPU" if on_gpu else "compared on the host"
        found |= {
            f"{tag}: first publish, s": took[0],
            f"{tag}: publish, s (median)": statistics.median(took[1:]),
            f"{tag}: bytes of a rank that crossed the bus whole": max(fetched[1:]),
            f"{tag}: comparing, s (median)": statistics.median(comparing[1:]),
            f"{tag}: bytes of the delta": done.manifest.parent.nbytes if done.manifest.parent else None,
            f"{tag}: kind": done.manifest.kind,
        }
        last = done.manifest.content_digest
    full = Publisher(f"{root}/full", writers="all").publish(state)
    found["the last version is what a full publish has"] = full.manifest.content_digest == last
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Deltas from ranks with a GPU each.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, default="4b")
    parser.add_argument("--root", default="/dev/shm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dry", action="store_true", help="on the CPU")
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.root, prefix="ckptsync-delta-") as root:
        given = args.ranks, publishes, args.ranks, args.shape, root, args.rounds, args.dry
        each = returned(run_ranks(*given, deadline=400.0, cuda=not args.dry))
    for rank, found in enumerate(each):
        for name, value in found.items():
            print(
                f"rank {rank}: {name:60} {value:.4f}" if isinstance(value, float) else f"rank {rank}: {name:60} {value}"
            )
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump({"shape": args.shape, "device": DEVICE, "ranks": each}, file, indent=1)
    return 0 if all(found["the last version is what a full publish has"] for found in each) else 1


if __name__ == "__main__":
    sys.exit(main())
