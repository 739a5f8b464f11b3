"""The sender's ledger: all that is sent under one identity is the same.

A version is walked once for each attempt. Where the trainer goes on training meanwhile, in another thread, or a source
gives other values each time, engines would hold different weights under one label.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Union

from ..digest import digest
from ..errors import VersionExists

if TYPE_CHECKING:
    import torch

Mark = Union[str, "torch.Tensor"]

_WORDS = {2: "int16", 4: "int32", 8: "int64"}


class Walked:
    """What a delivery's first whole walk gave, on this rank."""

    def __init__(self) -> None:
        self._first: list[str] | None = None

    def check(self, marks: Sequence[Mark], label: str) -> None:
        """After a whole walk, and before any engine is told its label. VersionExists if an earlier one gave others."""
        found = [mark if isinstance(mark, str) else str(int(mark)) for mark in marks]
        if self._first is not None and found != self._first:
            raise VersionExists(
                f"the weights of {label} changed between two attempts to send it: do not train while sync() runs, and "
                "give a source that yields the same again. What this attempt touched stays paused until the next sync"
            )
        self._first = found

    @property
    def content(self) -> str:
        """Stands for what was walked, on a rank that has the tensors; empty before the first whole walk."""
        return digest("\n".join(self._first).encode()) if self._first else ""


def mark(tensor: torch.Tensor) -> Mark:
    """Of a tensor on the CPU its digest. On a GPU, from where a digest would take every byte to the host, the sum of
    its bits as integers: a scalar that nothing waits for. It finds accidents."""
    import torch

    from ..shards.tensors import tensor_bytes

    if tensor.device.type == "cpu":
        return digest(tensor_bytes(tensor.detach()))
    words = tensor.detach().contiguous()
    return words.view(getattr(torch, _WORDS.get(words.element_size(), "uint8"))).sum(dtype=torch.int64)
