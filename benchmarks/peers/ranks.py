"""Two gloo ranks with an FSDP2 model: how long training waits, and what each rank's memory grows by."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.peers.clock import OURS, Row, Taken, row, take, turns
from benchmarks.peers.saving import BARE
from benchmarks.peers.ways import Place, sync
from benchmarks.peers.weights import model_of, nbytes
from ckptsync.publish import Publisher
from tests.trainer.ranks_harness import returned, run_ranks

RANKS = 2


@dataclass(frozen=True, slots=True)
class Save:
    """`begin` is what training waits for; what it returns is waited for besides until all is durable."""

    begin: Callable[[str], Callable[[], object] | None]
    lacks: str = ""


def run(gb: float, place: Place, rounds: int) -> list[Row]:
    deadline = max(300, 75 * gb * (rounds + 1))
    each = returned(run_ranks(RANKS, _measure, gb, place.root, rounds, deadline=deadline))
    lacks, first = each[0]["lacks"], each[0]["taken"]
    taken = {name: [_both(*pair) for pair in zip(first[name], each[1]["taken"][name], strict=True)] for name in first}
    return [row("publish, 2 FSDP2 ranks", place.name, name, lacks[name], gb, own, taken[OURS])
            for name, own in taken.items()]  # fmt: skip


def _both(one: Taken, other: Taken) -> Taken:
    """The slower rank's time, both ranks' CPU, and the memory of the rank that grew more."""
    parts = {name: max(one.parts[name], other.parts[name]) for name in one.parts}
    return Taken(max(one.wall, other.wall), one.cpu + other.cpu, max(one.peak, other.peak), parts)


def _measure(rank: int, gb: float, root: str, rounds: int) -> dict[str, Any]:
    model = model_of(gb)
    size = nbytes(model)
    mesh = init_device_mesh("cpu", (RANKS,))  # else the GPU's, where there is one
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    taken: dict[str, list[Taken]] = {}
    with (
        Publisher(f"{root}/ranks") as one,
        Publisher(f"{root}/ranks-all", writers="all") as every,
        Publisher(f"{root}/ranks-behind") as behind,
    ):
        saves = _saves(model, {"rank0": one, "all": every, "behind": behind})
        for round_, name in enumerate(turns(list(saves), rounds + 1)):
            out = f"{root}/{round_}"
            os.makedirs(out, exist_ok=True)
            step_of(model)
            dist.barrier()
            found = take(lambda name=name, out=out: _timed(saves[name], out))
            if round_ >= len(saves):  # the first round makes buffers and groups
                taken.setdefault(name, []).append(found)
            dist.barrier()
            if rank == 0:
                _clear(root, out)
            dist.barrier()
    return {"taken": taken, "lacks": {name: save.lacks for name, save in saves.items()}, "bytes": size}


@torch.no_grad()
def step_of(model: torch.nn.Module) -> None:
    next(iter(model.parameters())).to_local().view(-1)[:1].add_(1)


def _clear(root: str, out: str) -> None:
    shutil.rmtree(out)
    for name in ("ranks", "ranks-all", "ranks-behind"):
        shutil.rmtree(f"{root}/{name}/data", ignore_errors=True)


def _timed(save: Save, out: str) -> dict[str, float]:
    start = time.perf_counter()
    rest = save.begin(out)
    stall = time.perf_counter() - start
    if rest is not None:
        rest()
    return {"stall": stall}


def _saves(model: torch.nn.Module, ours: dict[str, Publisher]) -> dict[str, Save]:
    group = dist.new_group(backend="gloo")

    def publish(publisher: Publisher) -> Callable[[str], None]:
        def begin(_: str) -> None:
            publisher.publish(model)

        return begin

    def behind(_: str) -> Callable[[], object]:
        return ours["behind"].publish(model, background=True).result

    def gather(out: str) -> None:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            save_file(state, f"{out}/model.safetensors")
            sync(out)
        dist.barrier()

    def sharded() -> dict[str, Any]:
        return get_model_state_dict(model)

    def distributed(out: str) -> None:
        dcp.save(sharded(), checkpoint_id=out)

    def later(out: str) -> Callable[[], object]:
        return dcp.async_save(sharded(), checkpoint_id=out, process_group=group).result

    def huggingface(out: str) -> None:
        writer = HuggingFaceStorageWriter(out, save_distributed=True, enable_consolidation=True)
        dcp.save(sharded(), storage_writer=writer)

    pickle = BARE + ", a pickle, for DCP alone"
    return {
        OURS: Save(publish(ours["rank0"])),
        "ckptsync, all ranks write": Save(publish(ours["all"])),
        "ckptsync, in the background": Save(behind),
        "gather to rank 0, save_file + fsync": Save(gather, BARE),
        "DCP save": Save(distributed, pickle),
        "DCP async_save": Save(later, pickle),
        "DCP save, HF writer, consolidated": Save(huggingface, BARE),
    }
