"""What vLLM's layers compute from beside their parameters."""

from __future__ import annotations

from typing import Any

import torch

from watchers.live.derived import PLAIN_METHODS, first_with_more

PLAIN_MODULES = {"Attention", "EncoderOnlyAttention", "CrossAttention", "MMEncoderAttention"} | PLAIN_METHODS
"""Their `process_weights_after_loading` derives nothing from checkpoint parameters (0.26, 0.32). A method for experts
is a module too."""

PLAIN_EXPERTS = {"TRITON", "BATCHED_TRITON"}
"""Kernels that compute from `w13_weight` and `w2_weight` as they are loaded (0.32, `oracle/unquantized.py`)."""

NOT_DERIVED = {"kv_cache", "_k_scale_cpu", "_v_scale_cpu", "q_range", "k_range", "v_range", "cos_sin_cache"}


def holds_more_than_parameters(model: torch.nn.Module) -> str:
    """Why copies would not do, naming the first module; empty if they do."""
    return first_with_more(model, _more, NOT_DERIVED)


def _more(module: torch.nn.Module) -> str:
    # The CPU build's packed matrix lives in the closure; its plain fallback has none.
    if getattr(vars(module).get("cpu_linear"), "__closure__", None):
        return "computes from a packed copy"
    if why := _of_experts(module):
        return why
    if hasattr(module, "process_weights_after_loading") and type(module).__name__ not in PLAIN_MODULES:
        return "derives something from its weights after loading"
    if getattr(getattr(module, "impl", None), "sinks", None) is not None:
        return "hands its attention sinks to a kernel, which may cast them"
    return ""


def _of_experts(experts: Any) -> str:
    backend = getattr(getattr(experts, "quant_method", None), "unquantized_backend", None)
    if backend is None:
        return ""
    if backend.name not in PLAIN_EXPERTS:
        return f"packs its experts for the kernel {backend.name}"
    return "moves its experts between ranks" if experts.moe_config.moe_parallel_config.enable_eplb else ""
