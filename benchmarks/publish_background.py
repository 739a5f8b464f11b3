"""How long the training waits for a background publish, against a bare copy of the same state to host memory.

    python -m benchmarks.publish_background [--gb 1] [--ranks 1] [--pairs 7] [--root FOLDER] [--cuda]

Each pair times two ways to make a rank's shards safe from the next optimizer step: copying them, tensor by tensor,
into buffers that were made and touched before, and `Publisher.publish(..., background=True)` until it returns. The
order within a pair alternates, the version is complete before the next measurement, and the slowest rank counts.
Reported: the median of the pairs' ratios. The first publish, which makes its buffers, is reported apart.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn

from ckptsync.background import BackgroundPublish
from ckptsync.publish import Publisher
from tests.trainer.ranks_harness import returned, run_ranks

WIDTH = 2048
LAYER = 4 * WIDTH * WIDTH
"""Bytes of one layer's weight in float32."""


def model_of(gb: float, device: str) -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(max(1, round(gb * 1e9 / LAYER)))]
    model = nn.Sequential(*layers)
    if dist.is_initialized():
        from torch.distributed.fsdp import fully_shard

        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def shards(model: nn.Module) -> list[torch.Tensor]:
    return [t.to_local() if hasattr(t, "to_local") else t for t in model.state_dict().values()]


def slowest(seconds: float) -> float:
    if not dist.is_initialized():
        return seconds
    box = torch.tensor(seconds, device="cpu")
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return float(box)


def timed(work: object) -> float:
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    work()  # type: ignore[operator]
    return slowest(time.perf_counter() - start)


def completed(pending: BackgroundPublish, root: str) -> float:
    """Seconds that it took in the background; its files make room for the next."""
    done = pending.result()
    seconds = done.seconds
    shutil.rmtree(os.path.join(root, done.manifest.folder), ignore_errors=True)
    return seconds["gather"] + seconds["write"] + seconds["commit"]


def measure(_: int, root: str, gb: float, pairs: int, device: str) -> dict[str, object]:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // (dist.get_world_size() if dist.is_initialized() else 1)))
    model = model_of(gb, device)
    logging.disable(logging.WARNING)  # the weights do not change, and that is said each time
    own = shards(model)
    cuda = device == "cuda"
    buffers = [torch.empty(t.shape, dtype=t.dtype, pin_memory=cuda).fill_(1) for t in own]

    def bare() -> None:
        for buffer, tensor in zip(buffers, own, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        if cuda:
            torch.cuda.synchronize()

    rows = []
    with Publisher(root) as publisher:
        pending = []

        def ours() -> None:
            pending.append(publisher.publish(model, background=True))

        first = timed(ours)
        write = [completed(pending.pop(), root)]
        for pair in range(pairs):
            works = (bare, ours) if pair % 2 == 0 else (ours, bare)
            seconds = {}
            for work in works:
                seconds[work.__name__] = timed(work)
                if pending:
                    write.append(completed(pending.pop(), root))
            rows.append((seconds["bare"], seconds["ours"]))
    return {"rows": rows, "first": first, "write": write, "bytes": sum(t.nbytes for t in own)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--root", default=None, help="where to publish")
    parser.add_argument("--cuda", action="store_true", help="each rank on its own GPU, over NCCL")
    options = parser.parse_args()
    root = tempfile.mkdtemp(dir=options.root)
    device = "cuda" if options.cuda else "cpu"
    try:
        args = (root, options.gb, options.pairs, device)
        facts = (
            [measure(0, *args)]
            if options.ranks == 1
            else returned(run_ranks(options.ranks, measure, *args, cuda=options.cuda))
        )
    finally:
        shutil.rmtree(root)
    report(facts[0], options.ranks)


def report(fact: dict[str, object], ranks: int) -> None:
    rows = fact["rows"]
    for bare, ours in rows:  # type: ignore[attr-defined]
        print(f"bare copy {bare * 1e3:8.1f} ms   publish {ours * 1e3:8.1f} ms   ratio {ours / bare:.2f}")
    ratio = statistics.median(ours / bare for bare, ours in rows)  # type: ignore[attr-defined]
    print(
        f"{ranks} rank(s), {fact['bytes'] / 1e9:.2f} GB each: training waits {ratio:.2f} times a bare copy "  # type: ignore[operator]
        f"(first publish {fact['first'] * 1e3:.0f} ms); the rest took {statistics.median(fact['write']):.2f} s "  # type: ignore[operator,arg-type]
        f"in the background; load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
