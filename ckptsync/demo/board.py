"""What the demo shows: one row per version, filled in as the trainer, the watcher and the engine report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..cli.output import human_bytes, human_seconds


@dataclass(slots=True)
class Row:
    """One version's life."""

    version: str
    loss: float | None = None
    nbytes: int = 0
    full_bytes: int = 0
    publish: float | None = None
    stage: float | None = None
    pause: float | None = None
    answer: str = ""


@dataclass(slots=True)
class Board:
    """The state of the demo, and how it looks."""

    engine: str
    base_answer: str = ""
    status: str = "starting"
    rows: dict[str, Row] = field(default_factory=dict)

    def published(self, event: dict[str, Any]) -> None:
        row = self._row(event["version"])
        row.loss, row.publish = event["loss"], sum(event["seconds"].values())
        row.nbytes, row.full_bytes = event["bytes"], event["full_bytes"]

    def loaded(self, receipt: dict[str, Any]) -> None:
        row = self._row(receipt["version"])
        row.stage, row.pause = receipt["stage_seconds"], receipt["pause_seconds"]

    def answered(self, version: str, answer: str) -> None:
        self._row(version).answer = answer

    def _row(self, version: str) -> Row:
        return self.rows.setdefault(version, Row(version))

    def __rich__(self) -> RenderableType:
        table = Table(header_style="bold", expand=False)
        for column in ("version", "loss", "bytes (of full)", "publish", "stage", "pause", "what the engine answers"):
            table.add_column(column, justify="left" if column in {"version", "what the engine answers"} else "right")
        table.add_row("base", "", "", "", "", "", self.base_answer)
        for row in self.rows.values():
            table.add_row(*_cells(row))
        head = Text(f"2 FSDP2 ranks -> channel -> watcher -> {self.engine}: what is the capital of France?")
        return Group(head, table, Text(self.status, style="dim"))


def _cells(row: Row) -> list[str]:
    def seconds(value: float | None) -> str:
        return "" if value is None else human_seconds(value)

    loss = "" if row.loss is None else f"{row.loss:.3f}"
    size = f"{human_bytes(row.nbytes)} ({row.nbytes / row.full_bytes:.0%})" if row.full_bytes else ""
    return [row.version, loss, size, seconds(row.publish), seconds(row.stage), seconds(row.pause), row.answer]
