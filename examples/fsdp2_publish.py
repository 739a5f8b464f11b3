"""Train a small FSDP2 model on any number of ranks and publish it as it goes.

    torchrun --standalone --nproc-per-node 2 examples/fsdp2_publish.py ROOT [--steps 6]

Every second step goes out in the background: the call returns once host memory holds each rank's shard, and the
next optimizer step runs while the version is written. ROOT is a folder or a URL such as s3://bucket/run1. Look at
it with `ckptsync ls ROOT` and `ckptsync verify ROOT latest`.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckptsync import Publisher


def make_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), *(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 256))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(256, (8, 16), device=device)

    with Publisher(options.root, run_id="fsdp2-example", dtype=torch.bfloat16, writers="all") as publisher:
        pending = None
        for step in range(1, options.steps + 1):
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 2 == 0:
                pending = publisher.publish(model, step=step, metadata={"loss": loss.item()}, background=True)
        if pending is not None and dist.get_rank() == 0:
            done = pending.result()
            print(f"published {done.version} of step {done.manifest.step}, {done.nbytes} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
