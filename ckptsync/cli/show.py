"""`ckptsync show`: one version in full."""

from __future__ import annotations

import time

import msgspec
from rich.table import Column, Table

from ..manifest import Manifest, Origin
from ..wording import counted
from .keys import RequireSignature
from .output import AsJson, Root, Version, human_bytes, print_json, print_wide
from .roots import existing


def run(
    root: Root,
    version: Version = "latest",
    require_signature: RequireSignature = None,
    as_json: AsJson = False,
) -> None:
    """Show a version's manifest: where it came from, its files and its tensors."""
    manifest = existing(root, require_signature).resolve(version)
    if as_json:
        print_json({"version": manifest.id.label, **msgspec.to_builtins(manifest), "signed_by": _signed_by(manifest)})
        return
    _print_facts(manifest)
    _print_files(manifest)


def _print_facts(manifest: Manifest) -> None:
    created = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(manifest.created))
    facts = {
        "version": f"{manifest.id} ({manifest.kind})",
        "step": manifest.step,
        "created": f"{created} by run {manifest.run_id}",
        "rollback": _rollback(manifest),
        "producer": ", ".join(f"{k} {v}" for k, v in sorted(manifest.producer.items()) if k != "rollback" and v),
        "metadata": ", ".join(f"{k}={v}" for k, v in sorted(manifest.metadata.items())) or None,
        "canary": _canary(manifest),
        "content": manifest.content_digest,
        "signed by": _signed_by(manifest),
        "folder": manifest.folder,
        "trainer state": _trainer_state(manifest),
        "changes since": ", ".join(f"{base.id} ({human_bytes(base.nbytes)})" for base in manifest.deltas if base.files)
        or None,
    }
    table = Table("", Column(overflow="fold"), box=None, show_header=False)
    for key, value in facts.items():
        if value is not None:
            table.add_row(f"[bold]{key}[/]", str(value))
    print_wide(table)


def _signed_by(manifest: Manifest) -> str | None:
    """What the version says; with --require-signature it is true, or nothing is shown."""
    signature = msgspec.json.decode(manifest.encoded).get("signature")
    return f"key {signature['key_id']}" if isinstance(signature, dict) and "key_id" in signature else None


def _canary(manifest: Manifest) -> str | None:
    if manifest.canary is msgspec.UNSET:
        return None
    canary = manifest.canary
    tokens = counted(len(canary.output_ids), "token")
    return f"{tokens} after a prompt of {len(canary.prompt_ids)}, within {canary.atol:g}"


def _trainer_state(manifest: Manifest) -> str:
    files = manifest.trainer_state
    return f"{counted(len(files), 'file')}, {human_bytes(sum(file.size for file in files))}" if files else "none"


def _rollback(manifest: Manifest) -> str | None:
    if not isinstance(manifest.data_of, Origin):
        return None
    said = manifest.producer.get("rollback")
    if not isinstance(said, dict):
        return f"the weights of {manifest.data_of.id} again, in its folder"
    why = f": {said['why']}" if said.get("why") else ""
    return f"the weights of {manifest.data_of.id} again, in its folder; rolled back from {said.get('from')}{why}"


def _print_files(manifest: Manifest) -> None:
    table = Table(box=None, header_style="bold")
    for column in ("track", "file", "size", "tensors", f"digest ({manifest.digest})"):
        table.add_column(column, justify="right" if column in {"size", "tensors"} else "left")
    for name, track in manifest.tracks.items():
        for file in track.files:
            count = sum(tensor.file == file.name for tensor in track.tensors)
            table.add_row(name, file.name, human_bytes(file.size), str(count or ""), file.digest)
    print_wide(table)
