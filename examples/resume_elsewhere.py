"""Train on two ranks, lose them, go on with one: weights, optimizer and random numbers come back from the channel.

python examples/resume_elsewhere.py [ROOT]
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import ckptsync


def train(rank: int, ranks: int, rendezvous: str, root: str, until: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def state() -> dict[str, Any]:
        return {"optimizer": get_optimizer_state_dict(model, optimizer), "rng": torch.get_rng_state()}

    saved = state()
    point = ckptsync.resume(root, model, trainer_state=saved, allow_empty=True)
    step = 0
    if point is not None:
        set_optimizer_state_dict(model, optimizer, saved["optimizer"])
        torch.set_rng_state(saved["rng"])
        step = point.step or 0
        if rank == 0:
            print(f"resumed from {point.version} (step {step}) on {ranks} rank(s)")
    with ckptsync.Publisher(root, resumed_from=point.version if point else None) as publisher:
        while step < until:
            x = torch.rand(64, 16)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        done = publisher.publish(model, step=step, metadata={"loss": loss.item()}, trainer_state=state())
        if rank == 0:
            print(f"published {done.version}: step {step}, loss {loss.item():.4f}")
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        root = sys.argv[1] if len(sys.argv) > 1 else f"{scratch}/channel"
        for attempt, (ranks, until) in enumerate(((2, 20), (1, 40))):
            mp.spawn(train, (ranks, f"{scratch}/rendezvous-{attempt}", root, until), nprocs=ranks)


if __name__ == "__main__":
    main()
