"""Ways to bring a version to engines, behind one interface and one version counter.

Names are imported on first use: a watcher reads what a version says of its transport, and needs no torch for that.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import Bucket, Delivery, LocalEngine, Selective, Sending, SyncEngine, Transport
    from .chain import Failure, Patience
    from .checkpoint import Checkpoint
    from .gloo import Gloo
    from .module import ModuleCopy
    from .sglang_distributed import SglangDistributed
    from .sglang_lora import SglangLora
    from .sglang_tensor import SglangTensor
    from .vllm_gloo import VllmGloo
    from .vllm_ipc import VllmIpc
    from .vllm_nccl import VllmNccl

__all__ = [
    "Bucket",
    "Checkpoint",
    "Delivery",
    "Failure",
    "Gloo",
    "LocalEngine",
    "ModuleCopy",
    "Patience",
    "Selective",
    "Sending",
    "SglangDistributed",
    "SglangLora",
    "SglangTensor",
    "SyncEngine",
    "Transport",
    "VllmGloo",
    "VllmIpc",
    "VllmNccl",
]

_HOME = {
    "Bucket": "base",
    "Checkpoint": "checkpoint",
    "Delivery": "base",
    "Failure": "chain",
    "Gloo": "gloo",
    "LocalEngine": "base",
    "ModuleCopy": "module",
    "Patience": "chain",
    "Selective": "base",
    "Sending": "base",
    "SglangDistributed": "sglang_distributed",
    "SglangLora": "sglang_lora",
    "SglangTensor": "sglang_tensor",
    "SyncEngine": "base",
    "Transport": "base",
    "VllmGloo": "vllm_gloo",
    "VllmIpc": "vllm_ipc",
    "VllmNccl": "vllm_nccl",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ckptsync.transports' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
