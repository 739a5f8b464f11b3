"""`ckptsync show`: one version in full."""

from __future__ import annotations

import time

import msgspec
from rich.table import Table

from ..channel import Channel
from ..manifest import Manifest
from .output import AsJson, Root, Version, human_bytes, out, print_json


def run(root: Root, version: Version = "latest", as_json: AsJson = False) -> None:
    """Show a version's manifest: where it came from, its files and its tensors."""
    manifest = Channel.open(root).resolve(version)
    if as_json:
        print_json({"version": manifest.id.label, **msgspec.to_builtins(manifest)})
        return
    _print_facts(manifest)
    _print_files(manifest)


def _print_facts(manifest: Manifest) -> None:
    created = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest.created))
    facts = {
        "version": f"{manifest.id} ({manifest.kind})",
        "step": manifest.step,
        "created": f"{created} by run {manifest.run_id}",
        "producer": ", ".join(f"{k} {v}" for k, v in sorted(manifest.producer.items())),
        "metadata": ", ".join(f"{k}={v}" for k, v in sorted(manifest.metadata.items())) or None,
        "content": manifest.content_digest,
        "folder": manifest.folder,
    }
    table = Table(box=None, show_header=False)
    for key, value in facts.items():
        if value is not None:
            table.add_row(f"[bold]{key}[/]", str(value))
    out.print(table)


def _print_files(manifest: Manifest) -> None:
    table = Table(box=None, header_style="bold")
    for column in ("track", "file", "size", "tensors", f"digest ({manifest.digest})"):
        table.add_column(column, justify="right" if column in {"size", "tensors"} else "left")
    for name, track in manifest.tracks.items():
        for file in track.files:
            count = sum(tensor.file == file.name for tensor in track.tensors)
            table.add_row(name, file.name, human_bytes(file.size), str(count or ""), file.digest)
    out.print(table)
