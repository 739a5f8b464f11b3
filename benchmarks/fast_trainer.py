"""The trainer of the `gpu_…` benchmarks of fast paths: syncs until it is killed. Speaks JSON lines on stdout.

published   a first version as files, for the engine to start on; then it waits for a line on stdin
limits      what the same bytes take without any engine
synced      one sync: seconds, version on both sides, whether every parameter's sum is equal
bucket      of the last sync, which is to be killed in the middle

With `--ranks N` it is an FSDP2 module over so many processes, a GPU each; the first speaks.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

import httpx
import torch

from benchmarks import in_worker
from benchmarks.fast_model import Dense, Model, Sharded
from benchmarks.gpu_common import copy_limit, seconds
from benchmarks.gpu_pause import config_of, write_json
from benchmarks.shapes import SHAPES
from benchmarks.vllm_front import alike
from ckptsync.lane import Lane
from ckptsync.publish import Publisher
from ckptsync.sync import WeightSync
from ckptsync.transports.base import BUCKET_BYTES
from ckptsync.transports.checkpoint import Checkpoint
from ckptsync.transports.receivers import Layout
from ckptsync.transports.sglang_distributed import TorchGroup
from ckptsync.transports.vllm_ipc import VllmIpc
from ckptsync.transports.vllm_nccl import VllmNccl
from watchers.engines.vllm import VllmEngine, VllmOptions


def say(event: str, **more: Any) -> None:
    print(json.dumps({"event": event, "at": time.time(), **more}), flush=True)


class FileDevices:
    """For dry runs: buffers are files."""

    def __init__(self, folder: str, rank: int) -> None:
        self.folder, self.paths, self.gpu = folder, dict[int, str](), in_worker.dry_gpu(rank)

    def why_not(self) -> str | None:
        return None

    def own(self) -> str:
        return self.gpu

    def visible(self) -> list[str]:
        return [self.gpu]

    def buffer(self, gpu: str, nbytes: int) -> torch.Tensor:  # noqa: ARG002
        path = os.path.join(self.folder, uuid.uuid4().hex)
        buffer = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        self.paths[buffer.data_ptr()] = path
        return buffer

    def reduce(self, buffer: torch.Tensor) -> Any:
        return None, (self.paths[buffer.data_ptr()], buffer.numel(), None, None, None, None, 0, uuid.uuid4().hex)

    def collect(self) -> None:
        for path in self.paths.values():
            os.unlink(path)
        self.paths.clear()


class DryNccl(VllmNccl):
    """Over gloo."""

    def probe(self, engines: Any) -> str | None:  # noqa: ARG002
        return None

    def open_group(self, address: str, port: int, world_size: int, _name: str) -> TorchGroup:
        return TorchGroup(address, port, world_size, f"dry-{port}", "gloo")

    def on_wire(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
        return [tensor.detach().contiguous().view(-1).view(torch.uint8) for _, tensor in tensors]


def telling(transport: Any, tells: dict[str, bool]) -> Any:
    """Says so before each bucket that goes to the engine, while it is to."""
    make = transport.receiver

    def receiver(engine: Any) -> Any:
        found, count = make(engine), iter(range(1, 1 << 30))
        update = found.update

        def told(layout: Layout, payload: Sequence[Any]) -> None:
            if tells["on"]:
                say("bucket", number=next(count), bytes=layout.nbytes)
            update(layout, payload)

        found.update = told
        return found

    transport.receiver = receiver
    return transport


def transport_of(args: argparse.Namespace) -> Any:
    if args.backend == "ipc":
        return VllmIpc(devices=FileDevices(args.work, args.rank)) if args.dry else VllmIpc()
    return DryNccl(address="127.0.0.1") if args.dry else VllmNccl(address="127.0.0.1")


def main() -> None:
    parser = argparse.ArgumentParser(description="A trainer that syncs until it is killed.")
    parser.add_argument("--backend", choices=["ipc", "nccl"], required=True)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--syncs", type=int, required=True)
    parser.add_argument("--bucket", type=int, default=BUCKET_BYTES)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args()
    os.makedirs(os.path.join(args.work, "assets"), exist_ok=True)
    in_worker.arrange()
    if args.rank == 0:
        for rank in range(1, args.ranks):
            subprocess.Popen([sys.executable, "-m", "benchmarks.fast_trainer", *sys.argv[1:], "--rank", str(rank)])
    run(args, (Sharded if args.ranks > 1 else Dense)(SHAPES[args.shape], args))


def run(args: argparse.Namespace, model: Model) -> None:
    assets = os.path.join(args.work, "assets")
    if args.rank == 0:
        write_json(assets, "config.json", config_of(SHAPES[args.shape]))
    channel = os.path.join(args.work, "channel")
    publisher = Publisher(channel)
    published = publisher.publish(model.published(), assets=assets)
    publisher.close()
    limits(model, args, f"{published.version}")
    if args.backend == "nccl" and not args.dry:
        in_worker.stand_in_for_missing()
        importlib.import_module("vllm.distributed.weight_transfer.nccl_common")  # not within the first sync
    if args.rank == 0 and not sys.stdin.readline():
        return
    engine = VllmEngine(args.url, VllmOptions(fingerprint=False, timeout=60.0))
    tells = {"on": False}
    transport = telling(transport_of(args), tells)
    model.meet()
    with WeightSync([transport, Checkpoint()], channel=channel, engines=[engine], bucket_bytes=args.bucket) as sync:
        for number in range(1, args.syncs + 1):
            model.train(number)
            one_sync(sync, model, engine, args, number)
            if number == 1 and args.backend == "nccl":
                broadcast_limit(transport, engine, model.nbytes, args)
        tells["on"] = args.rank == 0
        model.train(1)
        if args.rank == 0:
            say("last")
        sync.sync(model.published(), assets=assets)
        say("survived")


def limits(model: Model, args: argparse.Namespace, version: str) -> None:
    """Each rank copies, all at once; the first one's figures are told."""
    found = {"pinned": copy_limit(model.local_nbytes, 2)}
    found |= {name: min(seconds(work) for _ in range(3)) for name, work in model.limits()}
    if not args.dry:
        torch.cuda.empty_cache()
    if args.rank == 0:
        say("published", version=version, bytes=model.nbytes)
        say("limits", **found)


