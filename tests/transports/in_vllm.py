"""Run by the interpreter of a vLLM environment: its own dataclasses and its own consumer read what was posted.

    python in_vllm.py RECORDED.json    ->  {"tensor name": [values, ...], ...} on stdout, last line

No GPU is needed: the handle is replaced where vLLM asks torch for the memory behind it.
"""

from __future__ import annotations

import json
import os
import sys
import types
from typing import Any

os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"

import torch
from torch.multiprocessing import reductions
from vllm.distributed.weight_transfer import ipc_engine, nccl_common, nccl_engine, packed_tensor

GPU = "GPU-0"


def opened(path: str, nbytes: int, *_: Any) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


def by_ipc(bodies: dict[str, list[dict[str, Any]]]) -> dict[str, list[float]]:
    """As `IPCWeightTransferEngine.receive_weights`, each bucket while its buffer still holds it."""
    for body in bodies["init"]:
        assert ipc_engine.IPCWeightTransferInitInfo(**body["init_info"]).packed
    found: dict[str, list[float]] = {}
    importer = packed_tensor.PackedBufferImporter()
    for body in bodies["update"]:
        info = ipc_engine.IPCWeightTransferUpdateInfo(**body["update_info"])
        weights = packed_tensor.packed_ipc_consumer(
            info.ipc_handles, info.names, info.shapes, info.dtype_names, info.tensor_sizes, 0, importer
        )
        found |= {name: tensor.flatten().float().tolist() for name, tensor in weights}
    return found


def by_nccl(bodies: dict[str, list[dict[str, Any]]]) -> dict[str, list[float]]:
    for body in bodies["init"]:
        info = nccl_common.NCCLWeightTransferInitInfo(**body["init_info"])
        assert (info.rank_offset, info.world_size, info.packed) == (1, 3, False)
    found: dict[str, list[float]] = {}
    for body in bodies["update"]:
        update = nccl_engine.NCCLWeightTransferUpdateInfo(**body["update_info"])
        found |= {name: [] for name in update.names}
    return found


def main() -> None:
    reductions.rebuild_cuda_tensor = opened
    torch.cuda.get_device_properties = lambda _: types.SimpleNamespace(uuid=GPU)  # type: ignore[assignment]
    with open(sys.argv[1], encoding="utf-8") as file:
        recorded = json.load(file)
    print(json.dumps({"ipc": by_ipc(recorded["ipc"]), "nccl": by_nccl(recorded["nccl"])}))


if __name__ == "__main__":
    main()
