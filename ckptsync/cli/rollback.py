"""`ckptsync rollback`: bring everybody who follows `latest` back to a version."""

from __future__ import annotations

from typing import Annotated

import typer

from ..rollback import roll_back
from .keys import RequireSignature, SignKey
from .newest import FENCED
from .output import AsJson, Root, Version, out, print_json
from .roots import existing


def run(
    root: Root,
    version: Version,
    why: Annotated[str, typer.Option(help="Recorded in the new version, for whoever wonders later.")] = "",
    require_signature: RequireSignature = None,
    sign_key: SignKey = None,
    as_json: AsJson = False,
) -> None:
    """Commit a new version with the weights of an earlier one. Every watcher that follows `latest` loads it; no byte is
    copied in the store.

    A trainer that still runs is fenced: its next publish fails. Started again, it goes on from the new version.
    """
    channel = existing(root, require_signature, sign_key)
    target = channel.resolve(version)
    new = roll_back(channel, target, why)
    before = new.producer["rollback"]["from"]
    if as_json:
        print_json({"version": new.id.label, "to": target.id.label, "from": before, "bytes_copied": 0})
        return
    out.print(f"{new.id} is committed: the weights of {target.id} after {before}, 0 bytes copied", highlight=False)
    out.print(FENCED, style="dim")
