"""What the GPU benchmarks do inside vLLM's workers, where tensor parallel ranks are processes of their own.

`site` makes a folder for PYTHONPATH with entry points, by which vLLM sets up each of its processes; the other functions
go through `collective_rpc` with the worker as first argument, and answer once for each rank.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
import time
import types
from typing import Any

import torch

from benchmarks.gpu_common import seconds, synchronize

DRY = "CKPTSYNC_BENCH_DRY"
ENTRY_POINTS = """[vllm.general_plugins]
ckptsync = watchers.vllm_plugin.register:register
benchmark = benchmarks.in_worker:set_up
"""
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # Both use NVLink multicast.
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
PARTS = {
    ".q_proj.": ".qkv_proj.", ".k_proj.": ".qkv_proj.", ".v_proj.": ".qkv_proj.",
    ".gate_proj.": ".gate_up_proj.", ".up_proj.": ".gate_up_proj.",
}  # fmt: skip


def arrange() -> None:
    """Before vLLM is imported, which reads some of them then."""
    for name, setting in ENVIRONMENT.items():
        os.environ.setdefault(name, setting)


def site(folder: str) -> str:
    """Write the folder; returns it."""
    info = os.path.join(folder, "ckptsync_benchmarks-0.dist-info")
    os.makedirs(info, exist_ok=True)
    for name, text in (
        ("METADATA", "Metadata-Version: 2.1\nName: ckptsync-benchmarks\nVersion: 0\n"),
        ("entry_points.txt", ENTRY_POINTS),
    ):
        with open(os.path.join(info, name), "w", encoding="utf-8") as file:
            file.write(text)
    return folder


def set_up() -> None:
    """In each process of vLLM, once, before it loads anything."""
    stand_in_for_missing()
    if os.environ.get(DRY):
        run_dry()


def stand_in_for_missing() -> None:
    """vLLM 0.26 imports these at the top of its IPC engine, and uses them in its trainer's half alone. They are gone
    again afterwards: the rest of vLLM asks whether there is a ray."""
    missing = [name for name in ("ray", "requests") if importlib.util.find_spec(name) is None]
    sys.modules.update({name: types.ModuleType(name) for name in missing})
    importlib.import_module("vllm.distributed.weight_transfer.ipc_engine")
    for name in missing:
        del sys.modules[name]


def dry_gpu(rank: int) -> str:
    return f"GPU-dry-{rank}"


def run_dry() -> None:
    """No GPU: handles are (path, bytes, ...) and groups are gloo's."""
    import vllm._custom_ops as ops
    from torch.multiprocessing import reductions

    ops._supports_onednn = False  # packed layers hide their parameters

    def opened(path: str, nbytes: int, *_: Any) -> torch.Tensor:
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)

    def properties(_: Any) -> Any:
        return types.SimpleNamespace(uuid=dry_gpu(own_rank()))

    reductions.rebuild_cuda_tensor = opened
    torch.cuda.get_device_properties = properties  # type: ignore[assignment]
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment]
    from vllm.distributed.weight_transfer import nccl_engine

    nccl_engine.worker_init_process_group = lambda info, _: DryGroup(info)


def own_rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


class DryGroup:
    """The worker's end over gloo."""

    def __init__(self, info: Any) -> None:
        from ckptsync.transports.sglang_distributed import TorchGroup

        name = f"dry-{info.master_port}"
        self._group = TorchGroup(info.master_address, info.master_port, info.world_size, name, "gloo", rank=1)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:  # noqa: ARG002
        self._group.broadcast([tensor.view(-1).view(torch.uint8)])


def summed(tensors: Any) -> dict[str, float]:
    """Sum of each of the engine's parameters, from its own or from a checkpoint's tensors."""
    found: dict[str, float] = {}
    for name, tensor in tensors:
        for part, whole in PARTS.items():
            name = name.replace(part, whole)
        found[name] = found.get(name, 0.0) + float(tensor.detach().sum(dtype=torch.float64))
    return found


# -- over collective_rpc -----------------------------------------------------------------------------------------------


def sums(worker: Any) -> dict[str, float]:
    return summed(worker.model_runner.model.named_parameters())


def settled(_: Any) -> bool:
    """When nothing is computed any more; never, if the GPU waits for somebody who died."""
    synchronize()
    return True


def receive(worker: Any, nbytes: int, times: int) -> None:
    """Broadcasts of the transport's group and nothing else, for the limit."""
    group = worker.weight_transfer_engine.model_update_group
    buffer = torch.empty(nbytes, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")
    for _ in range(times):
        group.broadcast(buffer, src=0)
    synchronize()


def gpu(worker: Any) -> str:
    """UUID of the GPU that this rank runs on."""
    index = worker.device.index
    return str(torch.cuda.get_device_properties(0 if index is None else index).uuid)


def held(worker: Any) -> int:
    """Bytes of this rank's parameters."""
    return sum(parameter.nbytes for parameter in worker.model_runner.model.parameters())


def copy_limit(worker: Any, rounds: int) -> float:
    """Seconds for one pinned copy of this rank's bytes to its GPU, best of the rounds, while the other ranks do the
    same."""
    nbytes, device = held(worker), worker.device
    pinned = device.type == "cuda"
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned, device="cpu").fill_(1)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    found = []
    for _ in range(rounds + 1):
        torch.distributed.barrier(group=cpu_group())
        found.append(seconds(lambda: target.copy_(source, non_blocking=True)))
    return min(found[1:])


def cpu_group() -> Any:
    from vllm.distributed import get_world_group

    return get_world_group().cpu_group


def prepare(worker: Any, folder: str, manifest_digest: str) -> float:
    """Seconds until this rank has gathered what it needs of the version."""
    from watchers.live.announced import announced

    ready = threading.Event()
    started = time.perf_counter()
    worker.weight_transfer_engine.live.prepare(announced(folder, manifest_digest), ready.set)
    if not ready.wait(300):
        raise TimeoutError("prepare did not end within 300 s")
    return time.perf_counter() - started


def outcome(worker: Any) -> dict[str, Any]:
    """Of this rank's last update, without its error."""
    found = worker.weight_transfer_engine.outcome
    names = [name for name in type(found).__slots__ if name != "error"]
    return {name: getattr(found, name) for name in names} | {"error": str(found.error or "")}


def proof_alone(worker: Any, rounds: int) -> float:
    """Seconds for the sums of all live values, without waiting for copies; best of the rounds."""
    from watchers.live.copy_plan import targets_of
    from watchers.live.readback import live_views
    from watchers.live.readback import sums as live_sums

    live = worker.weight_transfer_engine.live
    views = live_views(live._plan, targets_of(live.model))
    return min(seconds(lambda: live_sums(views).cpu()) for _ in range(rounds + 1))


def why_no_plan(worker: Any) -> str:
    live = worker.weight_transfer_engine.live
    return "" if live._plan is not None else str(live._why)
