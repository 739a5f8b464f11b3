"""One rank of a trainer: a sharded state dict for each known model, one of them published after another.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... \\
        python -m tests.chaos.rank ROOT --model one=FOLDER --model two=FOLDER --seed 1 --stop FILE --log FILE

Ends with 0 once the file STOP is there, with 3 if a newer trainer has taken its place, with 4 if it waited for another
rank for too long. Rank 0 writes to LOG what it was
told of each version, one JSON document (`record.Publish`, by the clock) on each line.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from typing import TypeVar

import msgspec
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ckptsync.delta.policy import DeltaPolicy
from ckptsync.errors import CkptSyncError, Fenced, RankTimeout
from ckptsync.publish import Publisher

from .record import Publish

FENCED, LOST = 3, 4
WAITS = 180.0
"""Seconds for which a rank waits for another: longer than a fault lasts and than a store that is away is asked. One
that was frozen while a busy machine started another trainer may find them over when it is let on."""

Sharded = dict[str, DTensor]
T = TypeVar("T")


def main() -> None:
    args = _parse()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    folders = dict(pair.split("=", 1) for pair in args.model)
    models = {name: sharded(folder, mesh) for name, folder in folders.items()}
    try:
        while not _told(os.path.exists(args.stop)):
            _train(args, models, folders)
    except (Fenced, RankTimeout) as error:
        fenced = isinstance(error, Fenced)
        _log(args.log, "fenced" if fenced else "lost", why=str(error))
        os._exit(FENCED if fenced else LOST)  # the job's groups may wait for a rank that is gone
    dist.destroy_process_group()


def sharded(folder: str, mesh: DeviceMesh) -> Sharded:
    """The checkpoint's tensors, each cut along its first dimension."""
    files = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    whole = {key: value for name in files for key, value in load_file(os.path.join(folder, name)).items()}
    return {key: distribute_tensor(value, mesh, [Shard(0)]) for key, value in sorted(whole.items())}


def _train(args: argparse.Namespace, models: dict[str, Sharded], folders: dict[str, str]) -> None:
    """One epoch, until it is to stop. A store that is away when it begins is tried again by the caller."""
    try:
        publisher = Publisher(args.root, delta=DeltaPolicy(), timeout=WAITS)
    except (Fenced, RankTimeout):
        raise
    except CkptSyncError as error:
        _log(args.log, "refused", why=str(error))
        time.sleep(1.0)
        return
    with publisher:
        _log(args.log, "started", epoch=publisher.epoch)
        rng = random.Random(f"{args.seed}-{publisher.epoch}")
        while not _told(os.path.exists(args.stop)):
            name = _told(rng.choice(sorted(models)))
            _publish(publisher, args.log, name, models[name], folders[name])
            time.sleep(rng.uniform(0.1, 1.0))


def _publish(publisher: Publisher, log: str, name: str, model: Sharded, folder: str) -> None:
    try:
        done = publisher.publish(model, metadata={"model": name}, assets=folder)
    except (Fenced, RankTimeout):
        raise
    except CkptSyncError as error:
        _log(log, "refused", epoch=publisher.epoch, model=name, why=str(error))
    else:
        _log(log, "published", epoch=publisher.epoch, label=done.version.label, model=name)


def _told(value: T) -> T:
    """Rank 0's value."""
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def _log(path: str, event: str, *, epoch: int = 0, label: str = "", model: str = "", why: str = "") -> None:
    if dist.get_rank() == 0:
        line = msgspec.json.encode(Publish(time.time(), event, epoch, label, model, why[:300])) + b"\n"
        with open(path, "ab", buffering=0) as file:
            file.write(line)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root")
    parser.add_argument("--model", action="append", required=True, help="name=FOLDER")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--stop", required=True)
    parser.add_argument("--log", required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
