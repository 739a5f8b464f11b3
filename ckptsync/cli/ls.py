"""`ckptsync ls`: what versions there are, which are live, and which are not whole."""

from __future__ import annotations

import time
from typing import Any

from rich.table import Table

from ..channel import Channel
from ..errors import Corrupt
from ..version import VersionId
from .output import AsJson, Root, human_bytes, human_seconds, out, print_json


def run(root: Root, as_json: AsJson = False) -> None:
    """List the versions of a channel, oldest first, and which trainer attempt went on from which version.

    A version of a branch that a newer trainer attempt left behind is marked `dead`; one whose manifest is not whole
    is marked `incomplete` and is never loaded.
    """
    channel = Channel.open(root)
    live = set(channel.versions())
    rows = [_row(channel, version, version in live) for version in channel.committed()]
    epochs = _epochs(channel)
    if as_json:
        print_json({"root": channel.store.url, "versions": rows, "epochs": epochs})
        return
    _print(channel.store.url, rows, epochs)


def _epochs(channel: Channel) -> list[dict[str, Any]]:
    """Every trainer attempt, also one that has published nothing yet; None for what no readable claim says."""
    claims = {**dict.fromkeys(version.epoch for version in channel.committed()), **channel.claims()}
    return [
        {
            "epoch": number,
            "resumed_from": str(claim.resumed_from) if claim and claim.resumed_from else None,
            "run_id": claim.run_id if claim else None,
            "host": claim.host if claim else None,
        }
        for number, claim in sorted(claims.items())
    ]


def _row(channel: Channel, version: VersionId, live: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "version": version.label,
        "epoch": version.epoch,
        "number": version.number,
        "live": live,
    }
    try:
        manifest = channel.manifest(version)
    except Corrupt as error:
        return {**row, "complete": False, "problem": str(error)}
    return {
        **row,
        "complete": True,
        "kind": manifest.kind,
        "step": manifest.step,
        "bytes": manifest.nbytes,
        "created": manifest.created,
        "run_id": manifest.run_id,
        "content_digest": manifest.content_digest,
        "metadata": manifest.metadata,
    }


def _print(url: str, rows: list[dict[str, Any]], epochs: list[dict[str, Any]]) -> None:
    if not rows:
        out.print(f"{url}: no versions yet")
        return
    table = Table(box=None, header_style="bold")
    for column in ("branch", "version", "kind", "step", "size", "age", "content", "state"):
        table.add_column(column, justify="right" if column in {"step", "size", "age"} else "left")
    newest = next((row["version"] for row in reversed(rows) if row["live"] and row["complete"]), None)
    for epoch in epochs:
        own = [row for row in rows if row["epoch"] == epoch["epoch"]]
        for at, row in enumerate(own):
            table.add_row(_branch(epoch, at, len(own)), *_cells(row, newest))
        if not own:
            table.add_row(_branch(epoch, 0, 1), *[""] * 6, "[dim]none yet[/]")
    out.print(table)


def _branch(epoch: dict[str, Any], at: int, count: int) -> str:
    """`e2 from e1-v5` at an attempt's first version, and a line down to its last."""
    if at:
        return "└" if at == count - 1 else "│"
    origin = f" from {epoch['resumed_from']}" if epoch["resumed_from"] else ""
    return f"e{epoch['epoch']}{origin}"


def _cells(row: dict[str, Any], newest: str | None) -> list[str]:
    if not row["complete"]:
        return [row["version"], "", "", "", "", "", f"[red]incomplete[/] {row['problem']}"]
    state = "[green]latest[/]" if row["version"] == newest else "" if row["live"] else "[dim]dead branch[/]"
    return [
        row["version"],
        row["kind"],
        "" if row["step"] is None else str(row["step"]),
        human_bytes(row["bytes"]),
        human_seconds(max(0.0, time.time() - row["created"])),
        row["content_digest"][:12],
        state,
    ]
