"""`ckptsync pin`: keep a version."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import holds
from .keys import RequireSignature
from .output import AsJson, Root, Version, out, print_json
from .roots import existing


def run(
    root: Root,
    version: Version,
    why: Annotated[str, typer.Option(help="For whoever wonders later, e.g. 'table 3 of the paper'.")],
    require_signature: RequireSignature = None,
    as_json: AsJson = False,
) -> None:
    """Keep a version, and what it is made from, whatever retention says, until `ckptsync unpin`."""
    channel = existing(root, require_signature)
    found = channel.resolve(version).id
    holds.pin(channel, found, why)
    if as_json:
        print_json({"version": found.label, "pinned": True, "why": why})
        return
    out.print(f"{found} is pinned: {why}", markup=False, highlight=False)
