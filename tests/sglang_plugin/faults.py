"""A plugin of SGLang for tests only: what lies in the folder CKPTSYNC_TEST_FAULTS goes wrong once in that rank.

load-0      the engine's own load raises at the tensor that the file names
shape-0     the engine's own load gets that tensor with one row less
copy-0      the copies of the plan end in the middle
flip-0      one bit is wrong after the copies
silent-0    the rank writes no receipt
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any


def register() -> None:
    folder = os.environ.get("CKPTSYNC_TEST_FAULTS")
    if folder:
        import watchers.live.payload as payload
        import watchers.sglang_plugin.loader as loader

        Faults(folder, loader, payload)


class Faults:
    """Stands between the plugin and what it calls."""

    def __init__(self, folder: str, loader: Any, payload: Any) -> None:
        self.folder, self.rank = folder, loader._rank
        self.reload, self.apply, self.write = loader._reload, payload.apply, loader.write_receipt
        loader._reload, loader.write_receipt, payload.apply = self.broken_reload, self.broken_write, self.broken_apply

    def due(self, what: str) -> str:
        """What the file says, once; empty if it is not there."""
        path = os.path.join(self.folder, f"{what}-{self.rank()}")
        if not os.path.exists(path):
            return ""
        with open(path, encoding="utf-8") as file:
            text = file.read()
        os.unlink(path)
        return text or "due"

    def broken_reload(self, model: Any, weights: Any) -> None:
        self.reload(model, self.breaking(weights, self.due("load")))

    def breaking(self, weights: Any, raises_at: str) -> Iterator[tuple[str, Any]]:
        for name, tensor in weights:
            if name == raises_at:
                raise OSError(f"planted at {name}")
            yield name, tensor

    def broken_apply(self, plan: Any, targets: Any, pieces: Any) -> None:
        if self.due("copy"):
            for copy, values in list(zip(plan.copies, pieces, strict=True))[: len(plan.copies) // 2]:
                copy.write.on(targets[copy.target]).copy_(values)
            raise OSError("planted in the middle of the copies")
        self.apply(plan, targets, pieces)
        if self.due("flip"):
            import torch

            targets["model.norm.weight"].view(torch.int32)[0] ^= 1

    def broken_write(self, folder: str, receipt: Any) -> None:
        if self.due("silent"):
            raise OSError("planted: no receipt")
        self.write(folder, receipt)
