"""docs/grafana/ckptsync.json as data, and the two processes' metrics that it is drawn from."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsync import metrics
from ckptsync.delta.policy import DeltaPolicy
from ckptsync.errors import EngineDirty, InvalidInput
from ckptsync.publish import Publisher
from ckptsync.testing.engines import Failing
from tests.watcher.sidecars import running, serving, until
from watchers.metrics import Metrics
from watchers.watcher import Watcher

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana" / "ckptsync.json").read_text(encoding="utf-8"))


def panels() -> Iterator[dict[str, Any]]:
    for panel in DASHBOARD["panels"]:
        yield panel
        yield from panel.get("panels", ())


def queries() -> list[tuple[str, str, str]]:
    """(panel, expression, legend), without Grafana's variables."""
    return [(panel["title"], plain(target["expr"]), target["legendFormat"])
            for panel in panels() for target in panel.get("targets", ())]  # fmt: skip


def plain(expression: str) -> str:
    """As Grafana asks it with nothing selected."""
    return re.sub(r"\$(engine|channel)\b", ".*", expression.replace("$__rate_interval", "5m"))


@dataclass
class Scene:
    """`trainer` and `sidecar` answer `GET /metrics`."""

    trainer: str
    sidecar: str
    publisher: Publisher
    engine: Failing
    step: int = 0

    def go_on(self) -> None:
        """One version that is served, one that the engine fails to load, and a publish that fails."""
        self._publish()
        self.engine.fail("update", EngineDirty)
        self._publish(background=True)
        with pytest.raises(InvalidInput):
            self.publisher.publish({})

    def _publish(self, *, background: bool = False) -> None:
        self.step += 1
        weights = {"w": torch.full((256,), float(self.step))}
        if background:
            self.publisher.publish(weights, background=True).result(60)
            return
        label = self.publisher.publish(weights).version.label
        until(lambda: self.engine.label == label, 60)


@contextmanager
def on_the_air(folder: str) -> Iterator[Scene]:
    """A publisher and a sidecar, each with its /metrics, after `go_on`."""
    engine, watched = Failing(), Metrics()
    with Publisher(f"{folder}/root", delta=DeltaPolicy()) as publisher:
        watcher = Watcher(f"{folder}/root", engine, stage=f"{folder}/stage", poll=0.05, on_receipt=watched.observe)
        with (
            closing(watcher),
            metrics.serve(publisher.metrics, ":0") as trainer,
            serving(watcher, watched) as client,
            running(watcher),
        ):
            scene = Scene(trainer.url, str(client.base_url), publisher, engine)
            scene.go_on()
            yield scene
