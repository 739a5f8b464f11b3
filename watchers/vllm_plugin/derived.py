"""Does a vLLM model compute from its parameters alone? If not, copies into them change too little.

A list of what is known to be plain, not of what is known to be otherwise: a new kernel layout costs the copy
plan, never correctness. The read-back cannot tell, since it looks at parameters only.
"""

from __future__ import annotations

import torch

PLAIN_METHODS = {"NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
PLAIN_MODULES = {"Attention", "EncoderOnlyAttention", "CrossAttention", "MMEncoderAttention"}
"""Their `process_weights_after_loading` derives nothing from checkpoint parameters (0.26, 0.32)."""

NOT_DERIVED = {"kv_cache", "_k_scale_cpu", "_v_scale_cpu", "q_range", "k_range", "v_range", "cos_sin_cache"}


def holds_more_than_parameters(model: torch.nn.Module) -> str:
    """Why copies would not do, naming the first module; empty if they do."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        if why := _more(module, own):
            return f"{name or 'the model'} ({type(module).__name__}) {why}"
    return ""


def _more(module: torch.nn.Module, own: set[int]) -> str:
    method = type(getattr(module, "quant_method", None)).__name__
    if method not in PLAIN_METHODS:
        return f"keeps its weights as {method} does"
    # The CPU build's packed matrix lives in the closure; its plain fallback has none.
    if getattr(vars(module).get("cpu_linear"), "__closure__", None):
        return "computes from a packed copy"
    if hasattr(module, "process_weights_after_loading") and type(module).__name__ not in PLAIN_MODULES:
        return "derives something from its weights after loading"
    if getattr(getattr(module, "impl", None), "sinks", None) is not None:
        return "hands its attention sinks to a kernel, which may cast them"
    for key, value in vars(module).items():
        if isinstance(value, torch.Tensor) and key not in NOT_DERIVED and _foreign(value, own):
            return f"holds a tensor {key} beside its parameters"
    return ""


def _foreign(tensor: torch.Tensor, own: set[int]) -> bool:
    return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() not in own
