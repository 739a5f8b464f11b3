"""What SGLang's layers compute from beside their parameters. Plain methods derive nothing on CUDA; on a CPU with AMX
they pack, and say so in `use_intel_amx_backend`. Experts that a kernel shuffles are as in the checkpoint while SGLang's
session is open, which is when we write and read them."""

from __future__ import annotations

import torch

from watchers.live.derived import PLAIN_METHODS, first_with_more

POST = ("post_load_weights", "process_weights_after_loading")
"""What a model or a layer does once its weights are in, such as splitting MLA's `kv_b_proj`."""


def holds_more_than_parameters(model: torch.nn.Module) -> str:
    """Why copies would not do, naming the first module; empty if they do."""
    return first_with_more(model, _more)


def _more(module: torch.nn.Module) -> str:
    if getattr(module, "use_intel_amx_backend", False):
        return "computes from packed weights"
    # A method for experts is a module too.
    if type(module).__name__ not in PLAIN_METHODS and any(hasattr(module, name) for name in POST):
        return "derives something from its weights after loading"
    return ""
