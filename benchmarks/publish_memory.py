"""Peak host memory of a publish by role, against the plan; and `writers="all"` against `rank0`.

    python -m benchmarks.publish_memory [--gb 1] [--ranks 2] [--root FOLDER]

An FSDP2 model over gloo ranks is published in the foreground, by rank 0 and by all ranks, and in the background.
Growth is a rank's peak resident memory during the publish beyond what it held before; the plan is what preflight
reckons with. A model on the CPU is resident itself, so the growth is all that publishing adds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time

import torch
from torch import nn

from benchmarks.publish_background import model_of
from ckptsync import publish as publishing
from ckptsync.preflight import MARGIN
from ckptsync.publish import Publisher
from tests.trainer.ranks_harness import returned, run_ranks

MODES = {
    "rank 0 writes": ({}, False),
    "all ranks write": ({"writers": "all"}, False),
    "rank 0 writes, background": ({}, True),
    "all ranks write, background": ({"writers": "all"}, True),
}


def memory(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))


def measure(_: int, root: str, gb: float, mode: str) -> dict[str, float]:
    settings, background = MODES[mode]
    model = model_of(gb, "cpu")
    plans: list[int] = []
    check = publishing.check_memory
    publishing.check_memory = lambda ranks, nbytes: (plans.append(nbytes), check(ranks, nbytes))[1]
    with Publisher(root, **settings) as publisher:
        publisher.publish(nn.Linear(8, 8))  # first use loads libraries and makes the writers' buffers
        plans.clear()
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")
        before, start = memory("VmRSS"), time.perf_counter()
        done = publisher.publish(model, background=background)
        stall = time.perf_counter() - start
        done = done.result() if background else done
        seconds = time.perf_counter() - start
        grew = memory("VmHWM") - before
    own = sum(t.to_local().nbytes for t in model.state_dict().values())
    return {"grew": grew, "plan": max(plans), "seconds": seconds, "stall": stall, "own": own, "bytes": done.nbytes}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--root", default=None, help="where to publish")
    options = parser.parse_args()
    for mode in MODES:
        root = tempfile.mkdtemp(dir=options.root)
        try:
            facts = returned(run_ranks(options.ranks, measure, root, options.gb, mode, deadline=300))
        finally:
            shutil.rmtree(root)
        for rank, fact in enumerate(facts):
            print(
                f"{mode:28} rank {rank}: grew {fact['grew'] / 2**20:6.0f} MiB, plan {fact['plan'] / 2**20:6.0f} MiB "
                f"(of which {MARGIN >> 20} spare), own shard {fact['own'] / 2**20:.0f} MiB"
            )
        slowest, size = max(fact["seconds"] for fact in facts), facts[0]["bytes"] / 1e9
        print(
            f"{mode:28} {size:.2f} GB in {slowest:.2f} s ({size / slowest:.2f} GB/s), "
            f"training waits {max(fact['stall'] for fact in facts):.2f} s; load {os.getloadavg()[0]:.1f}"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
