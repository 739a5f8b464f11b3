"""The `vllm.general_plugins` entry point: vLLM runs it in every process, some more than once."""

from __future__ import annotations

import functools

NAME = "ckptsync"


@functools.cache
def register() -> None:
    """Make `--weight-transfer-config '{"backend": "ckptsync"}'` and `--load-format ckptsync` known."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import register_model_loader

    from .loader import CkptsyncModelLoader

    WeightTransferEngineFactory.register_engine(NAME, f"{__package__}.engine", "CkptsyncWeightTransferEngine")
    register_model_loader(NAME)(CkptsyncModelLoader)
