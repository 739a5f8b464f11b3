"""`ckptsync import`: an exported folder under a root again."""

from __future__ import annotations

import uuid
from typing import Annotated

import typer

from ..copies import import_version, read_export
from ..store import is_there, open_store
from .keys import SignKey
from .newest import FENCED
from .output import AsJson, Root, bytes_bar, human_bytes, out, print_json


def run(
    root: Root,
    folder: Annotated[
        str,
        typer.Argument(metavar="DIR", help="A folder made by `ckptsync export`, or a copied data folder."),
    ],
    sign_key: SignKey = None,
    as_json: AsJson = False,
) -> None:
    """Publish an exported folder as a new version. Its content digest, step and metadata stay the same.

    Every byte is verified before anything is written at ROOT; a trainer that still runs there is fenced then.
    """
    is_there(open_store(root))
    # Read once to find every byte right, and once to copy it.
    with bytes_bar("importing", 2 * read_export(folder).nbytes) as progress:
        manifest = import_version(root, folder, f"import-{uuid.uuid4().hex[:12]}", progress, sign_key=sign_key)
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
    if manifest.epoch > 1:
        out.print(FENCED, style="dim")
