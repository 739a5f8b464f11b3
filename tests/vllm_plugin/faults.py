"""A plugin of vLLM for tests only: what lies in the folder CKPTSYNC_TEST_FAULTS goes wrong in that rank.

copy-1      the copies of the plan end in the middle, once
load-1      the engine's own load raises at its first tensor, as long as the file is there
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any


def register() -> None:
    folder = os.environ.get("CKPTSYNC_TEST_FAULTS")
    if folder:
        import watchers.live.payload as payload
        import watchers.vllm_plugin.engine as engine

        Faults(folder, engine, payload)


class Faults:
    """Stands between the plugin and what it calls."""

    def __init__(self, folder: str, engine: Any, payload: Any) -> None:
        self.folder, self.rank = folder, -1
        self.receive = engine.CkptsyncWeightTransferEngine.receive_weights
        self.reload, self.apply = engine.reload, payload.apply
        faults = self

        def receive_weights(self: Any, update_info: Any) -> None:
            faults.rank = self._rank()
            faults.receive(self, update_info)

        engine.CkptsyncWeightTransferEngine.receive_weights = receive_weights
        engine.reload, payload.apply = self.broken_reload, self.broken_apply

    def path(self, what: str) -> str:
        return os.path.join(self.folder, f"{what}-{self.rank}")

    def broken_reload(self, model: Any, config: Any, weights: Any) -> None:
        self.reload(model, config, self.breaking() if os.path.exists(self.path("load")) else weights)

    def breaking(self) -> Iterator[tuple[str, Any]]:
        raise OSError("planted in the engine's own load")
        yield

    def broken_apply(self, plan: Any, targets: Any, pieces: Any) -> None:
        if os.path.exists(self.path("copy")):
            os.unlink(self.path("copy"))
            for copy, values in list(zip(plan.copies, pieces, strict=True))[: len(plan.copies) // 2]:
                copy.write.on(targets[copy.target]).copy_(values)
            raise OSError("planted in the middle of the copies")
        self.apply(plan, targets, pieces)
