"""`ckptsync import`: an exported folder under a root again."""

from __future__ import annotations

import uuid
from typing import Annotated

import typer

from ..channel import Channel
from ..copies import import_version, read_export
from .output import AsJson, Root, bytes_bar, human_bytes, out, print_json


def run(
    root: Root,
    folder: Annotated[
        str,
        typer.Argument(metavar="DIR", help="A folder made by `ckptsync export`, or a copied data folder."),
    ],
    as_json: AsJson = False,
) -> None:
    """Publish an exported folder as a new version. Its content digest, step and metadata stay the same."""
    total = read_export(folder).nbytes
    channel = Channel.create(root)
    with bytes_bar("importing", total) as progress:
        manifest = import_version(channel, folder, f"import-{uuid.uuid4().hex[:12]}", progress)
    if as_json:
        print_json(
            {
                "version": manifest.id.label,
                "bytes": manifest.nbytes,
                "content_digest": manifest.content_digest,
            }
        )
        return
    out.print(f"{folder} is published as {manifest.id} ({human_bytes(manifest.nbytes)})")
