"""A small trainer for the drills in docs/recovery.md and docs/debugging.md: it can be killed, and it can go wrong.

    torchrun --standalone --nproc-per-node 2 examples/drill.py ROOT --until 6 --die-at 6
    python examples/drill.py ROOT --until 10 --bug-at 7 --dtype bfloat16

Resumes where ROOT ends, and publishes after every step, with its optimizer.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard

import ckptsync


class Net(nn.Module):
    """Learns to give back its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--until", type=int, required=True, help="the last step")
    parser.add_argument("--die-at", type=int, default=0, help="kill rank 0 while this step is being published")
    parser.add_argument("--bug-at", type=int, default=0, help="at this step one layer learns 100,000 times too fast")
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


def die(_: int = 0) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def measure(model: nn.Module, x: torch.Tensor) -> float:
    with torch.no_grad():
        found = -(model(x) - x).square().mean().item()
    if isinstance(model, FSDPModule):
        model.reshard()  # after a forward without a backward the parameters are whole, and not the optimizer's
    return round(found, 3)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    args, model, rank = options(), Net(), int(os.environ.get("RANK", "0"))
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
        model = fully_shard(model)
    optimizer = torch.optim.Adam([{"params": layer.parameters(), "lr": 1e-5} for layer in model.layers])

    def state() -> dict[str, Any]:
        return {"optimizer": get_optimizer_state_dict(model, optimizer), "rng": torch.get_rng_state()}

    saved, step = state(), 0
    point = ckptsync.resume(args.root, model, trainer_state=saved, allow_empty=True, allow_cast=True)
    if point is not None:
        set_optimizer_state_dict(model, optimizer, saved["optimizer"])
        torch.set_rng_state(saved["rng"])
        step = point.step or 0
        if rank == 0:
            print(f"resumed from {point.version}, step {step}")
            for version, why in point.passed_over.items():
                print(f"passed over {version}: {why}")
    dtype = getattr(torch, args.dtype)
    with ckptsync.Publisher(args.root, resumed_from=point and point.version, dtype=dtype) as publisher:
        while step < args.until:
            step += 1
            optimizer.param_groups[3]["lr"] = 1.0 if step == args.bug_at else 1e-5
            x = torch.rand(64, 64)
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            reward = {"reward": measure(model, x)}
            hook = {"progress": die} if step == args.die_at and rank == 0 else {}
            done = publisher.publish(model, step=step, metadata=reward, trainer_state=state(), **hook)
            if rank == 0:
                print(f"published {done.version}: step {step}, reward {reward['reward']}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
