"""Does a model compute from its parameters alone? If not, copies into them change too little.

A list of what is known to be plain, not of what is known to be otherwise: a new kernel layout costs the copy
plan, never correctness. The read-back cannot tell, since it looks at parameters only. What an engine's kernels keep
besides is for each plugin's own `derived` to know.
"""

from __future__ import annotations

from collections.abc import Callable, Set

import torch

PLAIN_METHODS = {"NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod"}
"""Of vLLM and SGLang alike. Kernels for a mixture of experts differ: each plugin knows which of them pack."""


def first_with_more(
    model: torch.nn.Module, more: Callable[[torch.nn.Module], str], plain: Set[str] = frozenset()
) -> str:
    """Why copies would not do, naming the first module; empty if they do. `more`: what else a module may hold, as a
    clause; `plain`: attributes whose tensors derive from nothing."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    for name, module in model.named_modules():
        if why := _by_its_method(module) or more(module) or _beside(module, own, plain):
            return f"{name or 'the model'} ({type(module).__name__}) {why}"
    return ""


def _by_its_method(module: torch.nn.Module) -> str:
    method = type(getattr(module, "quant_method", None)).__name__
    return "" if method in PLAIN_METHODS else f"keeps its weights as {method} does"


def _beside(module: torch.nn.Module, own: Set[int], plain: Set[str]) -> str:
    for key, value in vars(module).items():
        if isinstance(value, torch.Tensor) and key not in plain and _foreign(value, own):
            return f"holds a tensor {key} beside its parameters"
    return ""


def _foreign(tensor: torch.Tensor, own: Set[int]) -> bool:
    return tensor.numel() > 0 and tensor.untyped_storage().data_ptr() not in own
