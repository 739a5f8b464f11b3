"""`ckptsync ls`: what versions there are, which are live, and which are not whole."""

from __future__ import annotations

import time
from typing import Any

from rich.table import Table

from ..absent import why_none
from ..channel import Channel
from ..errors import Corrupt
from ..holds import collected_versions
from ..manifest import Origin
from ..replaced import replaced_manifests
from ..version import VersionId
from .keys import RequireSignature
from .output import AsJson, Root, human_bytes, human_seconds, out, print_json, print_wide
from .roots import existing


def run(root: Root, require_signature: RequireSignature = None, as_json: AsJson = False) -> None:
    """List the versions of a channel, oldest first, and which trainer attempt went on from which version.

    A version of a branch that a newer trainer attempt left behind is marked `dead`; one whose manifest is not whole
    is marked `incomplete` and is never loaded. With --require-signature that includes what no trusted key signed.
    """
    channel = existing(root, require_signature)
    live = set(channel.versions())
    rows = [_row(channel, version, version in live) for version in channel.committed()]
    rows += [{**_named(version, False), "complete": False, "problem": problem}
             for version, problem in replaced_manifests(channel.store).items()]  # fmt: skip
    rows.sort(key=lambda row: (row["epoch"], row["number"]))
    epochs = _epochs(channel)
    if as_json:
        print_json({"root": channel.store.url, "versions": rows, "epochs": epochs})
        return
    _print(channel.store.url, rows, epochs)


def _epochs(channel: Channel) -> list[dict[str, Any]]:
    """Every trainer attempt, also one without a version; None for what no readable claim says."""
    committed, noted = channel.committed(), list(collected_versions(channel.store))
    claims = {**dict.fromkeys(version.epoch for version in committed), **channel.claims()}
    why = why_none(claims, committed, noted)
    return [
        {
            "epoch": number,
            "resumed_from": str(claim.resumed_from) if claim and claim.resumed_from else None,
            "run_id": claim.run_id if claim else None,
            "host": claim.host if claim else None,
            "why_none": why.get(number),
        }
        for number, claim in sorted(claims.items())
    ]


def _named(version: VersionId, live: bool) -> dict[str, Any]:
    return {"version": version.label, "epoch": version.epoch, "number": version.number, "live": live}


def _row(channel: Channel, version: VersionId, live: bool) -> dict[str, Any]:
    row = _named(version, live)
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
        "stored_bytes": manifest.stored_bytes,
        "created": manifest.created,
        "run_id": manifest.run_id,
        "content_digest": manifest.content_digest,
        "metadata": manifest.metadata,
        "data_of": manifest.data_of.id.label if isinstance(manifest.data_of, Origin) else None,
    }


def _print(url: str, rows: list[dict[str, Any]], epochs: list[dict[str, Any]]) -> None:
    if not rows:
        away = " (a mistyped prefix looks the same)" if "://" in url else ""
        out.print(f"{url}: no versions yet{away}")
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
            table.add_row(_branch(epoch, 0, 1), *[""] * 6, f"[dim]{epoch['why_none']}[/]")
    print_wide(table)
    for row in rows:
        if not row["complete"]:
            out.print(f"{row['version']}: {row['problem']}", style="red", markup=False, highlight=False)


def _branch(epoch: dict[str, Any], at: int, count: int) -> str:
    """`e2 from e1-v5` at an attempt's first version, and a line down to its last."""
    if at:
        return "└" if at == count - 1 else "│"
    origin = f" from {epoch['resumed_from']}" if epoch["resumed_from"] else ""
    return f"e{epoch['epoch']}{origin}"


def _cells(row: dict[str, Any], newest: str | None) -> list[str]:
    if not row["complete"]:
        return [row["version"], "", "", "", "", "", "[red]incomplete[/]"]
    state = "[green]latest[/]" if row["version"] == newest else "" if row["live"] else "[dim]dead branch[/]"
    if row["data_of"]:
        state += f" = {row['data_of']}"
    return [
        row["version"],
        row["kind"],
        "" if row["step"] is None else str(row["step"]),
        human_bytes(row["stored_bytes"]),
        human_seconds(max(0.0, time.time() - row["created"])),
        row["content_digest"][:12],
        state.strip(),
    ]
