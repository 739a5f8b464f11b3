"""`ckptsync export`: a version as a plain folder."""

from __future__ import annotations

from typing import Annotated

import typer

from ..channel import Channel
from ..copies import export_version
from .output import AsJson, Root, Version, bytes_bar, human_bytes, out, print_json


def run(
    root: Root,
    version: Version,
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A new or empty local folder.")],
    as_json: AsJson = False,
) -> None:
    """Copy a version into a folder that vLLM, SGLang and transformers open as it is. Verified while copied."""
    channel = Channel.open(root)
    manifest = channel.resolve(version)
    with bytes_bar(f"exporting {manifest.id}", manifest.nbytes) as progress:
        export_version(channel, manifest, folder, progress)
    if as_json:
        print_json({"version": manifest.id.label, "folder": folder, "bytes": manifest.nbytes})
        return
    out.print(f"{manifest.id} is in {folder} ({human_bytes(manifest.nbytes)}, verified)")
