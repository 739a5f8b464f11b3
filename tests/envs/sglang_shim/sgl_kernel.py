"""Stands in for `sgl_kernel`, of which PyPI has no CPU build, so that SGLang serves small dense models on
any CPU.

SGLang 0.5.23 with SGLANG_USE_CPU_ENGINE=1 imports sgl_kernel at module level in many places. On a CPU
without AMX a dense Llama or Qwen model calls exactly one of its functions; all else takes SGLang's own
`forward_native` paths. Whatever is missing here says so when it is called, not when it is imported.
"""

from collections.abc import Callable
from typing import NoReturn

import torch

__version__ = "0.0.0+ckptsync.standin"

_namespace = torch.library.Library("sgl_kernel", "DEF")
_namespace.define("init_cpu_threads_env(str cpu_ids) -> str")
_namespace.define("initialize(int size, int rank) -> ()")
_namespace.impl("init_cpu_threads_env", lambda cpu_ids: f"threads not bound ({cpu_ids})", "CompositeExplicitAutograd")
_namespace.impl("initialize", lambda size, rank: None, "CompositeExplicitAutograd")


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write each request's new cache slots, packed one after the other, into its row of the token pool."""
    offset = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        count = last - first
        req_to_token[row, first:last] = out_cache_loc[offset : offset + count].to(req_to_token.dtype)
        offset += count


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no stand-in: this model needs the real kernel package")

    return missing
