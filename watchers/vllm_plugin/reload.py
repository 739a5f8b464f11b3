"""vLLM's own reload of a checkpoint into the live model, with what its 0.32 leaves undone.

- After one wrong shape every later good reload fails too, since the bad tensor stays buffered in the layerwise
  state. `Reload.abandon` clears it; rollback and forward were exact after that.
- The CPU build packs the experts of a mixture when it makes their kernel, once: a stock reload leaves them as they
  are in the checkpoint, and the kernel goes on to read them as packed. It answers 200, and other tokens from then on.
  So their kernels are made anew.
- The CPU build's int8 kernel keeps the address of the scales that it was made of, which the reload then frees. So
  they are kept as long as the kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import vllm._custom_ops as ops
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info


class Reload:
    """One reload, in as many calls as it takes: `load` again and again, then `finish`, or `abandon` after an error."""

    def __init__(self, model: torch.nn.Module, model_config: Any) -> None:
        self._model, self._config = model, model_config
        self._meanwhile = ExitStack()
        self._meanwhile.enter_context(_expert_kernels_made_anew(model))
        self._meanwhile.enter_context(_scales_kept())
        initialize_layerwise_reload(model)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raises what vLLM raises."""
        self._model.load_weights(weights)  # type: ignore[operator]

    def finish(self) -> None:
        finalize_layerwise_reload(self._model, self._config)
        self._meanwhile.close()

    def abandon(self) -> None:
        """Throw away what is buffered, and put the layers together again: a well-formed model with mixed values."""
        with self._meanwhile:
            for module in self._model.modules():
                info = get_layerwise_info(module)
                if info.can_load():
                    info.loaded_weights.clear()
                    info.load_numel = 0
            finalize_layerwise_reload(self._model, self._config)


def reload(model: torch.nn.Module, model_config: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises what vLLM raises, with the model well-formed and mixed."""
    job = Reload(model, model_config)
    try:
        job.load(weights)
        job.finish()
    except BaseException:
        job.abandon()
        raise


@contextmanager
def _expert_kernels_made_anew(model: torch.nn.Module) -> Iterator[None]:
    """vLLM makes a kernel, and packs for it, where there is none. A layer that gets no weights keeps its old one."""
    methods: list[Any] = [module.quant_method for module in model.modules() if _packs_for_its_kernel(module)]
    kernels = [method.moe_kernel for method in methods]
    for method in methods:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in zip(methods, kernels, strict=True):
            if method.moe_kernel is None:
                method.moe_kernel = kernel


@contextmanager
def _scales_kept() -> Iterator[None]:
    """What a new int8 kernel points to lives as long as its handle."""
    create = ops.create_onednn_scaled_mm

    def create_and_keep(weight: torch.Tensor, scales: torch.Tensor, *more: Any) -> Any:
        handle = create(weight, scales, *more)
        handle.scales = scales
        return handle

    ops.create_onednn_scaled_mm = create_and_keep
    try:
        yield
    finally:
        ops.create_onednn_scaled_mm = create


def _packs_for_its_kernel(module: torch.nn.Module) -> bool:
    backend = getattr(getattr(module, "quant_method", None), "unquantized_backend", None)
    return getattr(backend, "name", "") == "CPU"