def one_sync(sync: WeightSync, model: Model, engine: VllmEngine, args: argparse.Namespace, number: int) -> None:
    done: Any = None

    def work() -> None:
        nonlocal done
        done = sync.sync(model.published(), step=number)

    model.meet()
    took = seconds(work)
    here = model.sums()
    if args.rank:
        return
    status = engine.status()
    there = httpx.get(args.url + "/sums", timeout=60).json()
    say(
        "synced", number=number, seconds=took, version=str(done.version), label=status.label, paused=status.paused,
        transport=done.transport, equal=alike(there, here), failures=[str(f) for f in done.failures],
    )  # fmt: skip


def broadcast_limit(transport: Any, engine: VllmEngine, nbytes: int, args: argparse.Namespace) -> None:
    """The same bytes by the same group, in pieces of a bucket, without an engine that loads them."""
    group = transport._links[engine.name].group
    times = max(1, round(nbytes / args.bucket))
    piece = torch.empty(nbytes // times, dtype=torch.uint8, device="cpu" if args.dry else "cuda")

    def work() -> None:
        lane, body = Lane("receive"), {"nbytes": piece.numel(), "times": times}
        answer = lane.submit(partial(httpx.post, args.url + "/receive", json=body, timeout=120))
        group.broadcast([piece] * times)
        answer.result()
        lane.close()

    say("limits", broadcast=min(seconds(work) for _ in range(3)))


if __name__ == "__main__":
    main()
